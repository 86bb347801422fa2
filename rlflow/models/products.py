"""Matrix products of half-precision matrices whose results keep float32, as the units that multiply them do inside."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CACHED_ELEMENTS = 2**21
"""Of a sum that is added to on a CPU at once, so that it stays in its cache."""


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """left [M, K] · right [K, N] in float32, without a rounding to the factors' dtype on the way."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [M, N] += left [M, K] · right [K, N], where the factors may be of lower precision than the total."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and _adds_to_float32(total.device):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        rows = CACHED_ELEMENTS // total.shape[1] if total.device.type == "cpu" else len(total)
        for part, factor in zip(total.split(max(1, rows)), left.split(max(1, rows)), strict=True):
            part.add_(factor @ right)


@cache
def _adds_to_float32(device: torch.device) -> bool:
    """Whether the GPU and this torch add a product of bfloat16 matrices to a float32 one in the same kernel."""
    total, factor = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:  # older GPUs; versions of torch that want all three matrices of one dtype
        return False
    return True
