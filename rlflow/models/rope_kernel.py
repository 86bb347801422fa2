"""The Triton kernels that take heads out of a projection and turn them, and lead the gradients back into it.

On the way they add the projection's bias, or norm queries and keys. Imported on CUDA devices only. Rows are read where
the projection wrote them and written as attention wants them, once each way. Which heads there are, and what autograd
is told, is in `rope`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlflow.models.sums_kernel import add_up

if TYPE_CHECKING:
    from rlflow.models.rope import HeadNorms, Heads, RotationTable

ELEMENTS, WARPS = 1024, 4  # of each half of the channel pairs that a program holds at a time
STEPS_BACKWARD = 4
"""Blocks of rows that a program works off backwards, where it leaves one row of partial sums for a parameter."""

Parts = tuple[Tensor, Tensor, Tensor]
"""Queries [T, groups · queries, d], keys and values [T, groups, d]; without keys the latter two have no elements."""


class Split(NamedTuple):
    """What is done to the heads of a projection; at most one of `bias` and `norms` is there."""

    heads: Heads
    table: RotationTable
    bias: Tensor | None = None  # [heads · d]
    norms: HeadNorms | None = None

    @property
    def pairs(self) -> int:
        return triton.next_power_of_2(self.heads.channels // 2)

    @property
    def height(self) -> int:
        """Rows of a block."""
        return max(1, ELEMENTS // self.pairs)

    def tensors(self) -> tuple[Tensor, ...]:
        """Cosines, sines, bias and both norms' weights, with another tensor in the place of those that are missing."""
        cosines, sines, _ = self.table
        weights = (cosines, cosines) if self.norms is None else self.norms[:2]
        return cosines, sines, cosines if self.bias is None else self.bias, *weights

    def numbers(self) -> tuple[float, float]:
        """eps and center of the norms."""
        return (0.0, 0.0) if self.norms is None else self.norms[2:]

    def constants(self) -> dict[str, int | bool]:
        return {
            "QUERIES": self.heads.queries,
            "IN_GROUP": self.heads.in_group,
            "CHANNELS": self.heads.channels,
            "TURNED": self.table.cosines.shape[-1],
            "INTERLEAVED": self.table.interleaved,
            "BIASED": self.bias is not None,
            "NORMED": self.norms is not None,
            "HEIGHT": self.height,
            "PAIRS": self.pairs,
        }


def split_and_turn(joined: Tensor, split: Split) -> Parts:
    """Turned queries and keys, and values as they are, contiguous each.

    joined: [T, heads, d], whose last dimension is contiguous. Channels of a head beyond those of the table stay as they
    are.
    """
    rows, heads = len(joined), split.heads
    query, key, value = (joined.new_empty(rows, count, heads.channels) for count in heads.counts)
    _split[(heads.total, triton.cdiv(rows, split.height))](
        joined, query, key, value, *split.tensors(), rows, joined.stride(0), joined.stride(1), query.stride(0),
        key.stride(0), *split.numbers(), **split.constants(), num_warps=WARPS,
    )  # fmt: skip
    return query, key, value


def split_and_turn_backward(grads: Parts, joined: Tensor | None, split: Split) -> tuple[Tensor, Tensor | None]:
    """The gradients of `split_and_turn`: for `joined`, contiguous [T, heads, d], and [heads, d] for a parameter.

    That is the bias, in its dtype, or float32 for the norm's weight, of which each head has its part; those of values
    mean nothing then. `grads` are contiguous; `joined` is looked at where there are norms.
    """
    (query, key, value), heads = grads, split.heads
    found = query.new_empty(len(query), heads.total, heads.channels)
    states = found if joined is None else joined
    learns = split.bias is not None or split.norms is not None
    blocks = triton.cdiv(len(query), STEPS_BACKWARD * split.height)
    sums = torch.empty(blocks, learns * heads.total * heads.channels, dtype=torch.float32, device=query.device)
    _join[(heads.total, blocks)](
        found, states, query, key, value, sums, *split.tensors(), len(query), states.stride(0), states.stride(1),
        query.stride(0), key.stride(0), *split.numbers(), **split.constants(), STEPS=STEPS_BACKWARD, num_warps=WARPS,
    )  # fmt: skip
    if not learns:
        return found, None
    dtype = torch.float32 if split.bias is None else split.bias.dtype
    return found, add_up(sums, dtype).view(heads.total, heads.channels)


