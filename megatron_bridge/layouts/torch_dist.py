"""The layout of a `torch_dist` checkpoint: Megatron's whole tensors, each cut into boxes that lie in files.

Parameters are those of a Megatron model on one rank, layers numbered through; box `i` of parameter `x` is named `x@i`.
Under which key of the checkpoint a parameter is stored, alone or stacked with those of other layers and experts, is
said here too; files are left to `distcp`.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from megatron_bridge.boxes import Box, Param, Piece, row_major, shape_of, volume, within
from megatron_bridge.families import Architecture
from megatron_bridge.layouts.layout import Layout, Unit, units_of_files
from megatron_bridge.layouts.megatron import MegatronLayout

Grid = tuple[tuple[str, tuple[Box, ...]], ...]  # the boxes of each parameter of a unit
Grids = tuple[tuple[str, Grid], ...]  # by unit kind

LOCAL_SPEC_KEYS = {  # megatron's local spec without latents stores norms under Transformer Engine's names
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
LAYER, EXPERT = re.compile(r"^decoder\.layers\.(\d+)\."), re.compile(r"mlp\.experts\.local_experts\.(\d+)\.")
IGNORED = re.compile(
    r"(.*\.)?(optimizer|opt_param_scheduler|rng_state|rerun_state_machine_state|_extra_state)(\..*|/.*)?"
)
GATED = ("_w", "_v")  # gate and up projection, where each has a key of its own


@dataclass(frozen=True)
class TorchDistLayout(Layout):
    """A checkpoint whose parameters are cut as `grids` says, unit kind by unit kind.

    As a source each rank of `ranks` reads whatever it needs, so each holds everything. As a destination `owners` names
    the rank that writes each unit of `all_units`.
    """

    arch: Architecture
    ranks: tuple[int, ...]
    grids: Grids
    owners: tuple[int, ...] | None = None

    @property
    def is_read_anywhere(self) -> bool:
        return self.owners is None

    @property
    def all_units(self) -> tuple[Unit, ...]:
        """The units of a checkpoint in the order of the forward pass."""
        return one_rank(self.arch).units(0)

    def shard(self, rank: int, kind: str) -> Hashable:
        return 0

    def units(self, rank: int) -> tuple[Unit, ...]:
        return units_of_files(self.all_units, self.owners, self.ranks, rank)

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        return self._params[kind]

    @cached_property
    def _params(self) -> dict[str, tuple[Param, ...]]:
        return {kind: tuple(_cut_params(whole_params(self.arch, kind), grid)) for kind, grid in self.grids}

    @cached_property
    def boxes(self) -> Mapping[str, tuple[Box, ...]]:
        """The boxes of each parameter by its full name."""
        return {unit.prefix + name: boxes for unit in self.all_units for name, boxes in dict(self.grids)[unit.kind]}


def _cut_params(params: Mapping[str, Param], grid: Grid) -> Iterator[Param]:
    """The boxes of one unit's parameters, each as a parameter."""
    for name, boxes in grid:
        param = padded(params[name], max(box[0][1] for box in boxes))
        for i, box in enumerate(boxes):
            yield window(param, box, f"{name}@{i}")


@lru_cache(maxsize=16)
def one_rank(arch: Architecture) -> MegatronLayout:
    """The layout of a whole model on one rank, whose names and shapes a checkpoint's keys go back to."""
    return MegatronLayout(arch)


@lru_cache(maxsize=64)
def whole_params(arch: Architecture, kind: str) -> dict[str, Param]:
    """The uncut parameters of a unit kind by name; a vocabulary without padding."""
    base = one_rank(arch)
    return {param.name: padded(param, 0) for param in base.params(kind, base.shard(0, kind))}


def padded(param: Param, rows: int) -> Param:
    """A parameter with as many rows of padding as make it up to `rows`."""
    inner = param.shape[1:]
    filled = param.shape[0] - param.padding // prod(inner)
    padding = max(0, rows - filled)
    return param._replace(shape=(filled + padding, *inner), padding=padding * prod(inner))


