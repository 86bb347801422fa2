"""Log-probs and entropies of chosen tokens from hidden states, over a vocabulary that is cut across ranks.

Logits exist for one chunk of tokens at a time, in the model's dtype; where there are several chunks they are computed
again in the backward pass. The softmax is computed in float32, on a CPU for a few rows at a time that stay in its
cache. Padded vocabulary rows never take part: their logits are not even computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.models.embedding import main_grad_of

EXACT_ELEMENTS = 2**21
"""Elements that are worked on in float32 at once on a CPU."""


@dataclass(frozen=True)
class VocabShard:
    """The rows [start, start + size) of the real vocabulary that this rank's head holds; its other rows are padding."""

    start: int
    size: int
    group: dist.ProcessGroup | None = None  # the ranks that hold the other rows; None or a group of one: nobody

    @property
    def is_whole(self) -> bool:
        return self.group is None or self.group.size() == 1

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Which targets lie in this shard: bool [R], and the row of each here, 0 for those that lie elsewhere."""
        local = targets - self.start
        is_here = (local >= 0) & (local < self.size)
        return is_here, torch.where(is_here, local, 0)  # of fixed size: the host need not wait for a GPU

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
        chunks = _chunks(len(hidden), chunk_tokens)
        ctx.logits = None
        for rows in chunks:
            logits = torch.mm(hidden[rows], weight[: shard.size].t())
            if len(chunks) == 1 and any(ctx.needs_input_grad):
                ctx.logits = logits
            found = _statistics(logits, targets[rows], shard, temperature, with_entropy)
            log_norm[rows] = found.log_norm
            log_probs[rows] = found.target - found.log_norm
            if found.entropy is not None:
                entropy[rows] = found.entropy
        ctx.save_for_backward(hidden, weight, targets, log_norm, entropy)
        ctx.shard, ctx.temperature, ctx.chunk_tokens = shard, temperature, chunk_tokens
        ctx.main_grad = main_grad_of(weight)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_norm, entropy = ctx.saved_tensors
        shard, temperature = ctx.shard, ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        chunks = _chunks(len(hidden), ctx.chunk_tokens)
        grad_weight = ctx.main_grad
        if grad_weight is None:  # several chunks are summed in float32, as if they had been one
            grad_weight = torch.zeros_like(weight, dtype=weight.dtype if len(chunks) == 1 else torch.float32)
        used = weight[: shard.size]
        for rows in chunks:
            logits = torch.mm(hidden[rows], used.t()) if ctx.logits is None else ctx.logits
            ctx.logits = None  # overwritten here
            slopes = _Slopes(grads[0][rows], grads[1][rows] if len(entropy) else None, log_norm[rows], entropy[rows])
            _turn_into_gradient(logits, targets[rows], shard, temperature, slopes)
            torch.mm(logits, used, out=grad_hidden[rows])
            _add_product(grad_weight[: shard.size], logits.t(), hidden[rows])
        delivered = grad_weight.to(weight.dtype) if ctx.main_grad is None else None
        return grad_hidden, delivered, None, None, None, None, None


@dataclass
class _Statistics:
    """Of a chunk's distributions over the whole vocabulary: float32 [tokens] each."""

    log_norm: Tensor  # log Σ exp(logit / temperature)
    target: Tensor  # logit / temperature of the target
    entropy: Tensor | None


def _statistics(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, with_entropy: bool
) -> _Statistics:
    """Two collectives a chunk: the peaks, so that exp stays finite, and then all sums together."""
    peak = logits.amax(-1).float() if shard.size else logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
    peak = shard.reduce(peak, dist.ReduceOp.MAX) / temperature
    sums = torch.zeros((3, len(logits)), dtype=torch.float32, device=logits.device)
    total, weighted, target = sums
    is_here, column = shard.find(targets)
    if shard.size:
        target.copy_(torch.where(is_here, logits.gather(1, column[:, None])[:, 0].float() / temperature, 0.0))
    for part in _parts(logits):
        shifted = _exact(logits[part], temperature, keep=True).sub_(peak[part, None])
        if with_entropy:
            powers = shifted.exp()
            weighted[part] = powers.mul(shifted).sum(-1)
        else:
            powers = shifted.exp_()
        total[part] = powers.sum(-1)
    shard.reduce(sums)
    log_total = total.log()
    return _Statistics(log_total + peak, target, log_total - weighted / total if with_entropy else None)


@dataclass
class _Slopes:
    """What a chunk's gradient depends on: float32 [tokens] each."""

    log_probs: Tensor  # gradient of the log-probs
    entropies: Tensor | None  # gradient of the entropies
    log_norm: Tensor
    entropy: Tensor  # the entropies; empty where none were computed


def _turn_into_gradient(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, slopes: _Slopes
) -> None:
    """Overwrite logits by the gradient of Σ g · log p[target] + h · H: g · (1[target] − p) − h · p · (log p + H)."""
    is_here, column = shard.find(targets)
    on_target = torch.where(is_here, slopes.log_probs, 0.0)
    for part in _parts(logits):
        log_softmax = _exact(logits[part], temperature).sub_(slopes.log_norm[part, None])
        factor = slopes.log_probs[part, None]
        if slopes.entropies is not None:
            spread = (log_softmax + slopes.entropy[part, None]).mul_(slopes.entropies[part, None])
            factor = spread.add_(factor)
        grad = log_softmax.exp_().mul_(factor.neg())
        if shard.size:
            grad.scatter_add_(1, column[part, None], on_target[part, None])
        if temperature != 1.0:
            grad.div_(temperature)
        if logits.dtype != grad.dtype:
            logits[part] = grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right, where the product may be of lower precision than the total."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
        return
    size = EXACT_ELEMENTS // total.shape[1] if total.device.type == "cpu" else len(total)
    for rows in _chunks(len(total), size):  # on a CPU in pieces that stay in its cache
        total[rows].add_(left[rows] @ right)


def _exact(logits: Tensor, temperature: float, keep: bool = False) -> Tensor:
    """Logits over temperature in float32; overwrites float32 logits unless they are to be kept."""
    exact = logits.to(torch.float32, copy=keep)
    return exact if temperature == 1.0 else exact.div_(temperature)


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _parts(logits: Tensor) -> list[slice]:
    """Runs of rows with at most `EXACT_ELEMENTS` logits; on a GPU all rows, as each launch costs time."""
    rows = EXACT_ELEMENTS // max(1, logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    return _chunks(len(logits), max(1, rows))
