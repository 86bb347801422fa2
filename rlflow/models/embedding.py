"""The token embedding, whose gradient concerns the rows of the tokens that were seen and no others."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Where a backward pass may add a vocabulary's gradient by itself; None: autograd delivers it, as a whole matrix.

    `roles.training` marks the parameters for which nobody waits for autograd's delivery.
    """
    return getattr(weight, "main_grad", None) if getattr(weight, "adds_to_main_grad", False) else None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, is_here: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, is_here)
        ctx.main_grad, ctx.shape = main_grad_of(weight), weight.shape
        found = torch.nn.functional.embedding(rows, weight)
        return found if is_here is None else found.mul_(is_here[..., None])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        (grad,), (rows, is_here) = grads, ctx.saved_tensors
        if is_here is not None:
            grad = grad * is_here[..., None]
        total = grad.new_zeros(ctx.shape) if ctx.main_grad is None else ctx.main_grad
        total.index_add_(0, rows.flatten(), grad.flatten(0, -2).to(total.dtype))
        return (total if ctx.main_grad is None else None), None, None


class VocabularyEmbedding(VocabParallelEmbedding):
    """megatron's embedding with a backward pass that, where it may, touches only the rows that were looked up."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """[1, T] → [1, T, H], or this rank's part of the rows as [T / tp, 1, H] under sequence parallelism."""
        if self.tp_group.size() == 1:
            return _Lookup.apply(self.weight, token_ids, None)
        is_here = (token_ids >= self.vocab_start_index) & (token_ids < self.vocab_end_index)
        local = torch.where(is_here, token_ids - self.vocab_start_index, 0)
        found = _Lookup.apply(self.weight, local, is_here)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(found.transpose(0, 1).contiguous(), group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(found, group=self.tp_group)
