"""How token losses become one number: a weight for each token, so that the loss is Σ weight·loss however it is cut.

The denominators are counted over the whole optimizer step, all micro-batches and data-parallel ranks, before any
division; nothing is divided afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.masked import Reduce, on_one_rank
from rlflow.algorithms.registry import Registry


def rows_count(mask: Tensor, lengths: Tensor) -> Tensor:
    """How many values of each row are true: bool [sum lengths] → int64 [n]."""
    counts = torch.nn.functional.pad(mask.long().cumsum(0), (1, 0))[lengths.cumsum(0)]
    return counts.diff(prepend=counts.new_zeros(1))


@dataclass(frozen=True)
class Totals:
    """Counts over everything that one optimizer step learns from."""

    tokens: float  # inside the mask
    sequences: float  # with at least one token inside the mask

    @classmethod
    def count(cls, mask: Tensor, lengths: Tensor, reduce: Reduce = on_one_rank) -> Totals:
        """Count a rank's tokens, `mask` bool [R] of rows with `lengths` [n], and sum over ranks."""
        per_sequence = rows_count(mask, lengths)
        local = torch.stack([per_sequence.sum(), (per_sequence > 0).sum()]).double()
        tokens, sequences = reduce(local).tolist()
        return cls(tokens, sequences)


Divisor = Callable[[Tensor, Totals, int | None], Tensor]  # (tokens of each token's row [R], totals, length) → [R]
aggregation: Registry[Divisor] = Registry("aggregation")


@aggregation("token-mean")
def token_mean(row_tokens: Tensor, totals: Totals, length: int | None) -> Tensor:
    """Σ / tokens."""
    return torch.full_like(row_tokens, totals.tokens)


@aggregation("seq-mean-token-mean")
def seq_mean_token_mean(row_tokens: Tensor, totals: Totals, length: int | None) -> Tensor:
    """The mean over sequences of each sequence's mean."""
    return row_tokens * totals.sequences


@aggregation("seq-mean-token-sum")
def seq_mean_token_sum(row_tokens: Tensor, totals: Totals, length: int | None) -> Tensor:
    """Σ / sequences."""
    return torch.full_like(row_tokens, totals.sequences)


@aggregation("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(row_tokens: Tensor, totals: Totals, length: int | None) -> Tensor:
    """Σ / (sequences · L) with a constant L, never a width of padding (Dr. GRPO)."""
    if length is None:
        raise ValueError("seq-mean-token-sum-norm needs aggregation_length, the constant that sums are divided by")
    return torch.full_like(row_tokens, totals.sequences * length)


def aggregation_weights(
    mode: str, mask: Tensor, lengths: Tensor, totals: Totals, *, length: int | None = None
) -> Tensor:
    """Weight of each token, float32 [R], 0 outside the mask; `mask` bool [R] of rows with `lengths` [n].

    Raises ValueError for an unknown mode and for seq-mean-token-sum-norm without `length`.
    """
    row_tokens = torch.repeat_interleave(rows_count(mask, lengths), lengths).double()
    divisors = aggregation[mode](row_tokens, totals, length)
    return torch.where(mask, 1 / divisors, 0.0).float()
