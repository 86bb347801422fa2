"""A layout cut down to some units, for transfers that take a model apart.

An engine's own loader wants whole tensors, a unit at a time; units in a dtype of their own travel by themselves.
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

    def shard(self, rank: int, kind: str) -> Hashable:
        return self.base.shard(rank, kind)

    def units(self, rank: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.base.units(rank) if unit.canonical in self.canonical)

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        return self.base.params(kind, shard)


def one_unit(layout: Layout, canonical: str) -> Part:
    """The unit with this canonical prefix alone."""
    return Part(layout, frozenset({canonical}))