@triton.jit
def _split(
    joined, query, key, value, cosines, sines, bias, query_weight, key_weight,
    rows, row_stride, head_stride, query_stride, key_stride, eps, center,
    QUERIES: tl.constexpr, IN_GROUP: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, HEIGHT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program for a head of HEIGHT rows, held as the first and the second channels of pairs."""
    head, pair = tl.program_id(0), tl.arange(0, PAIRS)
    first, second = _channels(pair, CHANNELS, TURNED, INTERLEAVED)
    part, stride = _part(query, key, value, query_stride, key_stride, head, QUERIES, IN_GROUP, CHANNELS)
    row = (tl.program_id(1) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
    inside = (row < rows) & (pair < CHANNELS // 2)[None, :]
    source = joined + row * row_stride + head * head_stride
    one = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    two = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
    if BIASED:
        one += tl.load(bias + head * CHANNELS + first, mask=pair < CHANNELS // 2, other=0.0).to(tl.float32)[None, :]
        two += tl.load(bias + head * CHANNELS + second, mask=pair < CHANNELS // 2, other=0.0).to(tl.float32)[None, :]
    if NORMED:
        within = head % IN_GROUP
        scale = _scale(one, two, eps, within, QUERIES, CHANNELS)
        one *= scale * _weight(query_weight, key_weight, first, pair, center, within, QUERIES, CHANNELS)
        two *= scale * _weight(query_weight, key_weight, second, pair, center, within, QUERIES, CHANNELS)
    cosine, sine = _angle(cosines, sines, row, rows, second, pair, head % IN_GROUP, QUERIES, TURNED)
    target = part + row * stride
    tl.store(target + first[None, :], (one * cosine - two * sine).to(query.dtype.element_ty), mask=inside)
    tl.store(target + second[None, :], (two * cosine + one * sine).to(query.dtype.element_ty), mask=inside)


@triton.jit
def _join(
    found, joined, query, key, value, sums, cosines, sines, bias, query_weight, key_weight,
    rows, row_stride, head_stride, query_stride, key_stride, eps, center,
    QUERIES: tl.constexpr, IN_GROUP: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, HEIGHT: tl.constexpr, PAIRS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """One program for a head of STEPS times HEIGHT rows: back by the same angle, and through the norm."""
    head, pair = tl.program_id(0), tl.arange(0, PAIRS)
    within = head % IN_GROUP
    first, second = _channels(pair, CHANNELS, TURNED, INTERLEAVED)
    part, stride = _part(query, key, value, query_stride, key_stride, head, QUERIES, IN_GROUP, CHANNELS)
    sum_1 = tl.zeros([HEIGHT, PAIRS], tl.float32)
    sum_2 = tl.zeros([HEIGHT, PAIRS], tl.float32)
    for step in range(STEPS):
        row = ((tl.program_id(1) * STEPS + step) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
        inside = (row < rows) & (pair < CHANNELS // 2)[None, :]
        grad_1 = tl.load(part + row * stride + first[None, :], mask=inside, other=0.0).to(tl.float32)
        grad_2 = tl.load(part + row * stride + second[None, :], mask=inside, other=0.0).to(tl.float32)
        cosine, sine = _angle(cosines, sines, row, rows, second, pair, within, QUERIES, TURNED)
        grad_1, grad_2 = grad_1 * cosine + grad_2 * sine, grad_2 * cosine - grad_1 * sine
        if NORMED:
            source = joined + row * row_stride + head * head_stride
            one = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
            two = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
            scale = _scale(one, two, eps, within, QUERIES, CHANNELS)
            one, two = one * scale, two * scale
            sum_1 += grad_1 * one
            sum_2 += grad_2 * two
            grad_1 *= _weight(query_weight, key_weight, first, pair, center, within, QUERIES, CHANNELS)
            grad_2 *= _weight(query_weight, key_weight, second, pair, center, within, QUERIES, CHANNELS)
            projection = (tl.sum(grad_1 * one, 1) + tl.sum(grad_2 * two, 1)) / CHANNELS
            projection = tl.where(within <= QUERIES, projection, 0.0)[:, None]
            grad_1, grad_2 = (grad_1 - one * projection) * scale, (grad_2 - two * projection) * scale
        else:
            sum_1 += grad_1
            sum_2 += grad_2
        target = found + row * (tl.num_programs(0) * CHANNELS) + head * CHANNELS
        tl.store(target + first[None, :], grad_1.to(found.dtype.element_ty), mask=inside)
        tl.store(target + second[None, :], grad_2.to(found.dtype.element_ty), mask=inside)
    if BIASED or NORMED:
        place = sums + (tl.program_id(1) * tl.num_programs(0) + head) * CHANNELS
        tl.store(place + first, tl.sum(sum_1, 0), mask=pair < CHANNELS // 2)
        tl.store(place + second, tl.sum(sum_2, 0), mask=pair < CHANNELS // 2)


@triton.jit
def _channels(pair, CHANNELS: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The channels of pairs; those behind the turned ones are neighbours, and are turned by an angle of zero."""
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    elif TURNED == CHANNELS:
        first, second = pair, pair + TURNED // 2
    else:
        turned = pair < TURNED // 2
        first, second = tl.where(turned, pair, 2 * pair), tl.where(turned, pair + TURNED // 2, 2 * pair + 1)
    return first, second


@triton.jit
def _part(
    query, key, value, query_stride, key_stride, head,
    QUERIES: tl.constexpr, IN_GROUP: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Where the first row of a head lies among queries, keys or values, and how far its rows are apart."""
    group, within = head // IN_GROUP, head % IN_GROUP
    part, stride = query + (group * QUERIES + within) * CHANNELS, query_stride
    if within == QUERIES:
        part, stride = key + group * CHANNELS, key_stride
    if within > QUERIES:
        part, stride = value + group * CHANNELS, key_stride
    return part, stride


@triton.jit
def _angle(cosines, sines, row, rows, second, pair, within, QUERIES: tl.constexpr, TURNED: tl.constexpr):
    """Cosine and sine for each row and pair, of an angle of zero where nothing is turned."""
    turned = (row < rows) & (pair < tl.where(within <= QUERIES, TURNED // 2, 0))[None, :]
    cosine = tl.load(cosines + row * TURNED + second[None, :], mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + row * TURNED + second[None, :], mask=turned, other=0.0).to(tl.float32)
    return cosine, sine


@triton.jit
def _scale(one, two, eps, within, QUERIES: tl.constexpr, CHANNELS: tl.constexpr):
    """1 / rms of each row of a query or key, 1 for values."""
    scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / CHANNELS + eps)
    return tl.where(within <= QUERIES, scale, 1.0)[:, None]


@triton.jit
def _weight(
    query_weight, key_weight, channel, pair, center, within, QUERIES: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """What a norm multiplies a channel of a query or key by, 1 for values."""
    weight = query_weight
    if within >= QUERIES:
        weight = key_weight
    factor = tl.load(weight + channel, mask=pair < CHANNELS // 2, other=0.0).to(tl.float32) + center
    return tl.where(within <= QUERIES, factor, 1.0)[None, :]
