"""The layout of Hugging Face safetensors: whole tensors under their canonical names.

As a source every rank may read every file, so every rank holds everything. As a destination each unit has one owner,
the rank that writes the file it lies in; which files there are is left to `files`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megatron_bridge.boxes import Param, stack, whole
from megatron_bridge.families import Architecture
from megatron_bridge.layouts.layout import EMBEDDING, HEAD, Layout, Unit, canonical_units, tensors_of


@dataclass(frozen=True)
class HFLayout(Layout):
    """`owners` names the rank of each unit of `all_units`; None means that each rank of `ranks` holds all.

    `tied_head` writes a tied output matrix as a tensor of its own, for checkpoints that list both.
    """

    arch: Architecture
    ranks: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    tied_head: bool = False

    @cached_property
    def all_units(self) -> tuple[Unit, ...]:
        """The units of a checkpoint in the order of the forward pass."""
        units = canonical_units(self.arch)
        if self.tied_head and self.arch.tied:
            units += (Unit("vocab", EMBEDDING, HEAD),)
        return units

    def shard(self, rank: int, kind: str) -> Hashable:
        return 0

    def units(self, rank: int) -> tuple[Unit, ...]:
        if self.owners is not None:
            return tuple(unit for unit, owner in zip(self.all_units, self.owners, strict=True) if owner == rank)
        return self.all_units if rank in self.ranks else ()

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        params = []
        for tensor in tensors_of(self.arch, kind).values():
            view = tensor.view(self.arch)
            split = len(tensor.rows.split())
            shape = (prod(view[:split]), prod(view[split:])) if tensor.columns else (prod(view),)
            params.append(Param(tensor.name, shape, stack([(tensor.name, whole(view))])))
        return tuple(params)
