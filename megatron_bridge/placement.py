"""Where the slices of trainer and rollout should live, so that as few bytes as can be move between ranks.

Two things may be chosen: the order of the training grid's dimensions (data parallelism may be two of them, one on
either side of others), hence which rank is where in it; and which rank of a node an engine calls its first, its second
and so on. Slice r stays that of rank r of a group, so checkpoints do not change; the ranks of a training group still
ascend; tensor-parallel groups stay inside a node where they fit into one. Pure: making the groups is left to the
trainer.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from math import ceil, prod

from megatron_bridge.assignment import assign
from megatron_bridge.demand import Demand
from megatron_bridge.layouts import Layout, MegatronLayout, Unit, VLLMLayout
from megatron_bridge.meeting import Meeting


@dataclass(frozen=True)
class Placement:
    """Layouts that differ from those given in `train.order`, `train.ranks` and `rollout.ranks` only.

    By rollout rank, ascending: `needed_bytes` is its slice, `received_bytes` what of it the rank does not hold, and
    `least_bytes` what would be left where most of it is held, of all ranks that a grid of these sizes has. No placement
    goes below the sum of these.
    """

    train: MegatronLayout
    rollout: VLLMLayout
    needed_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    least_bytes: tuple[int, ...]

    @property
    def cost(self) -> tuple[int, int]:
        """What placements are compared by: bytes of the rank that receives most, and of all ranks."""
        return max(self.received_bytes), sum(self.received_bytes)


def align(
    train: MegatronLayout,
    rollout: VLLMLayout,
    *,
    ranks_per_node: int = 8,
    itemsize: int = 2,
    renumber: bool = True,
) -> Placement:
    """The placement that moves least; of equal ones that which sends least between nodes, then the nearest to what is.

    `itemsize` is that of the dtype sent, in bytes. Without `renumber` engines keep their numbering.
    """
    overlaps = _Overlaps(train, rollout, itemsize)
    grids = [train, *_grids(train, ranks_per_node)]
    found = [_placed(grid, rollout, overlaps) for grid in grids]
    if renumber:
        for grid in grids:
            engines = replace(rollout, ranks=_numbering(grid, rollout, overlaps, ranks_per_node))
            found += [_placed(grid, engines, overlaps)] if engines != rollout else []
    cheapest = min(placement.cost for placement in found)
    best = [placement for placement in found if placement.cost == cheapest]
    if len({rank // ranks_per_node for rank in (*train.ranks, *rollout.ranks)}) == 1:
        return best[0]
    return min(best, key=lambda placement: Demand(placement.train, placement.rollout, ranks_per_node).crossing())


def natural(train: MegatronLayout, rollout: VLLMLayout, *, itemsize: int = 2) -> Placement:
    """The layouts as they are, with what they move."""
    return _placed(train, rollout, _Overlaps(train, rollout, itemsize))


def _placed(train: MegatronLayout, rollout: VLLMLayout, overlaps: "_Overlaps") -> Placement:
    slots = {rank: overlaps.slice_of(rollout, rank) for rank in sorted(rollout.ranks)}
    received = tuple(overlaps.missing(overlaps.slice_of(train, rank), slot) for rank, slot in slots.items())
    needed, least = zip(*((overlaps.needed(slot), overlaps.least(slot)) for slot in slots.values()), strict=True)
    return Placement(train, rollout, needed, received, least)


# ---------------------------------------------------------------- the trainer's grid
def _grids(train: MegatronLayout, ranks_per_node: int) -> Iterator[MegatronLayout]:
    """The grid in each order of its dimensions, data parallelism whole or in two, that keeps TP groups in a node."""
    nodes_of_group = ceil(train.tp / ranks_per_node)
    # Experts have a grid of their own, in which two parts of dp might leave groups whose ranks do not ascend.
    most = 2 if train.arch.experts is not None else max(2, ranks_per_node)
    for near in (size for size in range(1, most) if train.dp % size == 0):
        for order in _orders(train, near):
            grid = _grid(train, order, near)
            if all(len({rank // ranks_per_node for rank in ranks}) <= nodes_of_group for ranks in _tp_groups(grid)):
                yield grid


def _orders(train: MegatronLayout, near: int) -> Iterator[tuple[str, ...]]:
    """Orders that differ, in each of which dimensions of size 1 come last and `near`, the first part of dp, before dp.

    The experts' grid has the stages of the other layers only if pp is first or last, and experts that are cut over both
    tp and ep need tp to vary faster, because megatron-core reads what is gathered over both so.
    """
    sizes = {"tp": train.tp, "cp": train.cp, "dp": train.dp // near, "pp": train.pp, "ep": 1, "near": near}
    if train.arch.experts is not None:
        replicas = train.tp * train.cp * train.dp // (train.expert_tp * train.ep)
        sizes |= {"tp": max(train.tp, train.expert_tp), "dp": max(train.dp, replicas), "ep": train.ep}
    names = [name for name in ("near", *train.order.split("-")) if sizes[name] > 1]
    rest = tuple(name for name in train.order.split("-") if name not in names)
    for order in permutations(names):
        parts = [order.index(name) for name in ("near", "dp") if name in order]
        if near > 1 and (len(parts) < 2 or parts[1] < parts[0] + 2):
            continue
        if train.arch.experts is None or _suits_experts(train, order):
            yield (*order, *rest)


def _suits_experts(train: MegatronLayout, order: Sequence[str]) -> bool:
    cut_twice = min(train.ep, train.expert_tp) > 1
    return ("pp" not in order or "pp" in (order[0], order[-1])) and not (
        cut_twice and order.index("ep") < order.index("tp")
    )


def _grid(train: MegatronLayout, order: Sequence[str], near: int) -> MegatronLayout:
    """The grid in an order that may name `near`: its ranks are then listed so that dp can stand for both parts."""
    whole = [name for name in order if name != "near"]
    if near == 1:
        return replace(train, order="-".join(whole))
    sizes = {"tp": train.tp, "cp": train.cp, "dp": train.dp // near, "pp": train.pp, "near": near}
    strides = {name: prod(sizes.get(other, 1) for other in order[:at]) for at, name in enumerate(order)}
    parts = [part for name in whole for part in (("near", "dp") if name == "dp" else (name,))]
    ranks = []
    for index in range(len(train.ranks)):
        place = 0
        for part in parts:
            index, digit = divmod(index, sizes.get(part, 1))
            place += digit * strides[part]
        ranks.append(train.ranks[place])
    return replace(train, order="-".join(whole), ranks=tuple(ranks))


def _tp_groups(grid: MegatronLayout) -> Iterator[tuple[int, ...]]:
    sizes = {"cp": grid.cp, "dp": grid.dp, "pp": grid.pp}
    names = grid.order.split("-")
    stride = prod(sizes.get(name, 1) for name in names[: names.index("tp")])
    for start in range(len(grid.ranks)):
        if start // stride % grid.tp == 0:
            yield grid.ranks[start : start + stride * grid.tp : stride]


# ---------------------------------------------------------------- the engines' numbering
def _numbering(
    train: MegatronLayout, rollout: VLLMLayout, overlaps: "_Overlaps", ranks_per_node: int
) -> tuple[int, ...]:
    """The rollout's ranks reordered inside each node such that, together, they hold most of their slices already."""
    numbered = list(rollout.ranks)
    for places in _blocks(rollout, ranks_per_node):
        ranks = [rollout.ranks[place] for place in places]
        held = tuple(overlaps.slice_of(train, rank) for rank in ranks)
        wanted = tuple(overlaps.slice_of(rollout, rank) for rank in ranks)
        for rank, column in zip(ranks, overlaps.assigned(held, wanted), strict=True):
            numbered[places[column]] = rank
    return tuple(numbered)


