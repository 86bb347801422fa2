"""Log-probs and entropies of chosen tokens from hidden states, over a vocabulary that is cut across ranks.

Logits exist for one chunk of tokens at a time, in the model's dtype or exactly, and become their own gradient; those of
all chunks but one are computed again in the backward pass. Padded vocabulary rows never take part: their logits are not
even computed. What happens to a chunk's logits is left to `softmax`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlflow.models.embedding import main_grad_of
from rlflow.models.products import add_product, exact_product
from rlflow.models.softmax import Slopes, Sums, VocabShard, sum_up, turn_into_gradient


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    with_entropy: bool = False,
    exact_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden · weightᵀ / temperature)[target], and optionally the entropy of that distribution.

    hidden [R, H] and weight [rows, H] of one dtype, targets int64 [R] → float32 [R] twice. The gradient of `hidden` is
    this rank's part of a sum over the shard's group: the caller's hidden states must come from a region that sums it.
    `exact_logits` keeps the logits of half-precision factors in float32, for twice the memory and traffic.
    """
    log_probs, entropy = _TokenLogProbs.apply(
        hidden, weight, targets, shard, temperature, chunk_tokens, with_entropy, exact_logits
    )
    return log_probs, entropy if with_entropy else None


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        exact_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.compute_logits = exact_product if exact_logits else torch.mm
        parts = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        logits = None
        for rows in reversed(_chunks(len(hidden), chunk_tokens)):
            logits = None  # before there are others
            logits = ctx.compute_logits(hidden[rows], weight[: shard.size].t())
            sum_up(logits, targets[rows], shard, temperature, parts[:, rows], with_entropy=with_entropy)
        sums = Sums(*parts).over_ranks(shard)
        log_total = sums.total.log()
        log_norm = log_total + sums.peak
        entropy = log_total - sums.weighted / sums.total if with_entropy else log_norm.new_empty(0)
        ctx.logits = logits if any(ctx.needs_input_grad) else None  # those of the chunk that backward takes first
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        ctx.main_grad = main_grad_of(weight)
        return sums.target - log_norm, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        slopes = Slopes(grads[0], grads[1] if len(entropy) else None, log_norm, entropy)
        grad_hidden = torch.empty_like(hidden)
        chunks = _chunks(len(hidden), ctx.chunk_tokens)
        grad_weight = ctx.main_grad
        if grad_weight is None:  # several chunks are summed in float32, as if they had been one
            grad_weight = torch.zeros_like(weight, dtype=weight.dtype if len(chunks) == 1 else torch.float32)
        used = weight[: ctx.shard.size]
        for rows in chunks:
            logits = ctx.compute_logits(hidden[rows], used.t()) if ctx.logits is None else ctx.logits
            ctx.logits = None  # overwritten here
            gradient = turn_into_gradient(
                logits, targets[rows], ctx.shard, ctx.temperature, slopes.of(rows), weight.dtype
            )
            torch.mm(gradient, used, out=grad_hidden[rows])
            add_product(grad_weight[: ctx.shard.size], gradient.t(), hidden[rows])
            del logits, gradient  # before there are others
        delivered = grad_weight.to(weight.dtype) if ctx.main_grad is None else None
        return grad_hidden, delivered, *[None] * 6


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
