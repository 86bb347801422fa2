"""A layout cut down to one unit, for transfers that take a model apart: an engine's own loader wants whole tensors."""

from collections.abc import Hashable
from dataclasses import dataclass

from megatron_bridge.boxes import Param
from megatron_bridge.families import Architecture
from megatron_bridge.layouts.layout import Layout, Unit


@dataclass(frozen=True)
class OneUnit(Layout):
    """What `base` holds of the unit with the canonical prefix `canonical`."""

    base: Layout
    canonical: str

    @property
    def arch(self) -> Architecture:  # type: ignore[override]
        return self.base.arch

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.base.ranks

    def shard(self, rank: int, kind: str) -> Hashable:
        return self.base.shard(rank, kind)

    def units(self, rank: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.base.units(rank) if unit.canonical == self.canonical)

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        return self.base.params(kind, shard)
