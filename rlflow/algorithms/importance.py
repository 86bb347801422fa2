"""The gap between the log-probs of trainer and rollout engine: always measured, corrected on request."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.algorithms.masked import masked
from rlflow.algorithms.policy_losses import bounded_exp


def truncated_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float) -> Tensor:
    """min(exp(old − roll), cap) for each token, detached: truncated importance sampling (Yao et al. 2025)."""
    return bounded_exp(old_log_probs - rollout_log_probs).clamp(max=cap).detach()


def mismatch_metrics(
    old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, cap: float | None
) -> dict[str, Tensor]:
    """Sums over tokens from which `metrics.summarize` makes the gap's mean, maximum, KL and effective sample size.

    KL(rollout ‖ trainer) is estimated by w − 1 − log w with w = exp(old − roll), tokens being sampled by the rollout.
    """
    log_weight = masked(old_log_probs - rollout_log_probs, mask).detach()
    weight = masked(bounded_exp(log_weight), mask)
    bounded = log_weight.clamp(-20, 20)
    cut = torch.zeros_like(mask) if cap is None else weight > cap
    return {
        "mismatch_abs": log_weight.abs().sum(),
        "mismatch_abs_max": torch.nn.functional.pad(log_weight.abs(), (0, 1)).max(),
        "mismatch_kl": (torch.expm1(bounded) - bounded).sum(),
        "mismatch_weight": weight.sum(),
        "mismatch_weight_squared": weight.square().sum(),
        "mismatch_cut": cut.sum(),
    }
