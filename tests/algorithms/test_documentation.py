"""docs/adding_an_algorithm.md names everything that is registered, and its examples run as they stand there."""

import math
import re
from pathlib import Path

import pytest
import torch

from rlflow.algorithms import Scored, advantages, aggregation, compute_advantages, kl, policy_losses
from rlflow.algorithms.policy_losses import PolicyTerms
from rlflow.algorithms.registry import Registry

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "adding_an_algorithm.md"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The document's code; what it registers is forgotten after the test."""
    for registry in (advantages.advantage, policy_losses.policy_loss):
        monkeypatch.setattr(registry, "_functions", dict(registry._functions))
    return re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_the_advantage(examples: list[str]):
    exec(examples[0], dict(vars(advantages)))
    rewards = torch.tensor([1.0, 0.0, math.nan])
    scored = Scored(rewards, torch.zeros(3, dtype=torch.int64), torch.tensor([1, 2, 1]), torch.arange(3))
    found = compute_advantages("best_of_group", scored)
    assert found.values.tolist() == [0, -1, -1, 0]
    assert found.included.tolist() == [True, True, True, False]


def test_the_policy_loss(examples: list[str]):
    exec(examples[1], dict(vars(policy_losses)))
    terms = PolicyTerms(
        torch.tensor([2.0]).log(), torch.zeros(1), torch.ones(1), torch.ones(1, dtype=torch.bool), torch.tensor([0])
    )
    assert policy_losses.policy_loss["squared"](terms).loss.item() == pytest.approx(-2 + 0.5)


@pytest.mark.parametrize(
    "known",
    [advantages.advantage, policy_losses.policy_loss, kl.kl_controller, kl.kl_estimator, aggregation],
    ids=lambda known: known.kind,
)
def test_every_registered_name_has_its_formula(known: Registry):
    table = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    for name in known.names():
        assert any(f"`{name}`" in line for line in table), name