def _blocks(rollout: VLLMLayout, ranks_per_node: int) -> list[list[int]]:
    """Places in `rollout.ranks` whose ranks may be exchanged: a node's, or those of a group that spans several."""
    blocks: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for begin in range(0, len(rollout.ranks), rollout.tp):
        nodes = sorted({rank // ranks_per_node for rank in rollout.ranks[begin : begin + rollout.tp]})
        blocks[tuple(nodes) if len(nodes) == 1 else (*nodes, begin)] += range(begin, begin + rollout.tp)
    return list(blocks.values())


# ---------------------------------------------------------------- bytes
class _Overlaps:
    """Bytes that a rank of one layout holds of what one of the other wants, by the numbers of their slices."""

    def __init__(self, train: MegatronLayout, rollout: VLLMLayout, itemsize: int) -> None:
        self._meeting, self._itemsize = Meeting(train, rollout), itemsize
        self._numbers: dict[tuple[tuple[Unit, ...], tuple[Hashable, ...]], int] = {}
        self._slices: list[tuple[tuple[Unit, ...], dict[str, Hashable]]] = []
        self._kinds: dict[tuple[Unit, ...], tuple[str, ...]] = {}
        self._missing: dict[tuple[int, int], int] = {}
        self._least: dict[int, int] = {}
        self._assigned: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        self._held = {self.slice_of(train, rank) for rank in train.ranks}

    def slice_of(self, layout: Layout, rank: int) -> int:
        """A number for what a rank holds, the same for ranks that hold the same."""
        units = layout.units(rank)
        if units not in self._kinds:
            self._kinds[units] = tuple(dict.fromkeys(unit.kind for unit in units))
        shards = tuple(layout.shard(rank, kind) for kind in self._kinds[units])
        number = self._numbers.setdefault((units, shards), len(self._slices))
        if number == len(self._slices):
            self._slices.append((units, dict(zip(self._kinds[units], shards, strict=True))))
        return number

    def needed(self, slot: int) -> int:
        """Bytes of a slot."""
        return self._without((), slot, lambda kind: ())

    def missing(self, held: int, slot: int) -> int:
        """Bytes of a slot that a rank with the slice `held` must receive."""
        if (held, slot) not in self._missing:
            units, shards = self._slices[held]
            self._missing[held, slot] = self._without(units, slot, lambda kind: [shards[kind]])
        return self._missing[held, slot]

    def least(self, slot: int) -> int:
        """Bytes that are missing where most is held, whichever shards come together on a rank of the trainer."""
        if slot not in self._least:
            shards: dict[str, set[Hashable]] = defaultdict(set)
            for number in self._held:
                for kind, shard in self._slices[number][1].items():
                    shards[kind].add(shard)
            stages = {self._slices[number][0] for number in self._held}
            self._least[slot] = min(self._without(units, slot, lambda kind: shards[kind]) for units in stages)
        return self._least[slot]

    def assigned(self, held: tuple[int, ...], slots: tuple[int, ...]) -> list[int]:
        """Which slot each of the ranks with these slices should take; among equals, the first takes the first."""
        if (held, slots) not in self._assigned:
            gain = [[-2 * self.missing(one, slot) for slot in slots] for one in held]
            gain[0][0] += 1
            self._assigned[held, slots] = assign(gain)
        return self._assigned[held, slots]

    def _without(self, units: tuple[Unit, ...], slot: int, shards: Callable[[str], Iterable[Hashable]]) -> int:
        """Bytes of a slot that are not in those of its units which `units` names, held as the best of `shards`."""
        wanted, slices = self._slices[slot]
        held = {unit.canonical for unit in units}
        count = Counter(unit.kind for unit in wanted)
        common = Counter(unit.kind for unit in wanted if unit.canonical in held)
        elements = sum(n * self._meeting.elements(kind, slices[kind]) for kind, n in count.items())
        for kind, n in common.items():
            elements -= n * max(self._meeting.shared(kind, shard, slices[kind]) for shard in shards(kind))
        return elements * self._itemsize
