"""The Triton kernels of `softmax`: one pass over logits for what they say of tokens, one that makes them gradients.

Imported on CUDA devices only. Neither waits for the GPU nor allocates, so that both can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from rlflow.models.softmax import Slopes

SUM_BLOCK, SUM_WARPS, SUM_STAGES = 4096, 4, 1
"""Logits of a row that a program reads at a time: with 4 warps four loads of 16 bytes a thread in bfloat16."""

GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
"""Logits that a program turns into gradients."""


def sum_up(
    logits: Tensor, targets: Tensor, start: int, temperature: float, sums: Tensor, *, with_entropy: bool
) -> None:
    """Fill the four rows of `sums`, float32 [4, R], as `softmax.Sums` names them; logits [R, size > 0], rows dense."""
    rows, size = logits.shape
    if rows:
        _sum_rows[(rows,)](
            logits, targets, sums, logits.stride(0), sums.stride(0), size, start, 1.0 / temperature,
            WITH_ENTROPY=with_entropy, BLOCK=SUM_BLOCK, STAGES=SUM_STAGES, num_warps=SUM_WARPS,
        )  # fmt: skip


def turn_into_gradient(
    logits: Tensor, targets: Tensor, start: int, temperature: float, slopes: Slopes, gradient: Tensor
) -> None:
    """Write the gradient of the logits, which may be the place of the logits themselves."""
    rows, size = logits.shape
    blocks = triton.cdiv(size, GRADIENT_BLOCK)
    if rows:
        _turn_rows[(rows * blocks,)](
            logits, gradient, targets, slopes.log_norm, slopes.entropy, slopes.log_probs.contiguous(),
            slopes.log_norm if slopes.entropies is None else slopes.entropies.contiguous(),
            logits.stride(0), gradient.stride(0), size, blocks, start, 1.0 / temperature,
            WITH_ENTROPY=slopes.entropies is not None, BLOCK=GRADIENT_BLOCK, num_warps=GRADIENT_WARPS,
        )  # fmt: skip


# Where a chunk begins in what is one number a row changes nothing, and is no reason to compile again.
@triton.jit(
    do_not_specialize=["sum_stride", "start"],
    do_not_specialize_on_alignment=["targets", "sums"],
)
def _sum_rows(
    logits, targets, sums,
    row_stride, sum_stride, size, start, inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A row a program, its sums kept relative to the largest logit so far (Milakov and Gimelshein, 2018)."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    column = tl.arange(0, BLOCK)
    peak = -1e30
    total = 0.0
    weighted = 0.0
    for begin in tl.range(0, size, BLOCK, num_stages=STAGES):
        inside = begin + column < size
        values = tl.load(line + begin + column, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        values = tl.where(inside, values, -1e30)
        highest = tl.maximum(peak, tl.max(values, 0))
        shift = peak - highest
        shrink = tl.exp(shift)
        values -= highest
        powers = tl.exp(values)
        if WITH_ENTROPY:
            weighted = (weighted + total * shift) * shrink + tl.sum(powers * values, 0)
        total = total * shrink + tl.sum(powers, 0)
        peak = highest
    label = tl.load(targets + row) - start
    is_here = (label >= 0) & (label < size)
    target = tl.load(line + label, mask=is_here, other=0.0).to(tl.float32) * inverse_temperature
    tl.store(sums + row, peak)
    tl.store(sums + sum_stride + row, total)
    tl.store(sums + 2 * sum_stride + row, weighted)
    tl.store(sums + 3 * sum_stride + row, target)


@triton.jit(
    do_not_specialize=["start"],
    do_not_specialize_on_alignment=["targets", "log_norms", "entropies", "log_prob_slopes", "entropy_slopes"],
)
def _turn_rows(
    logits, gradient, targets, log_norms, entropies, log_prob_slopes, entropy_slopes,
    row_stride, gradient_stride, size, blocks, start, inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a row a program; places in int64, as 16,384 rows of 152k logits are more than 2³¹."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    values = tl.load(logits + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(log_prob_slopes + row)
    label = (tl.load(targets + row) - start).to(tl.int32)
    log_softmax = values * inverse_temperature - tl.load(log_norms + row)
    factor = slope
    if WITH_ENTROPY:
        factor = slope + tl.load(entropy_slopes + row) * (log_softmax + tl.load(entropies + row))
    found = (tl.where(column == label, slope, 0.0) - tl.exp(log_softmax) * factor) * inverse_temperature
    tl.store(gradient + row * gradient_stride + column, found.to(gradient.dtype.element_ty), mask=inside)
