"""What a layout is: which rank holds which boxes of the canonical (Hugging Face) tensors, in which parameter.

Layouts are described by units (an embedding, a layer, a norm), because units of one kind are sharded alike: the planner
meets boxes once for a kind, never once for a layer. This module turns a family's declaration into the parameters of one
tensor-parallel shard; how ranks map to shards and units is left to the concrete layouts.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megatron_bridge.boxes import Box, Param, Piece, cut, interleave, shape_of, stack, whole
from megatron_bridge.errors import UserError
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.families.declare import Parameter, Tensor

EMBEDDING, NORM, HEAD, SCORE = "model.embed_tokens.", "model.norm.", "lm_head.", "score."  # canonical unit prefixes
HEADS, NEURONS = ("kv_heads", "heads"), ("ffn", "shared_ffn")  # axes that tensor parallelism cuts
FLOAT32_KINDS = ("router_bias",)  # units that every system keeps in float32, whatever the dtype of the model
Cuts = Mapping[str, tuple[int, int]]  # axis -> (parts, which of them)


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
    for layer in range(arch.layers):
        units += layer_units(arch, layer, layer_prefix(layer))
    units.append(Unit("norm", NORM, NORM))
    return (*units, *head_units(arch))


def layer_units(arch: Architecture, layer: int, prefix: str, names: Mapping[str, str] | None = None) -> list[Unit]:
    """A layer under its prefix in some layout, then what a layer with experts keeps in units of their own.

    `names` are the prefixes of these inside the layer, by kind, where they differ from the canonical ones.
    """
    kind, canonical = arch.layer_kinds[layer], layer_prefix(layer)
    parts = FAMILIES[arch.family].moe_parts if arch.has_experts(layer) else {}
    units = [Unit(kind, canonical, prefix)]
    return units + [Unit(part, canonical + name, prefix + (names or parts)[part]) for part, name in parts.items()]


def units_of_files(
    units: tuple[Unit, ...], owners: tuple[int, ...] | None, ranks: tuple[int, ...], rank: int
) -> tuple[Unit, ...]:
    """What a rank holds of a whole model in files: the units that it writes, or, without owners, all if it reads."""
    if owners is not None:
        return tuple(unit for unit, owner in zip(units, owners, strict=True) if owner == rank)
    return units if rank in ranks else ()


def head_units(arch: Architecture) -> list[Unit]:
    """What turns the last hidden state into an output, where it is not the embedding: under its canonical name."""
    if arch.head == "score":
        return [Unit("score", SCORE, SCORE)]
    return [] if arch.tied else [Unit("vocab", HEAD, HEAD)]


class Layout(ABC):
    """A map from canonical boxes to places. Concrete layouts are frozen dataclasses: equal fields, equal layout.

    Ranks are those of the process group that a transfer runs on; a rank outside `ranks` holds nothing.
    """

    arch: Architecture
    ranks: tuple[int, ...]

    @property
    def is_read_anywhere(self) -> bool:
        """Whether each rank of `ranks` holds all of the model, because it reads it from files."""
        return False

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
    return {tensor.name: tensor for tensor in FAMILIES[arch.family].units[kind].tensors}


@lru_cache(maxsize=64)
def weight_shapes(arch: Architecture) -> tuple[tuple[Unit, ...], dict[str, dict[str, tuple[int, ...]]]]:
    """The units of a model, and by their kinds the canonical tensors' shapes: all that two layouts must have alike."""
    units = canonical_units(arch)
    kinds = dict.fromkeys(unit.kind for unit in units)
    return units, {kind: {name: t.view(arch) for name, t in tensors_of(arch, kind).items()} for kind in kinds}


def cut_faults(arch: Architecture, cuts: Cuts, replicate_kv: bool) -> list[str]:
    """Why a model cannot be cut so; empty if it can. `replicate_kv`: ranks may hold the same KV head."""
    names = {
        "heads": "attention heads",
        "kv_heads": "KV heads",
        "ffn": "intermediate size",
        "shared_ffn": "shared experts' intermediate size",
        "experts": "experts",
        "expert_ffn": "experts' intermediate size",
        "query_latent": "query latent size",
        "kv_rank_and_rope": "key and value latent size",
    }
    kinds = {unit.kind for unit in canonical_units(arch)}
    axes = {axis for kind in kinds for tensor in tensors_of(arch, kind).values() for axis in tensor.axes}
    faults = []
    for axis, (parts, _) in cuts.items():
        present = axis in axes or (axis == "heads" and "kv_heads" in axes)
        if not present or arch.size(axis) % parts == 0:
            continue
        if axis == "kv_heads" and (arch.heads % parts or (replicate_kv and parts % arch.kv_heads == 0)):
            continue
        by = {"experts": "expert", "expert_ffn": "expert tensor"}.get(axis, "tensor")
        size = f"{names[axis]} {arch.size(axis)}" if "size" in names[axis] else f"{arch.size(axis)} {names[axis]}"
        faults.append(f"{size} {'does' if 'size' in size else 'do'} not split over {by} parallel size {parts}")
    return faults


