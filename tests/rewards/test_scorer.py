"""Mixing rewards: weights, metrics, what cannot be scored, and functions that fail."""

import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.config import Reward
from rlflow.config.document import parse
from rlflow.errors import UserError
from rlflow.rewards.scorer import Scorer
from tests.config.examples import ROOT
from tests.rewards.samples import sample

nan, inf = math.nan, math.inf


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module `given` whose functions a test adds."""
    module = ModuleType("given")
    monkeypatch.setitem(sys.modules, "given", module)
    return module


def score_with(functions: ModuleType, results: list[Any]) -> tuple[list[float | None], dict[str, float]]:
    """The rewards of samples for which the function returns, or raises, each of `results`."""

    def function(response: str, answer: Any, *, row: dict[str, Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    functions.function = function  # type: ignore[attr-defined]
    samples = [sample("", result) for result in results]
    counts = Scorer([Reward("given:function")]).score(samples)
    return [item.reward for item in samples], counts


def test_scores_are_weighted_and_recorded(functions: ModuleType) -> None:
    functions.length = lambda response, answer, *, row: {"score": len(response), "long": len(response) > 2}  # type: ignore[attr-defined]
    functions.level = lambda response, answer, *, row, factor: factor * row["level"]  # type: ignore[attr-defined]
    functions.seen = lambda response, answer, *, row: answer  # type: ignore[attr-defined]
    rewards = [
        Reward("given:length", 0.5),
        Reward("given:level", 2.0, name="difficulty", args={"factor": 10}),
        Reward("given:seen", 0.0),
    ]
    item = sample("four", 7, {"level": 3})
    assert Scorer(rewards).score([item]) == {"reward/errors": 0.0, "reward/unscorable": 0.0}
    assert item.reward == 0.5 * 4 + 2.0 * 30
    assert item.scores == {"length": 4.0, "length/long": 1.0, "difficulty": 30.0, "seen": 7.0}


def test_what_is_no_score_leaves_the_sample_out(functions: ModuleType) -> None:
    """cases.md E08, B17: None, NaN and infinities are unscorable; booleans and scalars of numpy are numbers."""
    results = [
        None,
        nan,
        inf,
        -inf,
        {"score": None},
        True,
        np.float32(0.5),
        np.bool_(False),
        np.int64(2),
        torch.tensor(3.0),
    ]
    rewards, counts = score_with(functions, results)
    assert rewards == [None] * 5 + [1.0, 0.5, 0.0, 2.0, 3.0]
    assert all(type(reward) is float for reward in rewards[5:])
    assert counts == {"reward/errors": 0.0, "reward/unscorable": 5.0}


def test_an_unscorable_metric_does_not_lose_the_reward(functions: ModuleType) -> None:
    functions.main = lambda response, answer, *, row: 1.0  # type: ignore[attr-defined]
    functions.extra = lambda response, answer, *, row: None  # type: ignore[attr-defined]
    item = sample("")
    Scorer([Reward("given:main"), Reward("given:extra", 0.0)]).score([item])
    assert (item.reward, item.scores) == (1.0, {"main": 1.0})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], "must be a number or None, not list"),
        ("1.0", "must be a number or None, not str"),
        (np.array([1.0]), "must be a number or None, not ndarray"),
        ({"format": 1.0}, """returned a dict without "score": ['format']"""),
        ({"score": 1.0, "format": "good"}, "must be a number or None, not str"),
    ],
)
def test_other_results_are_errors(functions: ModuleType, result: Any, message: str) -> None:
    """cases.md E08: a list for the batch is none of a sample."""
    with pytest.raises(UserError) as raised:
        score_with(functions, [1.0, result])
    assert raised.value.where.startswith("reward function")
    assert raised.value.message.startswith(message)


def test_an_exception_loses_one_sample(functions: ModuleType) -> None:
    """cases.md E08, E06: counted apart from wrong answers."""
    rewards, counts = score_with(functions, [1.0, 0.0, ValueError("bad"), 1.0, 0.5])
    assert rewards == [1.0, 0.0, None, 1.0, 0.5]
    assert counts == {"reward/errors": 1.0, "reward/unscorable": 1.0}


def test_more_than_a_fifth_of_exceptions_stop_the_run(functions: ModuleType) -> None:
    results = [1.0] * 8 + [ValueError("a"), ValueError("b")]
    assert score_with(functions, results)[1]["reward/errors"] == 2
    with pytest.raises(UserError, match=r"failed in 3 of the last 11 calls, the last on train/0 with ValueError: c"):
        score_with(functions, [*results, ValueError("c")])


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/adding_a_reward.md").read_text()
    code, settings = re.findall(r"```(?:python|yaml)\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = [Reward(**entry) for entry in parse(settings)["rewards"]]
    item = sample("It is \\boxed{5}\n5", 5)
    Scorer(rewards).score([item])
    assert item.reward == 1.5
    assert item.scores == {"short_and_right": 1.0, "short_and_right/short": 1.0, "math": 1.0, "math/format": 1.0}
