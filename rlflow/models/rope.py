"""Rotary position embeddings by explicit positions: frequencies as Hugging Face computes them, and the rotation.

Packing decides the positions; nothing here looks at sequence bounds, so that a micro-batch is rotated in one piece. On
CUDA devices `rope_kernel` rotates, and takes heads out of their projection on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_bridge.families import Architecture
from rlflow.limits import check_limits


class Rope(NamedTuple):
    """One rotation of the first channels of a head, twice as many as there are frequencies."""

    frequencies: Tensor  # float32, one a pair of channels
    factor: float = 1.0  # of cosines and sines
    interleaved: bool = False  # pairs are neighbours, not channels half a rotation apart

    def to(self, device: torch.device) -> Rope:
        return self._replace(frequencies=self.frequencies.to(device))


class RotationTable(NamedTuple):
    """Cosines and sines of every row, [T, 1, channels] each; the sine of the first channel of a pair is negated."""

    cosines: Tensor
    sines: Tensor
    interleaved: bool = False


class Heads(NamedTuple):
    """What a row of a projection holds: for each group so many query heads, then a key and a value where `has_keys`."""

    groups: int
    queries: int  # of a group
    channels: int  # of a head
    has_keys: bool = True

    @property
    def in_group(self) -> int:
        return self.queries + 2 * self.has_keys

    @property
    def total(self) -> int:
        return self.groups * self.in_group

    @property
    def counts(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        return self.groups * self.queries, self.groups * self.has_keys, self.groups * self.has_keys


class HeadNorms(NamedTuple):
    """RMSNorms of queries and keys, over each head, before they are rotated."""

    query: Tensor  # weight [d]
    key: Tensor
    eps: float
    center: float  # is added to the weights


@dataclass(frozen=True)
class Ropes:
    """The rotation of a model's layers, and that of those whose attention has a window of so many tokens, if any."""

    plain: Rope
    windowed: Rope | None = None
    window: int = 0

    def to(self, device: torch.device) -> Ropes:
        windowed = None if self.windowed is None else self.windowed.to(device)
        return Ropes(self.plain.to(device), windowed, self.window)


def make_ropes(arch: Architecture) -> Ropes:
    """The rotations of a model, on the CPU. Raises UserError for a model that is not computed here."""
    check_limits(arch)
    plain = _make_rope(arch)
    windows = set(arch.windows) - {0}
    if not windows:
        return Ropes(plain)
    if arch.window_rope_theta is None:
        return Ropes(plain, plain, *windows)
    windowed = Rope(inverse_frequencies(arch.window_rope_theta, arch.rotary_dim), interleaved=arch.rotary_interleaved)
    return Ropes(plain, windowed, *windows)


def inverse_frequencies(theta: float, channels: int) -> Tensor:
    """θ^(−2i/d) for each pair of channels: float32 [channels / 2] on the CPU."""
    # The exact operations of transformers: float32 differs by an ulp, and an ulp of a frequency grows with position.
    exponents = torch.arange(0, channels, 2, dtype=torch.int64).to(torch.float32) / channels
    return 1.0 / (theta**exponents)


def _make_rope(arch: Architecture) -> Rope:
    rope = Rope(inverse_frequencies(arch.rope_theta, arch.rotary_dim), interleaved=arch.rotary_interleaved)
    scaling = arch.rope_scaling
    return rope if scaling is None else SCALINGS[scaling["rope_type"]](rope, scaling, arch)


def _linear(rope: Rope, scaling: dict[str, Any], arch: Architecture) -> Rope:
    """Positions are divided by `factor`."""
    return rope._replace(frequencies=rope.frequencies / scaling["factor"])


