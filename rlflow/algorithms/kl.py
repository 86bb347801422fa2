"""Per-token estimates of KL(policy ‖ reference) and the coefficient that weighs them (Schulman 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.algorithms.registry import Registry

KLEstimator = Callable[[Tensor, Tensor], Tensor]  # (log_probs, ref_log_probs) → estimate, elementwise
kl_estimator: Registry[KLEstimator] = Registry("KL estimator")

# (coefficient, mean KL of a token, samples of the step, target, horizon) → the next step's coefficient
KLController = Callable[[float, float, int, float, float], float]
kl_controller: Registry[KLController] = Registry("KL controller")


@kl_estimator("k1")
def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Δ = lp − ref: unbiased, of either sign. As a loss term its expected gradient is zero."""
    return log_probs - ref_log_probs


@kl_estimator("k2")
def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Δ²/2: biased, but its gradient is that of the KL divergence."""
    return (log_probs - ref_log_probs).square() / 2


@kl_estimator("k3")
def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """e^(−Δ) + Δ − 1: unbiased and never negative.

    Δ below −20 is clamped as a whole: e^20 is finite, and a clamp of the exponent alone would turn the gradient around.
    """
    difference = (log_probs - ref_log_probs).clamp(min=-20)
    return torch.expm1(-difference) + difference


@kl_estimator("k1-straight-through")
def k1_straight_through(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2."""
    carrier = k2(log_probs, ref_log_probs)
    return carrier + (k1(log_probs, ref_log_probs) - carrier).detach()


@kl_controller("fixed")
def fixed(coefficient: float, kl: float, n_sequences: int, target: float, horizon: float) -> float:
    """The coefficient stays."""
    return coefficient


@kl_controller("adaptive")
def adaptive(coefficient: float, kl: float, n_sequences: int, target: float, horizon: float) -> float:
    """β · (1 + clip(KL / target − 1, ±0.2) · n_sequences / horizon): towards the target KL (Ziegler et al. 2019).

    Positive as long as a step has fewer than 5 · horizon samples.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * n_sequences / horizon)
