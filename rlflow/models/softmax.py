"""The softmax over a vocabulary that is cut across ranks: what it says of tokens, and the gradient of their logits.

A GPU reads logits once for the first and turns them into the second in place (`softmax_kernel`). Here is what does the
same with torch's operations, on a CPU for a few rows at a time that stay in its cache, and what ranks tell each other.
All of it is float32, whatever the logits are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

EXACT_ELEMENTS = 2**21
"""Logits that are worked on in float32 at once on a CPU."""

NO_PEAK = -1e30
"""The largest of no logits; finite, so that differences to it are no NaN."""


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


@dataclass(frozen=True)
class Sums:
    """What a shard says of each token's distribution: float32 [R], rows of one tensor [4, R]."""

    peak: Tensor  # the largest logit / temperature
    total: Tensor  # Σ exp(logit / temperature − peak)
    weighted: Tensor  # Σ exp(shifted) · shifted with these shifted logits; zeros where no entropy is wanted
    target: Tensor  # logit / temperature of the target, 0 where another shard has it

    def over_ranks(self, shard: VocabShard) -> Sums:
        """Those of the whole vocabulary. Two collectives: the peaks, so that exp stays finite, and all sums."""
        if shard.is_whole:
            return self
        peak = shard.reduce(self.peak.clone(), dist.ReduceOp.MAX)
        return Sums(peak, *shard.reduce(self._relative_to(peak)))

    def _relative_to(self, peak: Tensor) -> Tensor:
        """The sums [3, R] with logits shifted by another peak."""
        shift = self.peak - peak
        shrink = shift.exp()
        return torch.stack([self.total * shrink, (self.weighted + self.total * shift) * shrink, self.target])


@dataclass(frozen=True)
class Slopes:
    """What the gradient of the logits depends on: float32 [R] each."""

    log_probs: Tensor  # gradient of the log-probs
    entropies: Tensor | None  # gradient of the entropies, None: nobody asked for these
    log_norm: Tensor  # log Σ exp(logit / temperature)
    entropy: Tensor  # the entropies; empty where none were computed

    def of(self, rows: slice) -> Slopes:
        entropies = None if self.entropies is None else self.entropies[rows]
        return Slopes(self.log_probs[rows], entropies, self.log_norm[rows], self.entropy[rows])


def sum_up(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, sums: Tensor, *, with_entropy: bool
) -> None:
    """Fill float32 [4, R] (`Sums`) with what this shard's logits [R, size] say of the targets, int64 [R]."""
    if not shard.size:
        sums.zero_()[0] = NO_PEAK
    elif logits.is_cuda:
        from rlflow.models import softmax_kernel

        softmax_kernel.sum_up(logits, targets, shard.start, temperature, sums, with_entropy=with_entropy)
    else:
        _sum_up(logits, targets, shard, temperature, Sums(*sums), with_entropy)


def turn_into_gradient(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, slopes: Slopes, dtype: torch.dtype
) -> Tensor:
    """The gradient of Σ g · log p[target] + h · H: g · (1[target] − p) − h · p · (log p + H), over the temperature.

    [R, size] in `dtype`, in the place of the logits where they have it; those are lost anyway.
    """
    if logits.is_cuda and shard.size:
        from rlflow.models import softmax_kernel

        gradient = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        softmax_kernel.turn_into_gradient(logits, targets, shard.start, temperature, slopes, gradient)
        return gradient
    _turn_into_gradient(logits, targets, shard, temperature, slopes)
    return logits.to(dtype)


def _sum_up(
    logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, sums: Sums, with_entropy: bool
) -> None:
    torch.div(logits.amax(-1).float(), temperature, out=sums.peak)
    is_here, column = shard.find(targets)
    sums.target.copy_(torch.where(is_here, logits.gather(1, column[:, None])[:, 0].float() / temperature, 0.0))
    sums.weighted.zero_()
    for part in _parts(logits):
        shifted = _exact(logits[part], temperature, keep=True).sub_(sums.peak[part, None])
        if with_entropy:
            powers = shifted.exp()
            sums.weighted[part] = powers.mul(shifted).sum(-1)
        else:
            powers = shifted.exp_()
        sums.total[part] = powers.sum(-1)


def _turn_into_gradient(logits: Tensor, targets: Tensor, shard: VocabShard, temperature: float, slopes: Slopes) -> None:
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


def _exact(logits: Tensor, temperature: float, keep: bool = False) -> Tensor:
    """Logits over temperature in float32; overwrites float32 logits unless they are to be kept."""
    exact = logits.to(torch.float32, copy=keep)
    return exact if temperature == 1.0 else exact.div_(temperature)


def _parts(logits: Tensor) -> list[slice]:
    """Runs of rows with at most `EXACT_ELEMENTS` logits."""
    rows = max(1, EXACT_ELEMENTS // max(1, logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
