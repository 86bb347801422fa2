"""What a layout is: which rank holds which boxes of the canonical (Hugging Face) tensors, in which parameter.

Layouts are described by units (an embedding, a layer, a norm), because units of one kind are sharded alike: the planner
meets boxes once for a kind, never once for a layer. This module turns a family's declaration into the parameters of one
tensor-parallel shard; how ranks map to shards and units is left to the concrete layouts.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megatron_bridge.boxes import Box, Param, Piece, cut, interleave, shape_of, stack, whole
from megatron_bridge.errors import UserError
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.families.declare import Parameter, Tensor

EMBEDDING, NORM, HEAD = "model.embed_tokens.", "model.norm.", "lm_head."  # canonical unit prefixes


def layer_prefix(layer: int) -> str:
    """Canonical prefix of a layer's tensors."""
    return f"model.layers.{layer}."


class Unit(NamedTuple):
    """A group of tensors that are placed together: its kind, its canonical prefix, its prefix in this layout."""

    kind: str
    canonical: str
    prefix: str


@lru_cache(maxsize=64)
def canonical_units(arch: Architecture) -> tuple[Unit, ...]:
    """The units of a model in the order of the forward pass, under their canonical names."""
    units = [Unit("vocab", EMBEDDING, EMBEDDING)]
    units += [Unit("layer", layer_prefix(i), layer_prefix(i)) for i in range(arch.layers)]
    units.append(Unit("norm", NORM, NORM))
    if not arch.tied:
        units.append(Unit("vocab", HEAD, HEAD))
    return tuple(units)


class Layout(ABC):
    """A map from canonical boxes to places. Concrete layouts are frozen dataclasses: equal fields, equal layout.

    Ranks are those of the process group that a transfer runs on; a rank outside `ranks` holds nothing.
    """

    arch: Architecture
    ranks: tuple[int, ...]

    @abstractmethod
    def shard(self, rank: int, kind: str) -> Hashable:
        """Which slice of its units of a kind a rank of the layout holds."""

    @abstractmethod
    def units(self, rank: int) -> tuple[Unit, ...]:
        """The units of a rank, in a fixed order; empty for ranks outside the layout."""

    @abstractmethod
    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        """The parameters of one unit of a kind on one shard, names without the unit's prefix."""

    def parameters(self, rank: int) -> dict[str, Param]:
        """Every parameter of a rank by its full name."""
        return {
            unit.prefix + param.name: param
            for unit in self.units(rank)
            for param in self.params(unit.kind, self.shard(rank, unit.kind))
        }

    def padding(self, rank: int) -> dict[str, int]:
        """Elements of padding at the end of each parameter of a rank that has any."""
        return {name: param.padding for name, param in self.parameters(rank).items() if param.padding}


def tensors_of(arch: Architecture, kind: str) -> dict[str, Tensor]:
    """The canonical tensors of a unit kind by name."""
    return {tensor.name: tensor for tensor in FAMILIES[arch.family].tensors[kind]}


def split_faults(arch: Architecture, tp: int, replicate_kv: bool) -> list[str]:
    """Why a model cannot be cut into `tp` shards; empty if it can."""
    faults = []
    if arch.heads % tp:
        faults.append(f"{arch.heads} attention heads do not split over tensor parallel size {tp}")
    elif arch.kv_heads % tp and not (replicate_kv and tp % arch.kv_heads == 0):
        faults.append(f"{arch.kv_heads} KV heads do not split over tensor parallel size {tp}")
    if arch.ffn % tp:
        faults.append(f"intermediate size {arch.ffn} does not split over tensor parallel size {tp}")
    return faults


def raise_faults(where: str, faults: Sequence[str]) -> None:
    """One UserError for all faults, none for none."""
    if faults:
        raise UserError(where, "; ".join(faults))


def shard_box(arch: Architecture, tensor: Tensor, tp: int, index: int) -> Box:
    """The box of shard `index` of `tp`: heads and the feed-forward axis are cut, every other axis is whole.

    Heads are cut as (KV head, query in it) pairs, so a shard may be a part of one KV head's queries; where there are
    fewer KV heads than shards, neighbouring shards hold the same one.
    """
    box = list(whole(tensor.view(arch)))
    axes = tensor.axes
    if "kv_heads" in axes:
        at = axes.index("kv_heads")
        pair = tensor.view(arch)[at : at + 2]
        parts = min(tp, prod(pair))
        part, each = index * parts // tp, prod(pair) // parts
        (box[at : at + 2],) = cut(pair, part * each, (part + 1) * each)
    if "ffn" in axes:
        each = arch.ffn // tp
        box[axes.index("ffn")] = (index * each, (index + 1) * each)
    return tuple(box)


def sharded_params(
    arch: Architecture, kind: str, declared: Sequence[Parameter], tp: int, index: int
) -> tuple[Param, ...]:
    """The declared parameters of a unit kind for one tensor-parallel shard."""
    tensors = tensors_of(arch, kind)
    params = []
    for parameter in declared:
        parts = [tensors[name] for name in parameter.tensors]
        boxes = [(tensor.name, shard_box(arch, tensor, tp, index)) for tensor in parts]
        pieces = interleave(boxes) if parameter.interleave else stack(boxes)
        params.append(Param(parameter.name, _matrix(parts, pieces), pieces))
    return tuple(params)


def _matrix(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Shape of a parameter that puts the rows of its pieces together."""
    split = len(tensors[0].rows.split())
    shapes = [shape_of(piece.box) for piece in pieces]
    rows = sum(prod(shape[:split]) for shape in shapes)
    return (rows, prod(shapes[0][split:])) if tensors[0].columns else (rows,)


def vocab_params(arch: Architecture, padded: int, tp: int, index: int) -> tuple[Param, ...]:
    """An embedding or output matrix cut by rows of the padded vocabulary; what lies past the real one is padding."""
    each = padded // tp
    rows = (min(index * each, arch.vocab), min((index + 1) * each, arch.vocab))
    padding = (each - (rows[1] - rows[0])) * arch.hidden
    pieces = stack([("weight", (rows, (0, arch.hidden)))])
    return (Param("weight", (each, arch.hidden), pieces, padding),)


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is not below `n`."""
    return -(-n // multiple) * multiple
