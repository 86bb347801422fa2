"""The Triton kernels of SwiGLU: one pass over gate and up each way, computed in float32.

Imported on CUDA devices only; which activations are computed with them is in `activation`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 1024, 4


def swiglu(joined: Tensor) -> Tensor:
    """silu(gate) · up of contiguous rows [N, gate | up]: [N, 2 · M] → [N, M]."""
    rows, columns = joined.shape[0], joined.shape[1] // 2
    out = torch.empty(rows, columns, dtype=joined.dtype, device=joined.device)
    blocks = triton.cdiv(columns, BLOCK)
    _swiglu[(rows * blocks,)](joined, out, columns, blocks, BLOCK, num_warps=WARPS)
    return out


def swiglu_backward(joined: Tensor, grad: Tensor) -> Tensor:
    """The gradient of `swiglu` [N, 2 · M], given that of its output [N, M], contiguous."""
    rows, columns = grad.shape
    out = torch.empty_like(joined)
    blocks = triton.cdiv(columns, BLOCK)
    _swiglu_backward[(rows * blocks,)](joined, grad, out, columns, blocks, BLOCK, num_warps=WARPS)
    return out


@triton.jit
def _swiglu(joined, out, columns, blocks, BLOCK: tl.constexpr):
    """One program for a block of columns of a row."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(joined + row * 2 * columns + column, mask=inside).to(tl.float32)
    up = tl.load(joined + row * 2 * columns + columns + column, mask=inside).to(tl.float32)
    tl.store(out + row * columns + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(joined, grad, out, columns, blocks, BLOCK: tl.constexpr):
    """The same blocks: d silu(g) / dg = σ(g) · (1 + g · (1 − σ(g)))."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = row * 2 * columns + column
    gate = tl.load(joined + place, mask=inside).to(tl.float32)
    up = tl.load(joined + place + columns, mask=inside).to(tl.float32)
    slope = tl.load(grad + row * columns + column, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = slope * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + place, grad_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + place + columns, (slope * gate * sigmoid).to(out.dtype.element_ty), mask=inside)
