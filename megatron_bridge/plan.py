"""Who sends what: the intersection of two layouts, as a pure function that every rank computes alike.

For every box that a rank needs the plan names the cheapest place that holds it: the rank itself, then its own node,
then the least loaded replica. Units (layers) whose holders are the same share every decision. Nothing here communicates
or touches a tensor; carrying a plan out is left to `execute`.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from megatron_bridge.boxes import Box, Piece, meet, minus, shape_of, tiles, volume
from megatron_bridge.errors import UserError
from megatron_bridge.layouts.layout import Layout, Unit, canonical_units, tensors_of


class Place(NamedTuple):
    """One end of a copy: a strided region of a parameter, offset and strides in elements."""

    rank: int
    parameter: str
    offset: int
    strides: tuple[int, ...]


class Copy(NamedTuple):
    """The same N-d region at two places."""

    shape: tuple[int, ...]
    source: Place
    target: Place


class Part(NamedTuple):
    """A box of one unit kind that some shards hold and one shard wants, with its parameter and piece on both sides."""

    box: Box
    source_param: str
    source_piece: Piece
    target_param: str
    target_piece: Piece


class Group(NamedTuple):
    """Units of one kind held by the same ranks."""

    kind: str
    ranks: frozenset[int]
    shards: tuple[Hashable, ...]


Shards = tuple[Hashable, ...]  # the source shards that all hold the same boxes
Parts = dict[Shards, tuple[int, list[Part]]]  # with the number of elements
Wanted = dict[int, list[tuple[str, str]]]  # group -> (canonical prefix, prefix at the target) of its units


@lru_cache(maxsize=16)
def make_plan(source: Layout, target: Layout, *, itemsize: int = 2, ranks_per_node: int = 8) -> "Plan":
    """The plan between two layouts of one model; `itemsize` is that of the dtype sent, in bytes.

    Raises UserError if a target element has no source, or would be written twice, or a source tensor has no target.
    """
    return Plan(source, target, itemsize, ranks_per_node)


class Plan:
    """All copies that fill the target layout. `traffic[s, t]` counts elements from rank s to rank t, s = t too.

    A plan has one or two phases, one after the other. Copies of phase 0 have a *source* parameter as their source;
    those of phase 1 a *target* parameter of another rank, which phase 0 has filled.
    """

    phases = 1

    def __init__(self, source: Layout, target: Layout, itemsize: int, ranks_per_node: int) -> None:
        self.source, self.target = source, target
        self.itemsize, self.ranks_per_node = itemsize, ranks_per_node
        self.traffic: Counter[tuple[int, int]] = Counter()
        self._source_of: dict[tuple[int, int, Shards], int] = {}
        self._met: dict[tuple[str, Hashable, Hashable, Shards], Parts] = {}
        self._pools: dict[tuple[int, Shards], dict[int | None, list[int]]] = {}
        self._prefix: dict[tuple[int, str], str] = {}
        self._group_of: dict[str, int] = {}
        self._groups: list[Group] = []
        self._load: Counter[int] = Counter()
        if weights_differ(source, target):
            raise UserError("plan", f"layouts of different models: {source.arch} and {target.arch}")
        self._group_units()
        self._check_use()
        self._choose_sources()

    # ------------------------------------------------------------ decisions
    def _group_units(self) -> None:
        holders: dict[tuple[str, str], list[int]] = defaultdict(list)
        for rank in sorted(self.source.ranks):
            for unit in self.source.units(rank):
                holders[unit.kind, unit.canonical].append(rank)
                self._prefix.setdefault((rank, unit.canonical), unit.prefix)
        ids: dict[tuple[str, tuple[int, ...]], int] = {}
        for (kind, canonical), held_by in holders.items():
            self._group_of[canonical] = ids.setdefault((kind, tuple(held_by)), len(ids))
        for kind, ranks in ids:
            shards = sorted({self.source.shard(rank, kind) for rank in ranks}, key=repr)
            self._groups.append(Group(kind, frozenset(ranks), tuple(shards)))

    def _check_use(self) -> None:
        """Every unit and tensor of the source has a target, and every target parameter is covered exactly once."""
        wanted = {(u.kind, u.canonical) for rank in self.target.ranks for u in self.target.units(rank)}
        unused = sorted(set(self._group_of) - {canonical for _, canonical in wanted})
        if unused:
            raise UserError(f"{unused[0]}*", "the target has no place for these tensors of the source")
        for kind in sorted({kind for kind, _ in wanted}):
            missing = _names(self.source, kind) - _names(self.target, kind)
            if missing:
                raise UserError(min(missing), f"the target has no place for this tensor of every {kind}")
        shards = {
            (unit.kind, self.target.shard(rank, unit.kind))
            for rank in self.target.ranks
            for unit in self.target.units(rank)
        }
        for kind, shard in sorted(shards, key=repr):
            for param in self.target.params(kind, shard):
                if not tiles(param):
                    raise UserError(param.name, f"shard {shard} does not cover each of its elements exactly once")

    def _wanted(self, rank: int) -> Wanted:
        wanted: Wanted = defaultdict(list)
        for unit in self.target.units(rank):
            if unit.canonical not in self._group_of:
                raise UserError(f"{unit.canonical}*", "no source holds these tensors")
            wanted[self._group_of[unit.canonical]].append((unit.canonical, unit.prefix))
        return wanted

    def _choose_sources(self) -> None:
        """Decide largest shares first, which spreads what replicas send evenly."""
        shares = [
            (elements * len(units), rank, group, shards)
            for rank in sorted(self.target.ranks)
            for group, units in self._wanted(rank).items()
            for shards, (elements, _) in self._parts(rank, group).items()
        ]
        for elements, rank, group, shards in sorted(shares, key=lambda share: -share[0]):
            chosen = self._cheapest(rank, group, shards)
            self._load[chosen] += 0 if chosen == rank else elements
            self._source_of[rank, group, shards] = chosen
            self.traffic[chosen, rank] += elements

    def _cheapest(self, rank: int, group: int, shards: Shards) -> int:
        kind, ranks, _ = self._groups[group]
        if rank in ranks and self.source.shard(rank, kind) in shards:
            return rank
        pool = self._pools.get((group, shards))
        if pool is None:  # node -> its holders, None -> all holders
            pool = self._pools[group, shards] = defaultdict(list)
            for holder in sorted(r for r in ranks if self.source.shard(r, kind) in shards):
                pool[holder // self.ranks_per_node].append(holder)
                pool[None].append(holder)
        near = pool.get(rank // self.ranks_per_node) or pool[None]
        return min(near, key=lambda holder: (self._load[holder], holder))

    def _parts(self, rank: int, group: int) -> Parts:
        """How a rank fills one unit of a group: the boxes it needs by the shards that hold them."""
        kind, ranks, shards = self._groups[group]
        want, have = self.target.shard(rank, kind), self.source.shard(rank, kind) if rank in ranks else None
        key = (kind, want, have, shards)
        if key not in self._met:
            self._met[key] = meet_layouts(self.source, self.target, kind, want, shards, have)
        return self._met[key]

    # ------------------------------------------------------------ copies
    def into(self, rank: int, source: int | None = None, phase: int = 0) -> Iterator[Copy]:
        """The copies of a phase that fill a rank (only those from `source`, if given), in the order both sides know."""
        for group, units in self._wanted(rank).items():
            for shards, (_, parts) in self._parts(rank, group).items():
                chosen = self._source_of[rank, group, shards]
                if source is None or source == chosen:
                    yield from self._expand(chosen, rank, units, parts)

    def _expand(self, source: int, target: int, units: list[tuple[str, str]], parts: list[Part]) -> Iterator[Copy]:
        for canonical, prefix in units:
            held = self._prefix[source, canonical]
            for box, source_param, have, target_param, want in parts:
                yield Copy(
                    shape_of(box),
                    Place(source, held + source_param, have.at(box), have.strides),
                    Place(target, prefix + target_param, want.at(box), want.strides),
                )

    def out_of(self, rank: int, phase: int = 0) -> Iterator[Copy]:
        """The copies of a phase that a rank sends to others, target by target."""
        for target in self.targets(rank, phase):
            yield from self.into(target, rank, phase)

    def sources(self, rank: int, phase: int = 0) -> list[int]:
        """The other ranks that a rank receives from in a phase, ascending."""
        return sorted(s for s, t in self.traffic if t == rank != s)

    def targets(self, rank: int, phase: int = 0) -> list[int]:
        """The other ranks that a rank sends to in a phase, ascending."""
        return sorted(t for s, t in self.traffic if s == rank != t)

    # ------------------------------------------------------------ sizes
    def local_bytes(self, rank: int) -> int:
        """Bytes that a rank copies from its own parameters."""
        return self.traffic[rank, rank] * self.itemsize

    def received_bytes(self, rank: int) -> int:
        """Bytes that a rank receives from others."""
        return sum(n for (s, t), n in self.traffic.items() if t == rank != s) * self.itemsize

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a rank sends to others."""
        return sum(n for (s, t), n in self.traffic.items() if s == rank != t) * self.itemsize

    def rounds(self, cap: int, phase: int = 0) -> int:
        """Exchanges of a phase, the same on every rank, so that none sends or receives more than `cap` bytes in one.

        Each stream between two ranks is cut into equal parts, up to one element; the cap counts that element too.
        """
        totals: Counter[tuple[str, int]] = Counter()
        peers: Counter[tuple[str, int]] = Counter()
        for (source, target), elements in self.traffic.items():
            if source != target:
                for end in (("out", source), ("in", target)):
                    totals[end] += elements
                    peers[end] += 1
        return max((ceil(n / max(1, cap // self.itemsize - peers[end])) for end, n in totals.items()), default=0)


def meet_layouts(
    source: Layout, target: Layout, kind: str, want: Hashable, shards: Shards, have: Hashable | None
) -> Parts:
    """The boxes of target shard `want` by the source shards that hold them, those of `have` (one's own) first."""
    held: dict[str, dict[tuple[str, Piece], list[Hashable]]] = defaultdict(lambda: defaultdict(list))
    for shard in shards:
        for param in source.params(kind, shard):
            for piece in param.pieces:
                held[piece.name][param.name, piece].append(shard)  # equal pieces are replicas
    found: dict[Shards, list[Part]] = defaultdict(list)
    for param in target.params(kind, want):
        for piece in param.pieces:
            _fill(param.name, piece, held[piece.name], have, found)
    return {who: (sum(volume(part.box) for part in parts), parts) for who, parts in found.items()}


def _fill(
    param: str,
    piece: Piece,
    held: dict[tuple[str, Piece], list[Hashable]],
    have: Hashable | None,
    found: dict[Shards, list[Part]],
) -> None:
    todo = [piece.box]
    for (source_param, source_piece), shards in sorted(held.items(), key=lambda item: have not in item[1]):
        who = (have,) if have in shards else tuple(shards)
        for box in todo:
            if (shared := meet(box, source_piece.box)) is not None:
                found[who].append(Part(shared, source_param, source_piece, param, piece))
        todo = [rest for box in todo for rest in minus(box, source_piece.box)]
        if not todo:
            return
    raise UserError(piece.name, f"no source holds {todo[0]} of this tensor")


def weights_differ(source: Layout, target: Layout) -> bool:
    """Whether two layouts describe weights of different names or shapes."""
    return source.arch is not target.arch and _shapes(source) != _shapes(target)


def _shapes(layout: Layout) -> tuple[tuple[Unit, ...], dict[str, dict[str, tuple[int, ...]]]]:
    arch, units = layout.arch, canonical_units(layout.arch)
    kinds = {unit.kind for unit in units}
    return units, {kind: {name: t.view(arch) for name, t in tensors_of(arch, kind).items()} for kind in kinds}


def _names(layout: Layout, kind: str) -> set[str]:
    shards: Iterable[Hashable] = {
        layout.shard(r, kind) for r in layout.ranks for u in layout.units(r) if u.kind == kind
    }
    return {piece.name for shard in shards for param in layout.params(kind, shard) for piece in param.pieces}
