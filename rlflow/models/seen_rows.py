"""Keys and values as the kernel for packed sequences wants them: each segment's own copy of all that it sees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def seen(key: Tensor, value: Tensor, rows: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """The rows int64 [K] of both [T, heads, …] → [K, heads, …]; `bounds` int32 end where padding of `rows` begins.

    Gradients of a row that several segments see are summed in float32; those of padding, which no kernel writes, are
    left out.
    """
    return _Seen.apply(key, value, rows, bounds)


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, rows: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, bounds)
        ctx.count = len(key)
        return key.index_select(0, rows), value.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        rows, bounds = ctx.saved_tensors
        is_seen = (torch.arange(len(rows), device=rows.device) < bounds[-1])[:, None, None]
        return *(_summed(grad, is_seen, rows, ctx.count) for grad in grads), None, None


def _summed(grad: Tensor, is_seen: Tensor, rows: Tensor, count: int) -> Tensor:
    exact = torch.where(is_seen, grad, 0).float()
    return exact.new_zeros(count, *grad.shape[1:]).index_add_(0, rows, exact).to(grad.dtype)
