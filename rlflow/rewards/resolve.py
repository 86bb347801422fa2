"""From the `module:function` of a configuration to the callable, with errors that say what was meant."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

from rlflow.config.faults import nearest
from rlflow.config.schema import Reward
from rlflow.errors import UserError

RewardFunction = Callable[..., Any]
"""`function(response: str, answer, *, row: dict, **args)` to a float, None or a dict with "score"."""


def resolve(reward: Reward) -> partial[Any]:
    """The function with its `args` bound; raises UserError whose `where` is the key of `reward` that is wrong."""
    module_name, colon, name = reward.function.partition(":")
    if not (module_name and colon and name):
        raise UserError("function", f"{reward.function!r} must be written module:function{_built_in(reward.function)}")
    function = getattr(_import(module_name), name, None)
    if not callable(function):
        similar = nearest(name, _functions(importlib.import_module(module_name)))
        meant = f"; nearest: {similar}" if similar else ""
        raise UserError("function", f"{module_name} has no function {name}{meant}")
    _check_arguments(function, reward)
    return partial(function, **reward.args)


def _import(module_name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise UserError("function", f"importing {module_name} failed: {type(error).__name__}: {error}") from error


def _check_arguments(function: RewardFunction, reward: Reward) -> None:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise UserError("function", f"{reward.function} must return its score: no `async def`, no `yield`")
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # some functions written in C do not tell
        raise UserError("function", f"{reward.function} does not tell its parameters") from error
    parameters = signature.parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    options = [name for name in list(parameters)[2:] if name != "row"]
    for name in reward.args:
        if not open_ended and name not in options:
            meant = nearest(name, options) or ", ".join(options) or "none"
            raise UserError("args", f"{reward.function} takes no argument {name}; nearest: {meant}")
    try:
        signature.bind("response", "answer", row={}, **reward.args)
    except TypeError as error:
        rule = f"{reward.function} must be callable as (response, answer, *, row, **args): {error}"
        raise UserError("function", rule) from error


def _functions(module: ModuleType) -> Iterator[str]:
    return (name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))


def _built_in(name: str) -> str:
    meant = nearest(name, _functions(importlib.import_module("rlflow.rewards")))
    return f"; nearest: rlflow.rewards:{meant}" if meant else ""
