"""A layout cut down to some units or to one rank, for transfers that take a model apart.

Units in a dtype of their own travel by themselves; what concerns one rank alone is planned for it alone.
"""

from collections.abc import Hashable
from dataclasses import dataclass

from megatron_bridge.boxes import Param
from megatron_bridge.families import Architecture
from megatron_bridge.layouts.layout import Layout, Unit


@dataclass(frozen=True)
class Part(Layout):
    """What `base` holds of the units with these canonical prefixes."""

    base: Layout
    canonical: frozenset[str]

    @property
    def arch(self) -> Architecture:  # type: ignore[override]
        return self.base.arch

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.base.ranks

    @property
    def is_read_anywhere(self) -> bool:
        return self.base.is_read_anywhere

    def shard(self, rank: int, kind: str) -> Hashable:
        return self.base.shard(rank, kind)

    def units(self, rank: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.base.units(rank) if unit.canonical in self.canonical)

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        return self.base.params(kind, shard)


@dataclass(frozen=True)
class OneRank(Layout):
    """What a single rank of `base` holds, as if there were no other."""

    base: Layout
    rank: int

    @property
    def arch(self) -> Architecture:  # type: ignore[override]
        return self.base.arch

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.rank,)

    def shard(self, rank: int, kind: str) -> Hashable:
        return self.base.shard(rank, kind)

    def units(self, rank: int) -> tuple[Unit, ...]:
        return self.base.units(rank) if rank == self.rank else ()

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        return self.base.params(kind, shard)


def one_unit(layout: Layout, canonical: str) -> Part:
    """The unit with this canonical prefix alone."""
    return Part(layout, frozenset({canonical}))
