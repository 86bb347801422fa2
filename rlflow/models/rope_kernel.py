"""The Triton kernel that takes heads out of a projection, adds its bias and turns them, and undoes all that backwards.

Imported on CUDA devices only. Rows are read where the projection wrote them and written as attention wants them, once
each way. Which heads there are, and the gradients, are in `rope`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlflow.models.sums_kernel import add_up

if TYPE_CHECKING:
    from rlflow.models.rope import Heads, RotationTable

ELEMENTS, WARPS = 1024, 4  # of each half of the channel pairs that a program holds at a time
STEPS_FORWARD, STEPS_BACKWARD = 1, 4
"""Blocks of rows that a program works off; backwards it leaves one row of partial sums for the bias."""

Parts = tuple[Tensor, Tensor, Tensor]
"""Queries [T, groups · queries, d], keys and values [T, groups, d]; without keys the latter two have no elements."""


def split_and_turn(joined: Tensor, bias: Tensor | None, heads: Heads, table: RotationTable) -> Parts:
    """Turned queries and keys, and values as they are, contiguous each.

    joined: [T, heads, d], whose last dimension is contiguous; bias: [heads · d]. Channels of a head beyond those of the
    table stay as they are.
    """
    rows, kv_heads = len(joined), heads.groups * heads.has_keys
    query, key, value = (
        joined.new_empty(rows, size, heads.channels) for size in (heads.groups * heads.queries, kv_heads, kv_heads)
    )
    _launch(joined, (query, key, value), bias, None, heads, table)
    return query, key, value


def split_and_turn_backward(
    grads: Parts, bias: Tensor | None, heads: Heads, table: RotationTable
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `split_and_turn` for `joined`, contiguous [T, heads, d], and for the bias; `grads` too are."""
    rows = len(grads[0])
    joined = grads[0].new_empty(rows, heads.total, heads.channels)
    blocks = triton.cdiv(rows, STEPS_BACKWARD * _rows_in_block(heads))
    width = 0 if bias is None else bias.numel()
    sums = torch.empty(blocks, width, dtype=torch.float32, device=joined.device)
    _launch(joined, grads, bias, sums, heads, table)
    return joined, None if bias is None else add_up(sums, bias.dtype)


def _rows_in_block(heads: Heads) -> int:
    return max(1, ELEMENTS // triton.next_power_of_2(heads.channels // 2))


def _launch(
    joined: Tensor, parts: Parts, bias: Tensor | None, sums: Tensor | None, heads: Heads, table: RotationTable
) -> None:
    """Forwards without `sums`, backwards with them."""
    height, steps = _rows_in_block(heads), STEPS_FORWARD if sums is None else STEPS_BACKWARD
    nothing = table.cosines  # in the place of a tensor that is not looked at
    _turn[(heads.total, triton.cdiv(len(joined), height * steps))](
        joined, *parts, nothing if bias is None else bias, nothing if sums is None else sums, table.cosines,
        table.sines, len(joined), joined.stride(0), joined.stride(1), parts[0].stride(0), parts[1].stride(0),
        QUERIES=heads.queries, HAS_KEYS=heads.has_keys, CHANNELS=heads.channels, TURNED=table.cosines.shape[-1],
        INTERLEAVED=table.interleaved, HAS_BIAS=bias is not None, BACKWARD=sums is not None,
        HEIGHT=height, STEPS=steps, PAIRS=triton.next_power_of_2(heads.channels // 2), num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _turn(
    joined, query, key, value, bias, sums, cosines, sines, rows, row_stride, head_stride, query_stride, key_stride,
    QUERIES: tl.constexpr, HAS_KEYS: tl.constexpr, CHANNELS: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr, BACKWARD: tl.constexpr,
    HEIGHT: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One program for a head of STEPS times HEIGHT rows, held as the first and the second channels of pairs.

    Forwards data go from `joined` to the parts, backwards the other way and by the negative angle.
    """
    head = tl.program_id(0)
    group, within = head // (QUERIES + 2 * HAS_KEYS), head % (QUERIES + 2 * HAS_KEYS)
    part, width = query + (group * QUERIES + within) * CHANNELS, query_stride
    if within == QUERIES:
        part, width = key + group * CHANNELS, key_stride
    if within > QUERIES:
        part, width = value + group * CHANNELS, key_stride
    pair = tl.arange(0, PAIRS)
    first, second = _channels(pair, CHANNELS, TURNED, INTERLEAVED)
    is_pair, is_turned = pair < CHANNELS // 2, pair < tl.where(within <= QUERIES, TURNED // 2, 0)
    bias_1 = tl.zeros([PAIRS], tl.float32)
    bias_2 = tl.zeros([PAIRS], tl.float32)
    if HAS_BIAS and not BACKWARD:
        bias_1 += tl.load(bias + head * CHANNELS + first, mask=is_pair, other=0.0).to(tl.float32)
        bias_2 += tl.load(bias + head * CHANNELS + second, mask=is_pair, other=0.0).to(tl.float32)
    sum_1 = tl.zeros([HEIGHT, PAIRS], tl.float32)
    sum_2 = tl.zeros([HEIGHT, PAIRS], tl.float32)
    for step in range(STEPS):
        row = ((tl.program_id(1) * STEPS + step) * HEIGHT + tl.arange(0, HEIGHT)).to(tl.int64)[:, None]
        inside = (row < rows) & is_pair[None, :]
        turned = (row < rows) & is_turned[None, :]
        cosine = tl.load(cosines + row * TURNED + second[None, :], mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sines + row * TURNED + second[None, :], mask=turned, other=0.0).to(tl.float32)
        source, target = joined + row * row_stride + head * head_stride, part + row * width
        if BACKWARD:
            source, target, sine = target, source, -sine
        one = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32) + bias_1[None, :]
        two = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32) + bias_2[None, :]
        new_one, new_two = one * cosine - two * sine, two * cosine + one * sine
        tl.store(target + first[None, :], new_one.to(target.dtype.element_ty), mask=inside)
        tl.store(target + second[None, :], new_two.to(target.dtype.element_ty), mask=inside)
        sum_1 += new_one
        sum_2 += new_two
    if HAS_BIAS and BACKWARD:
        place = sums + (tl.program_id(1) * tl.num_programs(0) + head) * CHANNELS
        tl.store(place + first, tl.sum(sum_1, 0), mask=is_pair)
        tl.store(place + second, tl.sum(sum_2, 0), mask=is_pair)


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
