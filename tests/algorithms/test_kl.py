"""KL estimators: values, gradients and what happens far away."""

import pytest
import torch

from rlflow.algorithms import kl_controller, kl_estimator

ZERO = torch.zeros(())


@pytest.mark.parametrize(
    ("name", "difference", "expected"),
    [("k1", 0.5, 0.5), ("k2", 0.5, 0.125), ("k3", 0.5, 0.106531), ("k1", -0.5, -0.5), ("k2", -0.5, 0.125),
     ("k3", -0.5, 0.148721), ("k1-straight-through", -0.5, -0.5)],
)  # fmt: skip
def test_values(name: str, difference: float, expected: float):
    """cases.md B14."""
    assert kl_estimator[name](torch.tensor(difference), ZERO).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("difference", "gradient"), [(-100.0, 0.0), (100.0, 1.0)])
def test_k3_is_finite_far_away(difference: float, gradient: float):
    """cases.md B14: forward and backward, with the gradient never turned around."""
    log_prob = torch.tensor(difference, requires_grad=True)
    value = kl_estimator["k3"](log_prob, ZERO)
    value.backward()
    assert torch.isfinite(value)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(gradient)


@pytest.mark.parametrize("difference", [-10.0, -19.5, 10.0, 19.5])
def test_the_clamp_does_not_touch_ordinary_differences(difference: float):
    exact = torch.tensor(difference, dtype=torch.float64)
    expected = torch.exp(-exact) + exact - 1
    assert kl_estimator["k3"](exact, ZERO).item() == pytest.approx(expected.item(), rel=1e-12)


def test_straight_through_has_the_gradient_of_k2():
    log_prob = torch.tensor(0.5, requires_grad=True)
    kl_estimator["k1-straight-through"](log_prob, ZERO).backward()
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kl", "n_sequences", "expected"),
    [(0.1, 1000, 0.2), (0.11, 1000, 0.202), (0.5, 1000, 0.204), (0.0, 1000, 0.196), (0.5, 5000, 0.22)],
)
def test_the_adaptive_controller_moves_towards_its_target(kl: float, n_sequences: int, expected: float):
    """algorithms.md: β·(1 + clip(KL/target − 1, ±.2)·n/horizon) with target .1, horizon 10,000: at the target nothing,
    10 % over it 1 %, far over or under it 2 % with 1,000 samples.
    """
    assert kl_controller["adaptive"](0.2, kl, n_sequences, 0.1, 10_000) == pytest.approx(expected)


def test_the_fixed_controller_stays():
    assert kl_controller["fixed"](0.2, 5.0, 1000, 0.1, 10_000) == 0.2
