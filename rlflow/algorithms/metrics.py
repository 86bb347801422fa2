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
    Means are over the tokens that were computed; without any they are left out, and `actor/trainable_tokens` is 0.
    """
    tokens = metrics["tokens"]
    shown = {"actor/trainable_tokens": tokens}
    shown |= {
        f"actor/{name}": metrics[name] / updates for name in ("loss", "policy_loss", "kl_loss") if name in metrics
    }
    if not tokens:
        return shown
    shown |= {f"actor/{name}": metrics[name] / tokens for name in ("kl", "entropy") if name in metrics}
    shown["actor/clip_fraction"] = metrics["clipped"] / tokens
    shown["actor/ratio_error_max"] = metrics["ratio_error_max"]
    if "mismatch_abs" in metrics:
        squares = max(metrics["mismatch_weight_squared"], 1e-30)
        shown["mismatch/log_prob_mean"] = metrics["mismatch_abs"] / tokens
        shown["mismatch/log_prob_max"] = metrics["mismatch_abs_max"]
        shown["mismatch/kl"] = metrics["mismatch_kl"] / tokens
        shown["mismatch/effective_sample_size"] = metrics["mismatch_weight"] ** 2 / squares / tokens
        shown["mismatch/cut_fraction"] = metrics["mismatch_cut"] / tokens
    return shown
