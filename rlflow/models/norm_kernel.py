"""The Triton kernels of RMSNorm: each reads and writes every row once, computing in float32.

Imported on CUDA devices only. Which norms are computed with them, and their gradients, are in `norm`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlflow.models.sums_kernel import add_up

FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 2048, 4096
"""Of the rows that a program holds at a time; a longer row is held whole all the same."""

PROGRAMS_PER_PROCESSOR = 3
"""Of the backward pass, as many as its registers let run at once: each works off many rows, and leaves one row of
partial sums for the weight's gradient."""

STAGES_BACKWARD = 1
"""Blocks of rows in flight: those that are worked on, and those that are loaded ahead of them."""


def normalize(states: Tensor, weight: Tensor, eps: float, center: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) · (center + weight) over contiguous rows [N, M], and 1 / rms(x) as float32 [N] for the gradient."""
    rows, columns = states.shape
    out, scales = torch.empty_like(states), torch.empty(rows, dtype=torch.float32, device=states.device)
    block = triton.next_power_of_2(columns)
    height = max(1, FORWARD_ELEMENTS // block)
    _normalize[(triton.cdiv(rows, height),)](
        states, weight, out, scales, rows, columns, eps, center, height, block, num_warps=_warps(height * block, 512)
    )
    return out, scales


def normalize_backward(
    grad: Tensor, states: Tensor, weight: Tensor, scales: Tensor, center: float, passed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of `normalize` for the states [N, M] and for the weight [M], given that of its output.

    `passed` is a gradient [N, M] that reaches the states on another way, to be added.
    """
    rows, columns = states.shape
    grad_states = torch.empty_like(states)
    block = triton.next_power_of_2(columns)
    height = max(1, BACKWARD_ELEMENTS // block)
    tiles = triton.cdiv(rows, height)
    programs = min(tiles, PROGRAMS_PER_PROCESSOR * _processors(states.device))
    parts = torch.empty(programs, columns, dtype=torch.float32, device=states.device)
    _normalize_backward[(programs,)](
        grad, states, weight, scales, states if passed is None else passed, grad_states, parts,
        rows, columns, center, passed is not None, height, block, STAGES_BACKWARD,
        num_warps=_warps(height * block, 512),
    )  # fmt: skip
    return grad_states, add_up(parts, weight.dtype)


def _warps(elements: int, per_warp: int) -> int:
    return min(16, max(1, elements // per_warp))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _normalize(states, weight, out, scales, rows, columns, eps, center, HEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """One program for HEIGHT rows, each padded to BLOCK columns."""
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    place = row[:, None] * columns + column[None, :]
    exact = tl.load(states + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32) + center
    scale = tl.rsqrt(tl.sum(exact * exact, 1) / columns + eps)
    tl.store(out + place, (exact * scale[:, None] * factor[None, :]).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def _normalize_backward(
    grad, states, weight, scales, passed, grad_states, parts,
    rows, columns, center, PASSED: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs take turns at HEIGHT rows; each leaves the sums over its rows in its own row of `parts`."""
    column = tl.arange(0, BLOCK)
    factor = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32) + center
    total = tl.zeros([HEIGHT, BLOCK], tl.float32)
    for start in tl.range(tl.program_id(0) * HEIGHT, rows, tl.num_programs(0) * HEIGHT, num_stages=STAGES):
        row = (start + tl.arange(0, HEIGHT)).to(tl.int64)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        place = row[:, None] * columns + column[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(states + place, mask=inside, other=0.0).to(tl.float32) * scale
        slope = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        total += slope * normed
        slope *= factor[None, :]
        projection = tl.sum(slope * normed, 1)[:, None] / columns
        found = (slope - normed * projection) * scale
        if PASSED:
            found += tl.load(passed + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_states + place, found.to(grad_states.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0) * columns + column, tl.sum(total, 0), mask=column < columns)
