"""Attention of many short bfloat16 segments on a CPU, as batched products of whole segments.

torch's fused kernel takes a quarter more time in float32, and ten times in bfloat16. The probabilities are kept for the
backward pass, so that this is for short segments only; which these are is decided in `attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ShortAttention(torch.autograd.Function):
    """Scores and softmax are float32; probabilities and their products have the dtype of the input, as in the kernel.

    query [N, M, d], key and value [N, S, d], mask [B, 1, L, 1, S] with N = B · kv_heads and M = L · (heads / kv_heads).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
        scores = torch.bmm(query.float() * scale, key.float().transpose(1, 2))
        segments, _, rows, _, seen = mask.shape
        scores.view(segments, -1, rows, query.shape[1] // rows, seen).add_(mask)
        probabilities = scores.softmax(-1).to(value.dtype)
        ctx.save_for_backward(query, key, value, probabilities)
        ctx.scale = scale
        return torch.bmm(probabilities, value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        query, key, value, probabilities = ctx.saved_tensors
        grad = grads[0]
        slopes = torch.bmm(grad.float(), value.float().transpose(1, 2))
        slopes = torch._softmax_backward_data(slopes, probabilities.float(), -1, torch.float32).to(query.dtype)
        grad_query = torch.bmm(slopes, key).mul_(ctx.scale)
        grad_key = torch.bmm(slopes.transpose(1, 2), query).mul_(ctx.scale)
        return grad_query, grad_key, torch.bmm(probabilities.transpose(1, 2), grad), None, None


def attend_short(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q·kᵀ·scale + mask)·v of B segments: [B, L, heads, d], [B, S, kv_heads, d] twice, float32 [B, 1, L, S].

    Returns [B, L, heads · d]. The query heads of a key head are computed as further rows of it.
    """
    segments, rows, heads, _ = query.shape
    kv_heads = key.shape[2]
    stacked = query.unflatten(2, (kv_heads, heads // kv_heads)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
    key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key, value))
    out = _ShortAttention.apply(stacked, key, value, mask.unsqueeze(3), scale)
    return out.view(segments, kv_heads, rows, -1).transpose(1, 2).flatten(2)
