"""The Triton kernel that adds up the parts of a sum over rows, which the programs of another kernel left behind.

Imported on CUDA devices only. Every part is added in the same order each time, so that sums do not change between runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 128, 16


def add_up(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [N, M] → [M] in `dtype`, the sum over the first dimension; zeros where N is 0."""
    count, columns = parts.shape
    sums = torch.empty(columns, dtype=dtype, device=parts.device)
    _add_up[(triton.cdiv(columns, COLUMNS),)](parts, sums, count, columns, ROWS, COLUMNS)
    return sums


@triton.jit
def _add_up(parts, sums, count, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """One program a block of columns."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        inside = (start + row < count) & (column[None, :] < columns)
        total += tl.load(parts + (start + row) * columns + column[None, :], mask=inside, other=0.0)
    tl.store(sums + column, tl.sum(total, 0).to(sums.dtype.element_ty), mask=column < columns)
