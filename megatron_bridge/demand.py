"""What each node wants of which units, and who holds it: two layouts met, nothing decided yet.

Units (layers) that the same ranks hold, and that the same ranks of a node want, are one bundle and share every
decision. Box algebra inside a unit is left to `meeting`; who sends is left to `plan`.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from megatron_bridge.boxes import tiles
from megatron_bridge.errors import UserError
from megatron_bridge.layouts.layout import Layout, Unit, weight_shapes
from megatron_bridge.meeting import Meeting, Need, Slices


class Group(NamedTuple):
    """Units of one kind held by the same ranks: these by the shard they hold, and by node."""

    kind: str
    shards: tuple[Hashable, ...]
    ranks: dict[Hashable, list[int]]
    nodes: dict[int, Slices]


class Bundle(NamedTuple):
    """Units of one group that the same ranks of a node want, by their canonical prefixes.

    A rank may want a unit twice, as two parameters; `turn` counts the times.
    """

    group: int
    turn: int
    members: tuple[int, ...]
    units: tuple[str, ...]


class Demand:
    """The needs of the ranks of a target layout, as a source layout can fill them.

    Raises UserError if a target element has no source, or would be written twice, or a source tensor has no target.
    """

    def __init__(self, source: Layout, target: Layout, ranks_per_node: int) -> None:
        self.source, self.target, self.ranks_per_node = source, target, ranks_per_node
        check_layouts(source, target)
        self._group_of: dict[str, int] = {}
        self._pools: dict[tuple[int, tuple[Hashable, ...]], list[int]] = {}
        self._groups = self._group_units()

    def needs(self) -> Iterator[tuple[int, Bundle, Need]]:
        """(node, units, boxes of each of them) of everything that the target's ranks want, by node."""
        meeting = Meeting(self.source, self.target)
        for node, bundles in self._bundles():
            first = node * self.ranks_per_node
            for bundle in bundles:
                kind, shards, _, nodes = self._groups[bundle.group]
                wants = tuple((member, self.target.shard(first + member, kind)) for member in bundle.members)
                haves = nodes.get(node, ())
                for need in meeting.needs(kind, wants, haves, shards):
                    yield node, bundle, need

    def ranks(self, node: int, bundle: Bundle, need: Need) -> tuple[list[int], list[int]]:
        """The ranks that need these boxes, and those that may send them, both ascending."""
        first = node * self.ranks_per_node
        holders = [first + member for member in need.holders]
        return [first + member for member in need.needers], holders or self._pool(bundle.group, need.shards)

    def crossing(self) -> int:
        """Elements that must go from node to node."""
        return sum(need.elements * len(bundle.units) for _, bundle, need in self.needs() if not need.holders)

    def _group_units(self) -> list[Group]:
        holders: dict[tuple[str, str], list[int]] = defaultdict(list)
        for units, ranks in _ranks_by_units(self.source).items():
            for kind, canonical in dict.fromkeys((unit.kind, unit.canonical) for unit in units):
                holders[kind, canonical] += ranks
        ids: dict[tuple[str, tuple[int, ...]], int] = {}
        for (kind, canonical), held_by in holders.items():
            self._group_of[canonical] = ids.setdefault((kind, tuple(sorted(held_by))), len(ids))
        return [self._group(kind, held_by) for kind, held_by in ids]

    def _group(self, kind: str, held_by: Sequence[int]) -> Group:
        ranks: dict[Hashable, list[int]] = defaultdict(list)
        nodes: dict[int, Slices] = defaultdict(tuple)
        for rank in held_by:
            node, member = divmod(rank, self.ranks_per_node)
            shard = self.source.shard(rank, kind)
            ranks[shard].append(rank)
            nodes[node] = (*nodes[node], (member, shard))
        return Group(kind, tuple(sorted(ranks, key=repr)), ranks, nodes)

    def _bundles(self) -> Iterator[tuple[int, list[Bundle]]]:
        """The units that each node wants, together if the same ranks hold them and the same members want them."""
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(self.target.ranks):
            nodes[rank // self.ranks_per_node].append(rank)
        known: dict[tuple[tuple[int, tuple[Unit, ...]], ...], list[Bundle]] = {}
        for node, ranks in nodes.items():
            wanted = tuple((rank % self.ranks_per_node, self.target.units(rank)) for rank in ranks)
            if wanted not in known:
                known[wanted] = self._bundle(wanted)
            yield node, known[wanted]

    def _bundle(self, wanted: Sequence[tuple[int, tuple[Unit, ...]]]) -> list[Bundle]:
        members: dict[tuple[str, int], list[int]] = defaultdict(list)
        for member, units in wanted:
            turns: Counter[str] = Counter()
            for unit in units:
                members[unit.canonical, turns[unit.canonical]].append(member)
                turns[unit.canonical] += 1
        bundles: dict[tuple[int, int, tuple[int, ...]], list[str]] = defaultdict(list)
        for (canonical, turn), who in members.items():
            bundles[self._group_of[canonical], turn, tuple(who)].append(canonical)
        return [Bundle(*key, units=tuple(units)) for key, units in bundles.items()]

    def _pool(self, group: int, shards: tuple[Hashable, ...]) -> list[int]:
        if (group, shards) not in self._pools:
            ranks = self._groups[group].ranks
            self._pools[group, shards] = sorted(rank for shard in shards for rank in ranks[shard])
        return self._pools[group, shards]


def _ranks_by_units(layout: Layout) -> dict[tuple[Unit, ...], list[int]]:
    """Which ranks hold the same units; each rank once, all ascending."""
    ranks: dict[tuple[Unit, ...], list[int]] = defaultdict(list)
    for rank in sorted(layout.ranks):
        ranks[layout.units(rank)].append(rank)
    return ranks


# ---------------------------------------------------------------- checks
def check_layouts(source: Layout, target: Layout) -> None:
    """Every unit and tensor of either layout is one of the other's, and target parameters are covered exactly once."""
    if weights_differ(source, target):
        raise UserError("plan", f"layouts of different models: {source.arch} and {target.arch}")
    held, wanted = _slices(source), _slices(target)
    for here, there, fault in (
        (source, target, "the target has no place for these tensors of the source"),
        (target, source, "no source holds these tensors"),
    ):
        if missing := _units(here) - _units(there):
            raise UserError(f"{min(missing)}*", fault)
    for kind, shards in wanted.items():
        if missing := _tensors(source, kind, held[kind]) - _tensors(target, kind, shards):
            raise UserError(min(missing), f"the target has no place for this tensor of every {kind}")
        for shard in shards:
            for param in target.params(kind, shard):
                if not tiles(param):
                    raise UserError(param.name, f"shard {shard} does not cover each of its elements exactly once")


def weights_differ(source: Layout, target: Layout) -> bool:
    """Whether two layouts describe weights of different names or shapes."""
    return source.arch is not target.arch and weight_shapes(source.arch) != weight_shapes(target.arch)


def _units(layout: Layout) -> set[str]:
    return {unit.canonical for units in _ranks_by_units(layout) for unit in units}


def _slices(layout: Layout) -> dict[str, list[Hashable]]:
    """The shards that a layout has of each unit kind, in an order that all processes agree on."""
    shards: dict[str, dict[Hashable, None]] = defaultdict(dict)
    for units, ranks in _ranks_by_units(layout).items():
        for kind in dict.fromkeys(unit.kind for unit in units):
            shards[kind] |= dict.fromkeys(layout.shard(rank, kind) for rank in ranks)
    return {kind: sorted(found, key=repr) for kind, found in shards.items()}


def _tensors(layout: Layout, kind: str, shards: Sequence[Hashable]) -> set[str]:
    return {piece.name for shard in shards for param in layout.params(kind, shard) for piece in param.pieces}