# ---------------------------------------------------------------- boxes of a parameter
def window(param: Param, box: Box, name: str) -> Param:
    """What a parameter holds inside a box of it, as a contiguous parameter of the box's shape."""
    pieces = tuple(piece for held in param.pieces for piece in _pieces_within(held, param.shape, box))
    return Param(name, shape_of(box), pieces, volume(box) - sum(volume(piece.box) for piece in pieces))


def _pieces_within(piece: Piece, shape: Sequence[int], box: Box) -> Iterator[Piece]:
    """The parts of a piece inside a box of its parameter.

    Each axis of the piece steps along one dimension of the parameter, so dimensions are taken one by one.
    """
    outer, inner = row_major(shape), row_major(shape_of(box))
    along = [_dimension(stride, outer) for stride in piece.strides]
    lengths, steps = shape_of(piece.box), [stride // outer[d] for stride, d in zip(piece.strides, along, strict=True)]
    choices = []
    for d, (lo, hi) in enumerate(box):
        dims = tuple((n, s) for n, s, axis in zip(lengths, steps, along, strict=True) if axis == d)
        choices.append(list(within(dims, piece.offset // outer[d] % shape[d], lo, hi)))
    for chosen in product(*choices):
        at = sum((start - lo) * stride for (start, _), (lo, _), stride in zip(chosen, box, inner, strict=True))
        taken = [iter(intervals) for _, intervals in chosen]
        local = [next(taken[d]) for d in along]
        held = tuple((a + lo, b + lo) for (lo, _), (a, b) in zip(piece.box, local, strict=True))
        yield Piece(piece.name, held, at, tuple(s * inner[d] for s, d in zip(steps, along, strict=True)))


def _dimension(stride: int, strides: Sequence[int]) -> int:
    return next(d for d, step in enumerate(strides) if step <= stride or d == len(strides) - 1)


# ---------------------------------------------------------------- how a checkpoint is cut
def cut_grids(layout: MegatronLayout, most: int) -> Grids:
    """The grid in which a Megatron layout's ranks would save their shards, cut further along the rows.

    No box has more than `most` elements, unless one row has. The vocabulary has the layout's padding.
    """
    kinds = dict.fromkeys(unit.kind for unit in one_rank(layout.arch).units(0))
    return tuple((kind, tuple(_grid(layout, kind, most))) for kind in kinds)


def _grid(layout: MegatronLayout, kind: str, most: int) -> Iterator[tuple[str, tuple[Box, ...]]]:
    named = replace(layout, spec="local", experts="sequential")
    shards = {param.name: param.shape for param in named.params(kind, named.shard(named.ranks[0], kind))}
    for name, param in whole_params(layout.arch, kind).items():
        shape = padded(param, layout.padded_vocab).shape if kind == "vocab" else param.shape
        held = shards[re.sub(r"^local_experts\.\d+", "local_experts.0", name)]
        parts = [n // m for n, m in zip(shape, held, strict=True)]
        if parts[0] > 1 and len(param.pieces) > 1 and param.pieces[0].strides[0] == volume(param.pieces[0].box[1:]):
            parts[0] *= len(param.pieces)  # gate and up projection are cut one by one
        yield name, tuple(_cut(shape, parts, most))


def _cut(shape: Sequence[int], parts: Sequence[int], most: int) -> Iterator[Box]:
    """The boxes of an even grid, each cut along its rows until it has at most `most` elements."""
    sizes = [n // k for n, k in zip(shape, parts, strict=True)]
    rows = max(1, most // prod(sizes[1:]))
    for place in product(*map(range, parts)):
        box = [(i * n, (i + 1) * n) for i, n in zip(place, sizes, strict=True)]
        for lo in range(*box[0], rows):
            yield ((lo, min(lo + rows, box[0][1])), *box[1:])


# ---------------------------------------------------------------- keys
class Stored(NamedTuple):
    """Where a parameter is stored: a key, and its indices along the axes that the key's tensor has before its own.

    `lead` are these axes' lengths. `part` is the place among the parts of a parameter that is stored in several keys.
    """

    key: str
    indices: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()
    part: int = 0


class Names(NamedTuple):
    """What a parameter is called in keys: in a model of Transformer Engine's spec, of the local one, and otherwise."""

    te: str
    local: str
    own: str

    def written(self) -> tuple[str, ...]:
        """One name where the stock specs agree, else each that one of them may ask for."""
        return (self.te,) if self.te == self.local else self.known()

    def known(self) -> tuple[str, ...]:
        """Each name once."""
        return tuple(dict.fromkeys(self))


@lru_cache(maxsize=64)
def key_names(arch: Architecture, kind: str) -> dict[str, Names]:
    """The names in keys of a unit kind's parameters, by their names in `one_rank`."""
    base, te = one_rank(arch), MegatronLayout(arch, spec="te")
    names = {}
    for param, fused in zip(*(layout.params(kind, base.shard(0, kind)) for layout in (base, te)), strict=True):
        local = param.name
        for prefix, other in LOCAL_SPEC_KEYS.items():
            if local.startswith(prefix) and arch.latent is None:
                local = other + local.removeprefix(prefix)
        names[param.name] = Names(fused.name, local, param.name)
    return names


def are_layers_stacked(keys: Iterable[str]) -> bool:
    """Whether these are the keys of a checkpoint that stacks its layers: their names have no numbers then."""
    return any(re.match(r"decoder\.layers\.[a-z]", key) for key in keys)


def is_homogeneous(arch: Architecture) -> bool:
    """Whether Megatron stacks the layers of a model in a checkpoint: where all are of one kind."""
    return len(set(arch.layer_kinds)) == 1


def stored(arch: Architecture, name: str, homogeneous: bool) -> Stored:
    """Where a parameter of this full name is stored.

    In a homogeneous checkpoint layers are stacked; experts always are.
    """
    indices: tuple[int, ...] = ()
    lead: tuple[int, ...] = ()
    if homogeneous and (layer := LAYER.match(name)):
        indices, lead = (int(layer[1]),), (arch.layers,)
        name = LAYER.sub("decoder.layers.", name)
    if (expert := EXPERT.search(name)) and arch.experts is not None:
        indices, lead = (*indices, int(expert[1])), (*lead, arch.experts.count)
        name = EXPERT.sub("mlp.experts.experts.", name)
    return Stored(name, indices, lead)


def candidates(arch: Architecture, name: str) -> Iterator[tuple[Stored, ...]]:
    """Every way in which a parameter of this full name may be stored, as the places of its parts one after another."""
    for homogeneous in (True, False):
        yield (stored(arch, name, homogeneous),)
    single = EXPERT.sub(r"mlp.experts.experts.\1.", name)
    yield (Stored(single),)
    yield tuple(Stored(f"{single}{suffix}", part=i) for i, suffix in enumerate(GATED))


def extra_states(arch: Architecture, unit: Unit) -> list[str]:
    """Keys of what the modules of a unit keep besides weights (scales of 8-bit formats), which Megatron insists on."""
    if not unit.prefix.startswith("decoder."):
        return []
    names = [name for param in key_names(arch, unit.kind).values() for name in param.written()]
    modules = dict.fromkeys(name.rpartition(".")[0] for name in names if "." in name)
    if any(module.startswith("self_attention.") for module in modules):
        modules["self_attention.core_attention"] = None
    keys = []
    for module in modules:
        place = stored(arch, f"{unit.prefix}{module}._extra_state", is_homogeneous(arch))
        at, of = (".".join(map(str, numbers)) for numbers in (place.indices or (0,), place.lead or (1,)))
        keys.append(f"{place.key}/shard_{at}_{of}")
    return keys
