"""Responses judged by reasoning-gym's own verifiers; skipped where the package is not installed."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlflow.config import Reward
from rlflow.errors import UserError
from rlflow.rewards.resolve import resolve
from rlflow.rewards.scorer import Scorer
from tests.config.examples import faults
from tests.rewards.samples import sample

NAME = "rlflow.rewards.reasoning_gym:verified"
CHAIN_SUM = {"question": "State the final answer …: 8 + 5 - 4 =", "metadata": {"source_dataset": "chain_sum"}}
COUNTDOWN = {
    "question": "Use 3, 5 and 7 to make 22",
    "metadata": {"source_dataset": "countdown", "numbers": [3, 5, 7], "target": 22},
}
Score = Callable[..., dict[str, float]]


@pytest.fixture
def verified() -> Score:
    pytest.importorskip("reasoning_gym")
    return resolve(Reward(NAME))


@pytest.mark.parametrize(("response", "score"), [("9", 1), (" 09.0\n", 1), ("-9", 0), ("nine", 0)])
def test_the_verifier_of_the_task_judges(verified: Score, response: str, score: float) -> None:
    """chain_sum compares numbers, not text."""
    assert verified(response, "9", row=CHAIN_SUM, exact=True) == {"score": score, "format": 1}


def test_what_only_contains_the_answer_gets_its_share_unless_exact(verified: Score) -> None:
    """reasoning-gym's share is the answer's length over the response's."""
    assert verified("-9", "9", row=CHAIN_SUM)["score"] == 1 / 2
    assert verified("It is 9", "9", row=CHAIN_SUM)["score"] == 1 / 7
    assert verified("It is 9", "9", row=CHAIN_SUM, exact=True)["score"] == 0


def test_the_answer_may_stand_in_a_tag(verified: Score) -> None:
    response = "First 13.\n<answer>8</answer> no: <answer> 9 </answer>."
    assert verified(response, "9", row=CHAIN_SUM, tag="answer") == {"score": 1, "format": 1}
    assert verified("9", "9", row=CHAIN_SUM, tag="answer") == {"score": 0, "format": 0}
    assert verified(" \n", "9", row=CHAIN_SUM) == {"score": 0, "format": 0}


@pytest.mark.parametrize(("expression", "score"), [("3 * 5 + 7", 1), ("7 + 5*3", 1), ("3 + 5 + 7", 0), ("22", 0)])
def test_a_task_may_have_many_right_answers(verified: Score, expression: str, score: float) -> None:
    """countdown computes the expression and looks which numbers are in it."""
    assert verified(expression, "7 + 3*5", row=COUNTDOWN, exact=True)["score"] == score


def test_it_is_a_source_of_reward(verified: Score) -> None:
    item = sample("9", "9", CHAIN_SUM)
    Scorer([Reward(NAME, args={"exact": True})]).score([item])
    assert item.reward == 1
    assert item.scores == {"verified": 1, "verified/format": 1}


def test_data_of_other_origin_are_refused_before_anything_starts(verified: Score, tmp_path: Path) -> None:
    """Rows must name their task, as tools/make_reasoning_gym.py writes them."""
    found = faults(tmp_path, "data.evaluation=null", rewards=[{"function": NAME}])
    there = f"of each row; {tmp_path / 'train.jsonl'} has prompt, answer"
    assert found == [
        f"rewards.0.function: reads {column} {there}" for column in ("question", "metadata.source_dataset")
    ]


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.delitem(sys.modules, "rlflow.rewards.reasoning_gym", raising=False)
    with pytest.raises(UserError, match=r"reasoning-gym cannot be imported; install rlflow with its extra") as raised:
        resolve(Reward(NAME))
    assert raised.value.where == "function"
