"""Per-token estimates of KL(policy ‖ reference) and the coefficient that weighs them (Schulman 2020)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlflow.algorithms.registry import Registry

KLEstimator = Callable[[Tensor, Tensor], Tensor]  # (log_probs, ref_log_probs) → estimate, elementwise
kl_estimator: Registry[KLEstimator] = Registry("KL estimator")


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
