"""What the ranks of one node need of a unit, cut into boxes by who needs them and who holds them.

A box that a rank holds itself is its own, one that another rank of its node holds is near, everything else is remote; a
remote box that several ranks of the node need is listed once, with all of them. Which holder gives and which needer
fetches is left to `plan`. Members of a node are counted from 0.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from megatron_bridge.boxes import Box, Param, Piece, meet, minus, volume
from megatron_bridge.errors import UserError
from megatron_bridge.layouts.layout import Layout

Slices = tuple[tuple[int, Hashable], ...]  # (member, the shard that it has or wants)
Params = Callable[[str, Hashable], tuple[Param, ...]]  # (unit kind, shard) -> its parameters


class Spot(NamedTuple):
    """A piece and the name of the parameter that it lies in, without the unit's prefix."""

    param: str
    piece: Piece


class Part(NamedTuple):
    """A box of one unit, where its holders keep it and where each needer does, in the order of `Need.needers`."""

    box: Box
    source: Spot
    targets: tuple[Spot, ...]


class Need(NamedTuple):
    """Boxes of one unit with the same needers and the same holders.

    `holders` are members of the node; if it is empty the boxes are remote, and the ranks of `shards` hold them.
    """

    needers: tuple[int, ...]
    holders: tuple[int, ...]
    shards: tuple[Hashable, ...]
    elements: int
    parts: tuple[Part, ...]


class Meeting:
    """Meets two layouts, a node's ranks at a time; what it has met once it remembers, as most nodes are alike."""

    def __init__(self, source: Layout, target: Layout) -> None:
        self._held: Params = cache(source.params)
        self._wanted: Params = cache(target.params)
        self._remote: dict[tuple[str, tuple[Hashable, ...]], _Holdings] = {}
        self._needs: dict[tuple[str, Slices, Slices, tuple[Hashable, ...]], tuple[Need, ...]] = {}

    def needs(self, kind: str, wants: Slices, haves: Slices, shards: tuple[Hashable, ...]) -> tuple[Need, ...]:
        """How a node's members fill one unit of a kind: they want `wants`, hold `haves`, and `shards` are anywhere.

        Raises UserError if nobody holds a box that is wanted.
        """
        key = (kind, wants, haves, shards)
        if key not in self._needs:
            if (kind, shards) not in self._remote:
                self._remote[kind, shards] = _Holdings(self._held, kind, ((shard, shard) for shard in shards))
            found: _Found = defaultdict(list)
            near = _Holdings(self._held, kind, haves)
            left = _take_near(near, self._wants(kind, wants), found)
            _take_remote(near, self._remote[kind, shards], left, found)
            self._needs[key] = tuple(
                Need(*who, elements=sum(volume(part.box) for part in parts), parts=tuple(parts))
                for who, parts in found.items()
            )
        return self._needs[key]

    def shared(self, kind: str, have: Hashable, want: Hashable) -> int:
        """Elements of a unit that source shard `have` holds of what target shard `want` consists of."""
        held = _Holdings(self._held, kind, ((have, have),))
        return sum(
            volume(box)
            for param in self._wanted(kind, want)
            for piece in param.pieces
            for other in held.overlapping(piece.name, piece.box)
            if (box := meet(piece.box, other.spot.piece.box)) is not None
        )

    def elements(self, kind: str, want: Hashable) -> int:
        """Elements of a unit that target shard `want` consists of, padding left out."""
        return sum(volume(piece.box) for param in self._wanted(kind, want) for piece in param.pieces)

    def _wants(self, kind: str, wants: Slices) -> Iterator[tuple[int, Spot]]:
        for member, shard in wants:
            for param in self._wanted(kind, shard):
                for piece in param.pieces:
                    yield member, Spot(param.name, piece)


_Who = tuple[tuple[int, ...], tuple[int, ...], tuple[Hashable, ...]]  # needers, holders, shards
_Found = dict[_Who, list[Part]]
_Needers = tuple[tuple[int, Spot], ...]


class _Holding(NamedTuple):
    spot: Spot
    holders: tuple[Hashable, ...]  # equal pieces are replicas


