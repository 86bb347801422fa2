"""What a reward function needs of a row, so that data without it are refused before anything starts.

A function declares columns with `reads`, and with `compares_with_answer` that it cannot do without the answer; what is
declared is looked for by the configuration's check, which knows a file's columns, and in each row by `data`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rlflow.config.schema import Reward
from rlflow.rewards.resolve import resolve

Function = TypeVar("Function", bound=Callable[..., Any])
ATTRIBUTE, NEEDS_ANSWER = "columns_read", "needs_answer"


def reads(*columns: str) -> Callable[[Function], Function]:
    """Declare the columns that the decorated function needs in every row; `column.key` is one of a mapping's keys."""

    def declare(function: Function) -> Function:
        setattr(function, ATTRIBUTE, columns)
        return function

    return declare


def compares_with_answer(function: Function) -> Function:
    """Declare that `function` has no meaning where `answer` is None for all rows."""
    setattr(function, NEEDS_ANSWER, True)
    return function


def needs_answer(reward: Reward) -> bool:
    """Whether the function declares that; raises UserError as `resolve` does."""
    return getattr(resolve(reward).func, NEEDS_ANSWER, False)


def columns_read(rewards: Sequence[Reward]) -> list[tuple[str, str]]:
    """(column, key of the configuration that asks for it) of all functions; raises UserError as `resolve` does."""
    return [
        (column, f"rewards.{number}.function")
        for number, reward in enumerate(rewards)
        for column in getattr(resolve(reward).func, ATTRIBUTE, ())
    ]
