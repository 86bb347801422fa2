"""Log-probs and entropies of chosen tokens from hidden states, over a vocabulary that is cut across ranks.

Logits exist for one chunk of tokens at a time, in the model's dtype or exactly, and become their own gradient: at once,
where it is known what the loss makes of a token as soon as its log-prob is; else in the backward pass, for which those
of all chunks but one are computed again. Padded vocabulary rows never take part: their logits are not even computed.
What happens to a chunk's logits is left to `softmax`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.models.embedding import main_grad_of
from rlflow.models.products import add_product, exact_product
from rlflow.models.softmax import Slopes, Sums, VocabShard, sum_up, turn_into_gradient

SlopesOf = Callable[[slice, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""The gradient of the loss by the log-probs and entropies, float32 [r] each, of some of the tokens, given these."""


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
    slopes_of: SlopesOf | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden · weightᵀ / temperature)[target], and optionally the entropy of that distribution.

    hidden [R, H] and weight [rows, H] of one dtype, targets int64 [R] → float32 [R] twice. The gradient of `hidden` is
    this rank's part of a sum over the shard's group: the caller's hidden states must come from a region that sums it.
    `exact_logits` keeps the logits of half-precision factors in float32, for twice the memory and traffic.
    `slopes_of` is for a loss in which tokens do not meet: gradients are computed along with the log-probs, and the
    backward pass takes them whatever it is given. It must follow.
    """
    head = _Head(weight, shard, temperature, exact_product if exact_logits else torch.mm, with_entropy)
    if slopes_of is None or not torch.is_grad_enabled():
        log_probs, entropy = _TokenLogProbs.apply(hidden, weight, targets, head, chunk_tokens)
    else:
        log_probs, entropy = _LearnedAtOnce.apply(hidden, weight, targets, head, chunk_tokens, slopes_of)
    return log_probs, entropy if with_entropy else None


@dataclass(frozen=True)
class _Head:
    """What logits are made of, and what is made of them."""

    weight: Tensor
    shard: VocabShard
    temperature: float
    product: Callable[[Tensor, Tensor], Tensor]
    with_entropy: bool

    @property
    def used(self) -> Tensor:
        """The weight without padding."""
        return self.weight[: self.shard.size]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.product(hidden, self.used.t())

    def sum_up(self, logits: Tensor, targets: Tensor, sums: Tensor) -> None:
        sum_up(logits, targets, self.shard, self.temperature, sums, with_entropy=self.with_entropy)

    def score(self, parts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, log norms and entropies, empty where none are wanted, from this shard's sums [4, R]."""
        sums = Sums(*parts).over_ranks(self.shard)
        log_total = sums.total.log()
        log_norm = log_total + sums.peak
        entropy = log_total - sums.weighted / sums.total if self.with_entropy else log_norm.new_empty(0)
        return sums.target - log_norm, log_norm, entropy

    def new_gradient(self, chunks: int) -> Tensor:
        """Where the weight's gradient is summed; several chunks in float32, as if they had been one."""
        given = main_grad_of(self.weight)
        dtype = self.weight.dtype if chunks == 1 else torch.float32
        return torch.zeros_like(self.weight, dtype=dtype) if given is None else given

    def deliver(self, gradient: Tensor) -> Tensor | None:
        """What autograd is to be told of the weight's gradient: nothing where it lies in its place already."""
        return gradient.to(self.weight.dtype) if main_grad_of(self.weight) is None else None

    def learn(
        self, logits: Tensor, hidden: Tensor, targets: Tensor, slopes: Slopes, grad_hidden: Tensor, grad_weight: Tensor
    ) -> None:
        """Make a chunk's logits their gradient, which is lost then: fill that of `hidden`, add that of the weight."""
        gradient = turn_into_gradient(logits, targets, self.shard, self.temperature, slopes, self.weight.dtype)
        torch.mm(gradient, self.used, out=grad_hidden)
        add_product(grad_weight[: self.shard.size], gradient.t(), hidden)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        parts = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
        logits = None
        for rows in reversed(_chunks(len(hidden), chunk_tokens)):
            logits = None  # before there are others
            logits = head.logits(hidden[rows])
            head.sum_up(logits, targets[rows], parts[:, rows])
        log_probs, log_norm, entropy = head.score(parts)
        ctx.logits = logits if any(ctx.needs_input_grad) else None  # those of the chunk that backward takes first
        ctx.save_for_backward(hidden, targets, log_norm, entropy)
        ctx.head, ctx.chunk_tokens = head, chunk_tokens
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        hidden, targets, log_norm, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        slopes = Slopes(grads[0], grads[1] if len(entropy) else None, log_norm, entropy)
        chunks = _chunks(len(hidden), ctx.chunk_tokens)
        grad_hidden, grad_weight = torch.empty_like(hidden), head.new_gradient(len(chunks))
        for rows in chunks:
            logits = head.logits(hidden[rows]) if ctx.logits is None else ctx.logits
            ctx.logits = None  # overwritten here
            head.learn(logits, hidden[rows], targets[rows], slopes.of(rows), grad_hidden[rows], grad_weight)
            del logits  # before there are others
        return grad_hidden, head.deliver(grad_weight), None, None, None


class _LearnedAtOnce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, chunk_tokens: int, slopes_of: SlopesOf
    ) -> tuple[Tensor, Tensor]:
        chunks = _chunks(len(hidden), chunk_tokens)
        grad_hidden, grad_weight = torch.empty_like(hidden), head.new_gradient(len(chunks))
        scored, entropies = ([torch.empty(0, dtype=torch.float32, device=hidden.device)] for _ in range(2))
        for rows in chunks:
            logits = head.logits(hidden[rows])
            parts = torch.empty(4, len(logits), dtype=torch.float32, device=hidden.device)
            head.sum_up(logits, targets[rows], parts)
            log_probs, log_norm, entropy = head.score(parts)
            scored.append(log_probs)
            entropies.append(entropy)
            slopes = Slopes(*slopes_of(rows, log_probs, entropy if head.with_entropy else None), log_norm, entropy)
            head.learn(logits, hidden[rows], targets[rows], slopes, grad_hidden[rows], grad_weight)
            del logits  # before there are others
        ctx.save_for_backward(grad_hidden)
        ctx.grad_weight = head.deliver(grad_weight)
        return torch.cat(scored), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden, ctx.grad_weight, None, None, None, None


def _chunks(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