class _Holdings:
    """Source pieces by tensor, sorted by their first interval, so that only those that may meet a box are looked at."""

    def __init__(self, params: Params, kind: str, holders: Iterable[tuple[Hashable, Hashable]]) -> None:
        pieces: dict[str, dict[Spot, list[Hashable]]] = defaultdict(lambda: defaultdict(list))
        for holder, shard in holders:
            for param in params(kind, shard):
                for piece in param.pieces:
                    pieces[piece.name][Spot(param.name, piece)].append(holder)
        self._sorted, self._ends = {}, {}
        for name, spots in pieces.items():
            held = [_Holding(spot, tuple(who)) for spot, who in spots.items()]
            held.sort(key=lambda holding: holding.spot.piece.box[0])
            self._sorted[name] = held
            self._ends[name] = list(accumulate((holding.spot.piece.box[0][1] for holding in held), max))

    def overlapping(self, name: str, box: Box) -> Iterator[_Holding]:
        """The holdings whose first interval meets that of `box`."""
        (lo, hi), held = box[0], self._sorted.get(name, [])
        for at in range(bisect_right(self._ends.get(name, ()), lo), len(held)):
            if held[at].spot.piece.box[0][0] >= hi:
                return
            yield held[at]


def _take_near(
    near: _Holdings, wants: Iterable[tuple[int, Spot]], found: _Found
) -> dict[tuple[str, Box], list[tuple[int, Spot]]]:
    """Take from each member what it holds, then what its node holds; returns the wanted boxes that are not filled."""
    left = defaultdict(list)
    for member, spot in wants:
        todo = [spot.piece.box]
        held = near.overlapping(spot.piece.name, spot.piece.box)
        for source, holders in sorted(held, key=lambda holding: member not in holding.holders):
            members = (member,) if member in holders else tuple(h for h in holders if isinstance(h, int))
            for box in todo:
                if (shared := meet(box, source.piece.box)) is not None:
                    found[(member,), members, ()].append(Part(shared, source, (spot,)))
            todo = _without(todo, source.piece.box)
        if todo:
            left[spot.piece.name, spot.piece.box].append((member, spot))
    return left


def _take_remote(
    near: _Holdings, remote: _Holdings, left: dict[tuple[str, Box], list[tuple[int, Spot]]], found: _Found
) -> None:
    """Take what no member holds from anywhere, each box once for all members that need it."""
    wanted: dict[_Holding, dict[Box, _Needers]] = defaultdict(dict)
    for (name, whole), needers in left.items():
        todo = [whole]
        for source, _ in near.overlapping(name, whole):
            todo = _without(todo, source.piece.box)
        for holding in remote.overlapping(name, whole):
            for box in todo:
                if (shared := meet(box, holding.spot.piece.box)) is not None:
                    wanted[holding][shared] = (*wanted[holding].get(shared, ()), *needers)
            todo = _without(todo, holding.spot.piece.box)
        if todo:
            raise UserError(name, f"no source holds {todo[0]} of this tensor")
    for holding, boxes in wanted.items():
        for box, who in _cut_apart(boxes):
            members, spots = zip(*sorted(who, key=lambda needer: needer[0]), strict=True)
            found[members, (), holding.holders].append(Part(box, holding.spot, spots))


def _cut_apart(wanted: dict[Box, _Needers]) -> list[tuple[Box, _Needers]]:
    """Boxes that may overlap as disjoint ones, each with all that need it."""
    apart: list[tuple[Box, _Needers]] = []
    for box, needers in wanted.items():
        todo, cut = [box], []
        for other, others in apart:
            shared = meet(box, other)
            if shared is None:
                cut.append((other, others))
                continue
            cut.append((shared, (*others, *needers)))
            cut += [(rest, others) for rest in minus(other, shared)]
            todo = _without(todo, shared)
        apart = [*cut, *((rest, needers) for rest in todo)]
    return apart


def _without(boxes: list[Box], hole: Box) -> list[Box]:
    return [rest for box in boxes for rest in minus(box, hole)]
