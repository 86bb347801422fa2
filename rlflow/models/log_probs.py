"""Log-probs and entropies of chosen tokens from hidden states, over a vocabulary that is cut across ranks.

Logits exist for one chunk of tokens at a time and are computed again in the backward pass. Padded vocabulary rows never
take part: their logits are not even computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """The rows [start, start + size) of the real vocabulary that this rank's head holds; its other rows are padding."""

    start: int
    size: int
    group: dist.ProcessGroup | None = None  # the ranks that hold the other rows; None or a group of one: nobody

    @property
    def is_whole(self) -> bool:
        return self.group is None or self.group.size() == 1

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        if not self.is_whole:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden · weightᵀ / temperature)[target], and optionally the entropy of that distribution.

    hidden [R, H] and weight [rows, H] of one dtype, targets int64 [R] → float32 [R] twice. The gradient of `hidden` is
    this rank's part of a sum over the shard's group: the caller's hidden states must come from a region that sums it.
    """
    log_probs, entropy = _TokenLogProbs.apply(hidden, weight, targets, shard, temperature, chunk_tokens, with_entropy)
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
    ) -> tuple[Tensor, Tensor]:
        log_probs, log_norm = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        entropy = torch.empty_like(log_probs) if with_entropy else log_probs.new_empty(0)
        for rows in _chunks(len(hidden), chunk_tokens):
            logits = _logits(hidden[rows], weight, shard, temperature)
            log_norm[rows], mean_logit = _normaliser(logits, shard, with_entropy)
            log_probs[rows] = _target_logits(logits, targets[rows], shard) - log_norm[rows]
            if mean_logit is not None:
                entropy[rows] = log_norm[rows] - mean_logit
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        shard, temperature = ctx.shard, ctx.temperature
        grad_log_probs = grads[0] / temperature
        grad_entropy = grads[1] / temperature if len(entropy) else None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(hidden), ctx.chunk_tokens):
            logits = _logits(hidden[rows], weight, shard, temperature).sub_(log_norm[rows, None])
            grad = _grad_logits(
                logits, grad_log_probs[rows], None if grad_entropy is None else grad_entropy[rows], entropy[rows]
            )
            _add_to_targets(grad, targets[rows], grad_log_probs[rows], shard)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight[: shard.size], out=grad_hidden[rows])
            _accumulate(grad_weight[: shard.size], grad.t(), hidden[rows])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """float32 [tokens, shard.size], from a matrix product in the model's dtype."""
    logits = torch.mm(hidden, weight[: shard.size].t()).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _normaliser(logits: Tensor, shard: VocabShard, with_mean: bool) -> tuple[Tensor, Tensor | None]:
    """log Σ exp over the whole vocabulary, and the mean of the logits under the distribution: float32 [tokens]."""
    if shard.is_whole:
        log_norm = logits.logsumexp(-1)
        return log_norm, _mean_logit(logits, log_norm) if with_mean else None
    peak = logits.amax(-1) if shard.size else logits.new_full((len(logits),), -torch.inf)
    shard.reduce(peak, dist.ReduceOp.MAX)
    log_norm = shard.reduce((logits - peak[:, None]).exp_().sum(-1)).log_() + peak
    return log_norm, shard.reduce(_mean_logit(logits, log_norm)) if with_mean else None


def _mean_logit(logits: Tensor, log_norm: Tensor) -> Tensor:
    """This shard's part of Σ p·logit."""
    return torch.linalg.vecdot((logits - log_norm[:, None]).exp_(), logits)


def _target_logits(logits: Tensor, targets: Tensor, shard: VocabShard) -> Tensor:
    """The logit of each target, wherever its row lies."""
    if shard.is_whole:
        return logits.gather(1, targets[:, None])[:, 0]
    local = targets - shard.start
    is_here = (local >= 0) & (local < shard.size)
    found = logits.new_zeros(len(targets))
    found[is_here] = logits[is_here, local[is_here]]
    return shard.reduce(found)


def _grad_logits(log_softmax: Tensor, grad_log_probs: Tensor, grad_entropy: Tensor | None, entropy: Tensor) -> Tensor:
    """−p·(g + h·(log p + H)): the gradient of g·log p[target] + h·H but for the target's own + g. In place."""
    if grad_entropy is None:
        return log_softmax.exp_().mul_(-grad_log_probs[:, None])
    slope = (log_softmax + entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
    return log_softmax.exp_().mul_(slope).neg_()


def _add_to_targets(grad: Tensor, targets: Tensor, values: Tensor, shard: VocabShard) -> None:
    local = targets - shard.start
    if shard.is_whole:
        grad.scatter_add_(1, local[:, None], values[:, None])
        return
    is_here = (local >= 0) & (local < shard.size)
    grad[is_here.nonzero()[:, 0], local[is_here]] += values[is_here]


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, in float32 whatever the dtype of the factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
