"""Statistics over the positions of a mask, and over ranks; what lies outside, NaN included, never reaches them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]  # sums a tensor over data-parallel ranks


def on_one_rank(values: Tensor) -> Tensor:
    """The `Reduce` of a single rank."""
    return values


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with zeros outside the mask. Selection, not multiplication: NaN times 0 is NaN."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def whiten(values: Tensor, mask: Tensor, reduce: Reduce = on_one_rank) -> Tensor:
    """(x − mean) / sqrt(sample variance + 1e-8) over the mask on all ranks; 0 outside it.

    One position alone has no variance and is only shifted.
    """
    exact = masked(values, mask).double()
    count, total = reduce(torch.stack([mask.sum().double(), exact.sum()]))
    centred = masked(exact - total / count.clamp(min=1), mask)
    variance = reduce(centred.square().sum()) / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, torch.rsqrt(variance + 1e-8), 1.0)
    return (centred * scale).to(values.dtype)
