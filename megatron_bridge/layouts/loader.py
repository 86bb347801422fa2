"""What an engine's own loader wants: whole Hugging Face tensors, in portions of bounded size.

A rank gets the tensors of which its engine holds any part there, so under expert or pipeline parallelism not all.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from megatron_bridge.boxes import Box, Param, Piece, meet
from megatron_bridge.families import Architecture
from megatron_bridge.layouts.hf import HFLayout
from megatron_bridge.layouts.layout import Layout, Unit, canonical_units
from megatron_bridge.layouts.part import Part


@dataclass(frozen=True)
class LoaderLayout(Layout):
    """The Hugging Face tensors that the loaders of an engine's ranks need, each whole."""

    engine: Layout

    @property
    def arch(self) -> Architecture:  # type: ignore[override]
        return self.engine.arch

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.engine.ranks

    def shard(self, rank: int, kind: str) -> Hashable:
        return self.engine.shard(rank, kind) if kind == "experts" else 0

    def units(self, rank: int) -> tuple[Unit, ...]:
        held = {unit.canonical for unit in self.engine.units(rank)}
        return tuple(unit for unit in HFLayout(self.arch, (rank,)).all_units if unit.canonical in held)

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        return _needed(self.engine, kind, shard)


@dataclass(frozen=True)
class SomeBoxes(Part):
    """What `base` holds of these boxes of a unit's tensors: parameters that hold nothing of them are left out."""

    boxes: tuple[tuple[str, Box], ...] = ()

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        return _cut_to(self.base, self.boxes, kind, shard)


class Portion(NamedTuple):
    """What is sent together: some units, or of a single large one some boxes."""

    units: frozenset[str]
    boxes: tuple[tuple[str, Box], ...] = ()

    def of(self, layout: Layout) -> Layout:
        """What a layout holds of this portion."""
        return SomeBoxes(layout, self.units, self.boxes) if self.boxes else Part(layout, self.units)

    def first_alike(self, source: Layout, target: Layout) -> "Portion":
        """The portion whose plan fits this one too, its parameters being the same ones in the same order."""
        if len(self.units) > 1:
            return self
        return self._replace(units=frozenset(_firsts(source, target)[unit] for unit in self.units))


def portions(arch: Architecture, limit: int) -> list[Portion]:
    """A model in the order of its forward pass, at most `limit` elements at a time or a single tensor (one expert's).

    Units go together as long as they fit; one that does not is cut into runs of its tensors.
    """
    found: list[Portion] = []
    units, filled = frozenset[str](), 0
    layout = HFLayout(arch, (0,))
    for unit in layout.all_units:
        params = layout.params(unit.kind, 0)
        size = sum(prod(param.shape) for param in params)
        if filled and filled + size > limit:
            found.append(Portion(units))
            units, filled = frozenset(), 0
        if size > limit:
            found += (Portion(frozenset({unit.canonical}), boxes) for boxes in _runs(params, limit))
        else:
            units, filled = units | {unit.canonical}, filled + size
    return [*found, Portion(units)] if units else found


def _runs(params: tuple[Param, ...], limit: int) -> Iterator[tuple[tuple[str, Box], ...]]:
    run: list[tuple[str, Box]] = []
    filled = 0
    for param in params:
        size = prod(param.shape)
        if run and filled + size > limit:
            yield tuple(run)
            run, filled = [], 0
        (piece,) = param.pieces
        if run and (joined := _joined(run[-1], piece)) is not None:
            run[-1] = (piece.name, joined)
        else:
            run.append((piece.name, piece.box))
        filled += size
    yield tuple(run)


def _joined(last: tuple[str, Box], piece: Piece) -> Box | None:
    """The box of two neighbours along the first axis, such as one expert and the next."""
    name, box = last
    if name != piece.name or box[1:] != piece.box[1:] or box[0][1] != piece.box[0][0]:
        return None
    return ((box[0][0], piece.box[0][1]), *box[1:])


@lru_cache(maxsize=16)
def _firsts(source: Layout, target: Layout) -> dict[str, str]:
    """For each unit the first one of its kind that the same ranks hold, on both sides, so that it is sent alike."""
    holders: dict[str, list[Hashable]] = {unit.canonical: [unit.kind] for unit in canonical_units(source.arch)}
    for layout in (source, target):
        ranks: dict[tuple[Unit, ...], list[int]] = defaultdict(list)
        for rank in layout.ranks:
            ranks[layout.units(rank)].append(rank)
        for units, held_by in ranks.items():
            for unit in units:
                holders[unit.canonical].append((layout is source, *held_by))
    firsts: dict[tuple[Hashable, ...], str] = {}
    return {canonical: firsts.setdefault(tuple(found), canonical) for canonical, found in holders.items()}


@lru_cache(maxsize=1024)
def _needed(engine: Layout, kind: str, shard: Hashable) -> tuple[Param, ...]:
    """The tensors of a unit kind of which a shard of the engine holds any part: of experts perhaps some only."""
    tensors = HFLayout(engine.arch, engine.ranks).params(kind, 0)
    if kind != "experts":
        return tensors
    held = [piece for param in engine.params(kind, shard) for piece in param.pieces]
    return tuple(tensor for tensor in tensors if any(_share(one, other) for one in tensor.pieces for other in held))


def _share(one: Piece, other: Piece) -> bool:
    return one.name == other.name and meet(one.box, other.box) is not None


@lru_cache(maxsize=1024)
def _cut_to(base: Layout, boxes: tuple[tuple[str, Box], ...], kind: str, shard: Hashable) -> tuple[Param, ...]:
    cut = (param._replace(pieces=tuple(_pieces(param, boxes))) for param in base.params(kind, shard))
    return tuple(param for param in cut if param.pieces)


def _pieces(param: Param, boxes: tuple[tuple[str, Box], ...]) -> Iterator[Piece]:
    for piece in param.pieces:
        for name, box in boxes:
            if name == piece.name and (both := meet(piece.box, box)) is not None:
                yield Piece(name, both, piece.at(both), piece.strides)
