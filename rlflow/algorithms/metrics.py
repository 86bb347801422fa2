"""Metrics that stay exact over micro-batches and ranks: sums and maxima are combined, and divided once at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def is_maximum(name: str) -> bool:
    """Metrics named …_max are combined by maximum, all others by addition."""
    return name.endswith("_max")


def combine(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Metrics of several micro-batches as those of one."""
    combined: dict[str, Tensor] = {}
    for name in parts[0] if parts else ():
        stacked = torch.stack([part[name] for part in parts])
        combined[name] = stacked.amax(0) if is_maximum(name) else stacked.sum(0)
    return combined


def summarize(metrics: Mapping[str, float], updates: int = 1) -> dict[str, float]:
    """Combined metrics of one or several optimizer steps → means over their tokens, under the names that are shown.

    Loss terms carry global weights: their sum is the loss of an optimizer step, and they are only averaged over those.
    Without a single token the means are 0, and `actor/trainable_tokens` says so.
    """
    tokens = metrics["tokens"]
    per_token = max(tokens, 1.0)
    shown = {"actor/trainable_tokens": tokens}
    shown |= {
        f"actor/{name}": metrics[name] / updates for name in ("loss", "policy_loss", "kl_loss") if name in metrics
    }
    shown |= {f"actor/{name}": metrics[name] / per_token for name in ("kl", "entropy") if name in metrics}
    shown["actor/clip_fraction"] = metrics["clipped"] / per_token
    shown["actor/ratio_error_max"] = metrics["ratio_error_max"]
    if "mismatch_abs" in metrics:
        squares = max(metrics["mismatch_weight_squared"], 1e-30)
        shown["mismatch/log_prob_mean"] = metrics["mismatch_abs"] / per_token
        shown["mismatch/log_prob_max"] = metrics["mismatch_abs_max"]
        shown["mismatch/kl"] = metrics["mismatch_kl"] / per_token
        shown["mismatch/effective_sample_size"] = metrics["mismatch_weight"] ** 2 / squares / per_token
        shown["mismatch/cut_fraction"] = metrics["mismatch_cut"] / per_token
    return shown
