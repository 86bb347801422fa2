"""Who sends what: the intersection of two layouts, as a pure function that every rank computes alike.

For every box that a rank needs the plan names the cheapest place that holds it: the rank itself, then its own node,
then the least loaded replica. What several ranks of a node need from elsewhere crosses the network once and goes from
rank to rank inside the node in a second phase. Nothing here communicates or touches a tensor; carrying a plan out is
left to `execute`, what is needed and where it is held to `demand`, the choice among replicas to `balance`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from megatron_bridge.balance import Task, split_evenly, spread
from megatron_bridge.boxes import Box, cut, shape_of, volume
from megatron_bridge.demand import Bundle, Demand
from megatron_bridge.fingerprint import fingerprint
from megatron_bridge.layouts.layout import Layout, Unit
from megatron_bridge.meeting import Need, Part


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


class Share(NamedTuple):
    """Elements [begin, end) of the boxes `need` of all units of a bundle, taken one after another, from one rank."""

    bundle: Bundle
    need: Need
    begin: int
    end: int
    source: int


@lru_cache(maxsize=16)
def make_plan(source: Layout, target: Layout, *, itemsize: int = 2, ranks_per_node: int = 8) -> "Plan":
    """The plan between two layouts of one model; `itemsize` is that of the dtype sent, in bytes.

    The last few plans are kept; layouts with equal fields are the same. Raises UserError if a target element has no
    source, or would be written twice, or a source tensor has no target.
    """
    return Plan(source, target, itemsize, ranks_per_node)


class Plan:
    """All copies that fill the target layout. `traffic[s, t]` counts elements from rank s to rank t, s = t too.

    A plan has one or two phases, one after the other. Copies of phase 0 have a *source* parameter as their source;
    those of phase 1 a *target* parameter of another rank of the node, which phase 0 has filled.
    """

    def __init__(self, source: Layout, target: Layout, itemsize: int, ranks_per_node: int) -> None:
        self.source, self.target = source, target
        self.itemsize, self.ranks_per_node = itemsize, ranks_per_node
        self._shares: tuple[dict[int, list[Share]], ...] = (defaultdict(list), defaultdict(list))
        self._choose_sources(Demand(source, target, ranks_per_node))
        self.phases = 2 if self._shares[1] else 1
        self.phase_traffic = tuple(_traffic(shares) for shares in self._shares[: self.phases])
        self._flows = tuple(_Flow(traffic) for traffic in self.phase_traffic)
        self.traffic: Counter[tuple[int, int]] = Counter()
        for traffic in self.phase_traffic:
            self.traffic.update(traffic)

    def _choose_sources(self, demand: Demand) -> None:
        """Shares of all ranks: those with one possible source at once, then the others so that loads are even."""
        load: Counter[int] = Counter()
        tasks: list[Task] = []
        waiting: list[tuple[int, Share]] = []  # of each task: for which rank, and the share without its source
        for node, bundle, need in demand.needs():
            needers, holders = demand.ranks(node, bundle, need)
            for leader, begin, end in _leaders(needers, need.elements * len(bundle.units)):
                share = Share(bundle, need, begin, end, holders[0])
                if len(holders) == 1:
                    self._shares[0][leader].append(share)
                    load[holders[0]] += end - begin if holders[0] != leader else 0
                else:
                    tasks.append(Task(end - begin, holders))
                    waiting.append((leader, share))
                relayed = share._replace(source=leader) if len(needers) > 1 else share
                for other in needers:
                    if other != leader:
                        self._shares[1][other].append(relayed)
                        load[leader] += end - begin
        for (leader, share), cuts in zip(waiting, spread(tasks, load), strict=True):
            at = share.begin
            for source, elements in cuts:
                self._shares[0][leader].append(share._replace(begin=at, end=at + elements, source=source))
                at += elements

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ, almost surely, between plans that differ; the same on all ranks."""
        traffic = [sorted(phase.items()) for phase in self.phase_traffic]
        return fingerprint(self.source, self.target, self.itemsize, self.ranks_per_node, traffic)

    # ------------------------------------------------------------ copies
    def into(self, rank: int, source: int | None = None, phase: int = 0) -> Iterator[Copy]:
        """The copies of a phase that fill a rank (only those from `source`, if given), in the order both sides know."""
        for share in self._shares[phase].get(rank, ()):
            if source is None or source == share.source:
                yield from self._expand(share, rank, phase)

    def _expand(self, share: Share, rank: int, phase: int) -> Iterator[Copy]:
        bundle, need, _, _, source = share
        first = rank - rank % self.ranks_per_node
        mine = need.needers.index(rank - first)
        theirs = need.needers.index(source - first) if phase else 0
        prefixes = _prefixes(self.target.units(rank))
        held_under = _prefixes((self.target if phase else self.source).units(source))
        for canonical, part, box in _boxes(share):
            have, want = part.targets[theirs] if phase else part.source, part.targets[mine]
            held = held_under[canonical][bundle.turn if phase else 0] + have.param
            wanted = prefixes[canonical][bundle.turn] + want.param
            yield Copy(
                shape_of(box),
                Place(source, held, have.piece.at(box), have.piece.strides),
                Place(rank, wanted, want.piece.at(box), want.piece.strides),
            )

    def out_of(self, rank: int, phase: int = 0) -> Iterator[Copy]:
        """The copies of a phase that a rank sends to others, target by target."""
        for target in self.targets(rank, phase):
            yield from self.into(target, rank, phase)

    def sources(self, rank: int, phase: int = 0) -> list[int]:
        """The other ranks that a rank receives from in a phase, ascending."""
        return self._flows[phase].sources.get(rank, [])

    def targets(self, rank: int, phase: int = 0) -> list[int]:
        """The other ranks that a rank sends to in a phase, ascending."""
        return self._flows[phase].targets.get(rank, [])

    # ------------------------------------------------------------ sizes
    def local_bytes(self, rank: int) -> int:
        """Bytes that a rank copies from its own parameters."""
        return self.traffic[rank, rank] * self.itemsize

    def received_bytes(self, rank: int, phase: int | None = None) -> int:
        """Bytes that a rank receives from others, in one phase or in all."""
        flows = self._flows if phase is None else (self._flows[phase],)
        return sum(flow.received[rank] for flow in flows) * self.itemsize

    def sent_bytes(self, rank: int, phase: int | None = None) -> int:
        """Bytes that a rank sends to others, in one phase or in all."""
        flows = self._flows if phase is None else (self._flows[phase],)
        return sum(flow.sent[rank] for flow in flows) * self.itemsize

    def rounds(self, cap: int, phase: int = 0) -> int:
        """Exchanges of a phase, the same on every rank, so that none sends or receives more than `cap` bytes in one.

        Each stream between two ranks is cut into equal parts, up to one element; the cap counts that element too.
        """
        flow, most = self._flows[phase], max(1, cap // self.itemsize)
        sides = ((flow.sent, flow.targets), (flow.received, flow.sources))
        return max(
            (ceil(n / max(1, most - len(peers[rank]))) for totals, peers in sides for rank, n in totals.items()),
            default=0,
        )


def _leaders(needers: Sequence[int], elements: int) -> Iterator[tuple[int, int, int]]:
    """(rank, begin, end): which of the ranks that need the same elements fetches which of them for all."""
    if len(needers) == 1:
        yield needers[0], 0, elements
        return
    for leader, (begin, end) in zip(needers, pairwise(split_evenly(elements, len(needers))), strict=True):
        if begin < end:
            yield leader, begin, end


class _Flow:
    """What each rank sends to and receives from others in one phase, in elements, and who these are, ascending."""

    def __init__(self, traffic: Counter[tuple[int, int]]) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.targets: dict[int, list[int]] = defaultdict(list)
        self.sources: dict[int, list[int]] = defaultdict(list)
        for (source, target), elements in sorted(traffic.items()):
            if source != target:
                self.sent[source] += elements
                self.received[target] += elements
                self.targets[source].append(target)
                self.sources[target].append(source)


def _traffic(shares: dict[int, list[Share]]) -> Counter[tuple[int, int]]:
    traffic: Counter[tuple[int, int]] = Counter()
    for rank, into in shares.items():
        for share in into:
            traffic[share.source, rank] += share.end - share.begin
    return traffic


def _boxes(share: Share) -> Iterator[tuple[str, Part, Box]]:
    """(unit, part, the box of it) of a share: all of each part but the first and the last."""
    bundle, need, begin, end, _ = share
    for number in range(begin // need.elements, ceil(end / need.elements)):
        at = number * need.elements
        for part in need.parts:
            size = volume(part.box)
            lo, hi = max(begin - at, 0), min(end - at, size)
            if hi - lo == size:
                yield bundle.units[number], part, part.box
            else:
                for box in cut(shape_of(part.box), lo, hi):
                    inside = tuple((o + a, o + b) for (o, _), (a, b) in zip(part.box, box, strict=True))
                    yield bundle.units[number], part, inside
            at += size


@lru_cache(maxsize=4096)
def _prefixes(units: tuple[Unit, ...]) -> dict[str, list[str]]:
    """The prefixes in a layout by canonical prefix."""
    prefixes: dict[str, list[str]] = defaultdict(list)
    for unit in units:
        prefixes[unit.canonical].append(unit.prefix)
    return prefixes
