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


LOSSES = ("loss", "policy_loss", "kl_loss")
TOKEN_MEANS = {"kl": "kl", "entropy": "entropy", "clipped": "clip_fraction", "values": "value", "returns": "return"}


def summarize(metrics: Mapping[str, float], updates: int = 1, role: str = "actor") -> dict[str, float]:
    """Combined metrics of one or several optimizer steps → means over their tokens, under the names that are shown.

    Loss terms carry global weights: their sum is the loss of an optimizer step, and they are only averaged over those.
    Means are over the tokens that were computed; without any they are left out, and `<role>/trainable_tokens` is 0.
    """
    tokens = metrics["tokens"]
    shown = {f"{role}/trainable_tokens": tokens}
    shown |= {f"{role}/{name}": metrics[name] / updates for name in LOSSES if name in metrics}
    if not tokens:
        return shown
    shown |= {f"{role}/{mean}": metrics[name] / tokens for name, mean in TOKEN_MEANS.items() if name in metrics}
    if "ratio_error_max" in metrics:
        shown[f"{role}/ratio_error_max"] = metrics["ratio_error_max"]
    if "mismatch_abs" in metrics:
        shown |= _mismatch(metrics, tokens)
    if "value_errors" in metrics:
        shown |= {f"{role}/{name}": value for name, value in _explained_variance(metrics, tokens).items()}
    return shown


def _mismatch(metrics: Mapping[str, float], tokens: float) -> dict[str, float]:
    squares = max(metrics["mismatch_weight_squared"], 1e-30)
    return {
        "mismatch/log_prob_mean": metrics["mismatch_abs"] / tokens,
        "mismatch/log_prob_max": metrics["mismatch_abs_max"],
        "mismatch/kl": metrics["mismatch_kl"] / tokens,
        "mismatch/effective_sample_size": metrics["mismatch_weight"] ** 2 / squares / tokens,
        "mismatch/cut_fraction": metrics["mismatch_cut"] / tokens,
    }


def _explained_variance(metrics: Mapping[str, float], tokens: float) -> dict[str, float]:
    """1 − Var(R − V) / Var(R) over all tokens; nothing where all returns are equal."""
    returns = _variance(metrics["returns"], metrics["returns_squared"], tokens)
    errors = _variance(metrics["value_errors"], metrics["value_errors_squared"], tokens)
    return {"explained_variance": 1 - errors / returns} if returns > 0 else {}


def _variance(total: float, squares: float, count: float) -> float:
    """The variance of `count` values from the sums of them and of their squares; 0 where it is but rounding."""
    variance = squares / count - (total / count) ** 2
    return variance if variance > 1e-13 * squares / count else 0.0
