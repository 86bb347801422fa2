"""The critic's objective: the clipped value loss, its gradient, and metrics that do not depend on the cut."""

import math

import pytest
import torch
from torch import Tensor

from rlflow.algorithms import ValueObjective, combine, summarize

NAN = math.nan


def fields(**changes: Tensor) -> dict[str, Tensor]:
    """Four tokens of one sequence, the last outside the mask; token-mean over the other three."""
    given = {
        "mask": torch.tensor([True, True, True, False]),
        "weights": torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]),
        "returns": torch.tensor([1.0, 1.0, 0.0, NAN]),
        "old_values": torch.tensor([0.0, 0.0, 0.5, NAN]),
        "sample_index": torch.tensor([0, 0, 0, 0]),
    }
    return given | changes


def values(numbers: tuple[float, ...] = (0.2, 0.9, 0.5, NAN)) -> Tensor:
    return torch.tensor(numbers, requires_grad=True)


def learn(objective: ValueObjective, given: dict[str, Tensor], current: Tensor) -> tuple[float, list[float]]:
    loss, _ = objective(current, None, given)
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad.tolist()


def shown(metrics: dict[str, Tensor], updates: int = 1) -> dict[str, float]:
    return summarize({name: value.item() for name, value in metrics.items()}, updates, role="critic")


def test_half_the_squared_error_without_a_clip():
    """(.8² + .1² + .5²) / 2 / 3, gradient (V − R)/3; nan outside the mask reaches neither (cases.md B01)."""
    loss, gradient = learn(ValueObjective(value_clip=None), fields(), values())
    assert loss == pytest.approx(0.15)
    assert gradient == pytest.approx([-0.8 / 3, -0.1 / 3, 0.5 / 3, 0])


def test_a_value_that_moved_too_far_towards_its_return_is_held():
    """c = .5: the second value has moved by .9, is taken for .5 and so has the loss of .5, without a gradient."""
    loss, gradient = learn(ValueObjective(), fields(), values())
    assert loss == pytest.approx((0.64 + 0.25 + 0.25) / 6)
    assert gradient == pytest.approx([-0.8 / 3, 0, 0.5 / 3, 0])


def test_a_value_that_moved_away_from_its_return_is_brought_back():
    """The maximum keeps the larger error: V = −.9, clipped −.5, R = 1: 1.9²/2, with its gradient."""
    loss, gradient = learn(ValueObjective(), fields(), values((0.2, -0.9, 0.5, NAN)))
    assert loss == pytest.approx((0.64 + 1.9**2 + 0.25) / 6)
    assert gradient[1] == pytest.approx(-1.9 / 3)


@pytest.mark.parametrize(("second", "fraction"), [(0.9, 1 / 3), (-0.9, 1 / 3), (0.4, 0)])
def test_clip_fraction_looks_at_the_change_before_clipping(second: float, fraction: float):
    """After clipping no value differs by more than c from its old one, and the fraction would always be 0."""
    _, metrics = ValueObjective()(values((0.2, second, 0.5, NAN)), None, fields())
    assert shown(metrics)["critic/clip_fraction"] == pytest.approx(fraction)
    _, metrics = ValueObjective(value_clip=None)(values((0.2, second, 0.5, NAN)), None, fields())
    assert shown(metrics)["critic/clip_fraction"] == 0


def test_metrics_have_the_critics_names():
    """Values .2, .9, .5 and returns 1, 1, 0: Var(R) = 2/9, errors .8, .1, −.5 of variance .3 − .0178 = .2822."""
    _, metrics = ValueObjective()(values(), None, fields())
    expected = {
        "critic/trainable_tokens": 3, "critic/loss": 0.19, "critic/clip_fraction": 1 / 3, "critic/value": 1.6 / 3,
        "critic/return": 2 / 3, "critic/explained_variance": 1 - (0.3 - (0.4 / 3) ** 2) / (2 / 9),
    }  # fmt: skip
    assert shown(metrics) == pytest.approx(expected, abs=1e-6)


def test_a_critic_that_knows_the_returns_explains_all_of_their_variance():
    _, metrics = ValueObjective()(torch.tensor([1.0, 1.0, 0.0, NAN]), None, fields())
    assert shown(metrics)["critic/explained_variance"] == 1


def test_equal_returns_have_no_variance_to_explain():
    _, metrics = ValueObjective()(values(), None, fields(returns=torch.full((4,), 0.7)))
    assert "critic/explained_variance" not in shown(metrics)


def test_large_returns_keep_their_variance():
    """Returns 10⁴ and 10⁴ + 1/64: a float32 cannot tell their squares apart, sums in float64 can."""
    count = 4096
    returns = 1e4 + torch.arange(count).remainder(2) / 64
    given = {
        "mask": torch.ones(count, dtype=torch.bool), "weights": torch.full((count,), 1 / count),
        "returns": returns, "old_values": returns - 1 / 4,
    }  # fmt: skip
    _, metrics = ValueObjective()(torch.full((count,), 1e4), None, given)
    assert shown(metrics)["critic/explained_variance"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3], [0, 4], [1, 1, 1, 1]])
def test_micro_batches_change_nothing(split: list[int]):
    """cases.md B09, B11, for the critic."""
    whole_loss, whole_gradient = learn(ValueObjective(), fields(), values())
    _, whole = ValueObjective()(values(), None, fields())
    current, parts = values(), []
    cuts = zip(current.split(split), *(field.split(split) for field in fields().values()), strict=True)
    for part, *cut in cuts:
        loss, metrics = ValueObjective()(part, None, dict(zip(fields(), cut, strict=True)))
        loss.backward(retain_graph=True)
        parts.append(metrics)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx(whole_gradient)
    combined = combine(parts)
    assert combined["loss"].item() == pytest.approx(whole_loss)
    assert shown(combined) == pytest.approx(shown(whole), abs=1e-6)


def test_nothing_trainable_gives_zero_loss_and_zero_gradient():
    """cases.md B02."""
    nothing = fields(mask=torch.zeros(4, dtype=torch.bool), weights=torch.zeros(4))
    loss, gradient = learn(ValueObjective(), nothing, values())
    assert loss == 0
    assert gradient == [0, 0, 0, 0]
    _, metrics = ValueObjective()(values(), None, nothing)
    assert shown(metrics) == {"critic/trainable_tokens": 0, "critic/loss": 0}