def _llama3(rope: Rope, scaling: dict[str, Any], arch: Architecture) -> Rope:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    frequencies = rope.frequencies
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling.get("original_max_position_embeddings", arch.max_positions)
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > trained / low, frequencies / factor, frequencies)
    smooth = (trained / wavelengths - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    medium = (wavelengths >= trained / high) & (wavelengths <= trained / low)
    return rope._replace(frequencies=torch.where(medium, between, stretched))


def _yarn(rope: Rope, scaling: dict[str, Any], arch: Architecture) -> Rope:
    """YaRN (arXiv:2309.00071, section 3.2): channels that turn seldom in the trained length are stretched by `factor`.

    `beta_fast` and `beta_slow` are turns between which the stretch sets in; cosines and sines are enlarged too.
    """
    channels, theta, factor = 2 * len(rope.frequencies), arch.rope_theta, scaling["factor"]
    trained = scaling.get("original_max_position_embeddings", arch.max_positions)
    turns = (scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1)
    first, last = (channels * math.log(trained / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in turns)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    ramp = (torch.arange(channels // 2, dtype=torch.float32) - first) / (last - first or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    stretched = 1.0 / (factor * (theta ** (torch.arange(0, channels, 2).float() / channels)))
    frequencies = stretched * (1 - kept) + rope.frequencies * kept
    return rope._replace(frequencies=frequencies, factor=_attention_factor(scaling))


def _attention_factor(scaling: Mapping[str, Any]) -> float:
    """What YaRN multiplies cosines and sines by: 0.1 · ln(factor) + 1 unless the config says otherwise."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return yarn_scale(scaling["factor"], scaling["mscale"]) / yarn_scale(
            scaling["factor"], scaling["mscale_all_dim"]
        )
    return yarn_scale(scaling["factor"])


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """0.1 · mscale · ln(factor) + 1, YaRN's answer to attention that grows flat with length; 1 without a stretch."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


SCALINGS: dict[str, Callable[[Rope, dict[str, Any], Architecture], Rope]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def rotation_table(position_ids: Tensor, rope: Rope, dtype: torch.dtype) -> RotationTable:
    """Cosines and sines of every position [T] in `dtype`, each angle twice: for both channels of its pair."""
    angles = position_ids.to(torch.float32)[:, None, None] * rope.frequencies.to(position_ids.device)
    cosines, sines = ((part * rope.factor).to(dtype) for part in (angles.cos(), angles.sin()))
    if rope.interleaved:
        return RotationTable(cosines.repeat_interleave(2, -1), torch.stack([-sines, sines], -1).flatten(-2), True)
    return RotationTable(torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        ctx.interleaved = interleaved
        return _rotated(states, cosines, sines, interleaved, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        cosines, sines = ctx.saved_tensors
        return _rotated(grads[0], cosines, sines, ctx.interleaved, -1), None, None, None


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool, direction: int) -> Tensor:
    """Whole heads at a time: on a CPU, operations on half a head cost twice as much."""
    if interleaved:
        partners = states.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = states.roll(states.shape[-1] // 2, -1)
    return (states * cosines).addcmul_(partners, sines, value=direction)


def rotate(states: Tensor, table: RotationTable) -> Tensor:
    """Turn the channel pairs of [T, heads, head_dim] by their positions' angles, in as many channels as the table has.

    The pairs are those of the table: (i, i + channels / 2), or neighbours.
    """
    channels = table.cosines.shape[-1]
    if states.is_cuda:
        heads = Heads(1, states.shape[1], states.shape[2], has_keys=False)
        return _SplitAndRotate.apply(states, None, None, None, heads, table, None)[0]
    if channels == states.shape[-1]:
        return _Rotate.apply(states, *table)
    return torch.cat([_Rotate.apply(states[..., :channels], *table), states[..., channels:]], -1)


def split_and_rotate(
    joined: Tensor, heads: Heads, table: RotationTable, *, bias: Tensor | None = None, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys and plain values out of a projection, by one kernel each way.

    For a CUDA device. Before they are rotated the projection's bias is added, or queries and keys are normed. joined
    [T, heads · d], bias [heads · d] → [T, groups · queries, d], [T, groups, d] twice.
    """
    joined = joined.unflatten(-1, (heads.total, heads.channels))
    weights = (None, None) if norms is None else norms[:2]
    return _SplitAndRotate.apply(joined, bias, *weights, heads, table, norms)


class _SplitAndRotate(torch.autograd.Function):
    """By the kernels; where there are no keys, only the first result is meant."""

    @staticmethod
    def forward(
        ctx: Any, joined: Tensor, bias: Tensor | None, query_weight: Tensor | None, key_weight: Tensor | None,
        heads: Heads, table: RotationTable, norms: HeadNorms | None,
    ) -> Any:  # fmt: skip
        from rlflow.models.rope_kernel import Split, split_and_turn

        joined = joined if joined.stride(-1) == 1 else joined.contiguous()
        ctx.save_for_backward(joined if norms else None, bias, query_weight, key_weight, *table[:2])
        ctx.heads, ctx.interleaved, ctx.how = heads, table.interleaved, norms and norms[2:]
        return split_and_turn(joined, Split(heads, table, bias, norms))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        from rlflow.models.rope_kernel import Split, split_and_turn_backward

        joined, bias, query_weight, key_weight, cosines, sines = ctx.saved_tensors
        norms = HeadNorms(query_weight, key_weight, *ctx.how) if ctx.how else None
        split = Split(ctx.heads, RotationTable(cosines, sines, ctx.interleaved), bias, norms)
        query, key, value = (grad.contiguous() for grad in grads)
        found, learned = split_and_turn_backward((query, key, value), joined, split)
        return found, *_parameter_gradients(learned, split.heads, bias, norms), None, None, None


def _parameter_gradients(
    learned: Tensor | None, heads: Heads, bias: Tensor | None, norms: HeadNorms | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of bias and norms, from what each head contributes, [heads, d]."""
    if learned is None:
        return None, None, None
    if bias is not None:
        return learned.flatten(), None, None
    assert norms is not None
    grouped = learned.unflatten(0, (heads.groups, heads.in_group))
    query, key = grouped[:, : heads.queries].sum((0, 1)), grouped[:, heads.queries].sum(0)
    return None, query.to(norms.query.dtype), key.to(norms.key.dtype)
