"""Rotary position embeddings by explicit positions: frequencies as Hugging Face computes them, and the rotation.

Packing decides the positions; nothing here looks at sequence bounds, so that a micro-batch is rotated in one piece.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.families import Architecture
from rlflow.errors import UserError


def inverse_frequencies(arch: Architecture) -> Tensor:
    """θ^(−2i/d) for each pair of channels, scaled as `rope_scaling` says: float32 [head_dim / 2] on the CPU.

    Plain, `linear` and `llama3` scaling are known. Raises UserError for any other.
    """
    # The exact operations of transformers: float32 differs by an ulp, and an ulp of a frequency grows with position.
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).to(torch.float32) / arch.head_dim
    frequencies = 1.0 / (arch.rope_theta**exponents)
    scaling = arch.rope_scaling
    if scaling is None:
        return frequencies
    kind = scaling["rope_type"]
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequencies, scaling, arch.max_positions)
    raise UserError("config.json: rope_scaling", f"rope_type {kind!r} is not supported; known: default, linear, llama3")


def _llama3(frequencies: Tensor, scaling: dict[str, Any], max_positions: int) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling.get("original_max_position_embeddings", max_positions)
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    smooth = (trained / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    medium = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return torch.where(medium, between, stretched)


def rotation_table(position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position [T] in `dtype`: two [T, 1, head_dim], to broadcast over heads.

    Each angle is there twice, for both channels of its pair; the first one's sine is negated.
    """
    angles = position_ids.to(torch.float32)[:, None, None] * frequencies.to(position_ids.device)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _rotated(states, cosines, sines, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _rotated(grads[0], cosines, sines, -1), None, None


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor, direction: int) -> Tensor:
    """Whole heads at a time: on a CPU, operations on half a head cost twice as much."""
    partners = states.roll(states.shape[-1] // 2, -1)
    return (states * cosines).addcmul_(partners, sines, value=direction)


def rotate(states: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn channel pairs (i, i + head_dim / 2) of [T, heads, head_dim] by their positions' angles."""
    return _Rotate.apply(states, *table)
