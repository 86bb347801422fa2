"""Context parallelism: rows that lie on several ranks, brought together for attention and for the loss.

Which rows a rank holds is decided in `rlflow.batch.zigzag`; what is attended to, in `attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks of a group, one rank after the other: [T / n, ...] → [T, ...].

    Each rank's gradient of the whole is summed over the ranks: every rank uses the rows for queries of its own.
    """
    return _GatherRows.apply(states, group)


def gather_predictions(local: Tensor, scored: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
    """All R values of a micro-batch from those that each rank made: local [r], their places int64 [r] → [R].

    The gradient of a rank's values is that of their places in its own result: every rank must compute the same loss of
    the whole, whose gradient then counts once.
    """
    return _GatherPredictions.apply(local, scored, total, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = states.new_empty((group.size() * states.shape[0], *states.shape[1:]))
        dist.all_gather_into_tensor(whole, states.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        # A reduce-scatter as an exchange and a sum, which gloo can do in every dtype and which rounds once.
        whole = grads[0].contiguous()
        parts = torch.empty_like(whole)
        dist.all_to_all_single(parts, whole, group=ctx.group)
        return parts.unflatten(0, (ctx.group.size(), -1)).sum(0), None


class _GatherPredictions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, scored: Tensor, total: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(scored)
        whole = local.new_zeros(total).index_copy_(0, scored, local)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None, None