def raise_faults(where: str, faults: Sequence[str]) -> None:
    """One UserError for all faults, none for none."""
    if faults:
        raise UserError(where, "; ".join(faults))


def tensor_cuts(tp: int, index: int) -> Cuts:
    """What tensor parallelism cuts, everywhere but in routed experts."""
    return dict.fromkeys((*HEADS, *NEURONS), (tp, index))


def expert_cuts(ep: int, index: int, etp: int, tensor_index: int) -> Cuts:
    """Routed experts go whole to `ep` places, and each is cut into `etp` there."""
    return {"experts": (ep, index), "expert_ffn": (etp, tensor_index)}


def shard_box(arch: Architecture, tensor: Tensor, cuts: Cuts) -> Box:
    """The box of a tensor that remains after the cuts of its axes; every other axis is whole.

    `kv_heads` is cut together with the axis after it, as (KV head, query in it) pairs, so a shard may be a part of one
    KV head's queries; where there are fewer KV heads than shards, neighbouring shards hold the same one.
    """
    box = list(whole(tensor.view(arch)))
    for at, axis in enumerate(tensor.axes):
        if axis not in cuts:
            continue
        parts, index = cuts[axis]
        if axis == "kv_heads":
            pair = tensor.view(arch)[at : at + 2]
            held = min(parts, prod(pair))
            part, each = index * held // parts, prod(pair) // held
            (box[at : at + 2],) = cut(pair, part * each, (part + 1) * each)
        else:
            each = arch.size(axis) // parts
            box[at] = (index * each, (index + 1) * each)
    return tuple(box)


def sharded_params(
    arch: Architecture, kind: str, declared: Sequence[Parameter], cuts: Cuts, cut_fused: bool = False
) -> tuple[Param, ...]:
    """The declared parameters of a unit kind for one shard.

    With `cut_fused` more shards than KV heads cut the rows of fused queries, keys and values evenly, be it inside a
    head, instead of repeating keys and values.
    """
    tensors = tensors_of(arch, kind)
    params: list[Param] = []
    for parameter in declared:
        parts = [tensors[name] for name in parameter.tensors]
        if cut_fused and parameter.interleave == "kv_heads" and cuts["kv_heads"][0] > arch.kv_heads:
            blocks = _fused_rows(arch, parts, *cuts["kv_heads"])
        elif parameter.straight:
            blocks = [(parts[0].name, box) for box in _run_of_rows(arch, parts[0], *cuts["ffn"])]
        else:
            blocks = [(tensor.name, shard_box(arch, tensor, cuts)) for tensor in parts]
        params += _laid_out(parameter, parts, blocks)
    return tuple(params)


def _laid_out(parameter: Parameter, tensors: Sequence[Tensor], blocks: list[tuple[str, Box]]) -> Iterator[Param]:
    columns = len(tensors[0].columns.split())
    if "{}" in parameter.name:
        first, last = blocks[0][1][0]
        for index in range(last - first):
            pieces = stack([(name, ((first + index, first + index + 1), *box[1:])) for name, box in blocks])
            yield Param(parameter.name.format(index), _matrix(columns, pieces), pieces)
    elif parameter.interleave:
        pieces = interleave(blocks)
        shape = _matrix(columns, pieces)
        experts = len(range(*blocks[0][1][0])) if parameter.interleave == "experts" else 0
        yield Param(parameter.name, (experts, shape[0] // experts, *shape[1:]) if experts else shape, pieces)
    else:
        pieces = stack(blocks)
        yield Param(parameter.name, _matrix(columns, pieces), pieces)


def _matrix(columns: int, pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Shape of a parameter that puts the rows of its pieces together; so many of their last axes are columns."""
    shapes = [shape_of(piece.box) for piece in pieces]
    rows = sum(prod(shape[: len(shape) - columns]) for shape in shapes)
    return (rows, prod(shapes[0][-columns:])) if columns else (rows,)


def _run_of_rows(arch: Architecture, tensor: Tensor, parts: int, index: int) -> list[Box]:
    """Run `index` of a tensor's rows, all as long, as boxes in their order."""
    view, split = tensor.view(arch), len(tensor.rows.split())
    each = prod(view[:split]) // parts
    return [(*box, *whole(view[split:])) for box in cut(view[:split], index * each, (index + 1) * each)]


def _fused_rows(arch: Architecture, tensors: Sequence[Tensor], parts: int, index: int) -> list[tuple[str, Box]]:
    """Part `index` of the rows of one KV head's queries, key and value, as boxes in their order."""
    each = parts // arch.kv_heads
    head, part = divmod(index, each)
    views = [tensor.view(arch) for tensor in tensors]
    rows = sum(prod(view[1:3]) for view in views) // each
    lo, hi = part * rows, (part + 1) * rows
    blocks: list[tuple[str, Box]] = []
    for tensor, view in zip(tensors, views, strict=True):
        size = prod(view[1:3])
        boxes = cut(view[1:3], max(lo, 0), min(hi, size))
        blocks += [(tensor.name, ((head, head + 1), *box, *whole(view[3:]))) for box in boxes]
        lo, hi = lo - size, hi - size
    return blocks


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
