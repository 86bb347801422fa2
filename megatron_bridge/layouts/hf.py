"""The layout of Hugging Face safetensors: whole tensors under their canonical names.

As a source every rank may read every file, so every rank holds everything. As a destination each unit has one owner,
the rank that writes the file it lies in; which files there are is left to `files`.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from math import prod

from megatron_bridge.boxes import Param, stack, whole
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.families.declare import Tensor
from megatron_bridge.layouts.layout import (
    EMBEDDING,
    HEAD,
    Layout,
    Unit,
    canonical_units,
    sharded_params,
    tensors_of,
    units_of_files,
)

ROOT = "model."


@dataclass(frozen=True)
class HFLayout(Layout):
    """`owners` names the rank of each unit of `all_units`; None means that each rank of `ranks` holds all.

    `tied_head` writes a tied output matrix as a tensor of its own, for checkpoints that list both. `stacked`
    checkpoints keep all routed experts of a layer in one tensor a projection, as transformers 5 does in memory, and by
    its names. `root` is what their names begin with instead of `model.`, as in models whose language part is one of
    several.
    """

    arch: Architecture
    ranks: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    tied_head: bool = False
    stacked: bool = False
    root: str = ROOT

    @property
    def is_read_anywhere(self) -> bool:
        return self.owners is None

    @cached_property
    def all_units(self) -> tuple[Unit, ...]:
        """The units of a checkpoint in the order of the forward pass."""
        units = tuple(unit._replace(prefix=self._renamed(unit.prefix)) for unit in canonical_units(self.arch))
        if self.root != ROOT:
            units = tuple(unit._replace(prefix=re.sub(f"^{re.escape(ROOT)}", self.root, unit.prefix)) for unit in units)
        if self.tied_head and self.arch.tied:
            units += (Unit("vocab", EMBEDDING, HEAD),)
        return units

    def shard(self, rank: int, kind: str) -> Hashable:
        return 0

    def units(self, rank: int) -> tuple[Unit, ...]:
        return units_of_files(self.all_units, self.owners, self.ranks, rank)

    def params(self, kind: str, shard: Hashable) -> tuple[Param, ...]:
        if kind == "experts" and self.stacked:
            return sharded_params(self.arch, kind, FAMILIES[self.arch.family].stacked, cuts={})
        params: list[Param] = []
        for tensor in tensors_of(self.arch, kind).values():
            view = tensor.view(self.arch)
            box = whole(view)
            if "{}" not in tensor.name:
                params.append(Param(self._renamed(tensor.name), self._shape(tensor, view), stack([(tensor.name, box)])))
                continue
            for index in range(view[0]):
                pieces = stack([(tensor.name, ((index, index + 1), *box[1:]))])
                params.append(Param(tensor.name.format(index), self._shape(tensor, (1, *view[1:])), pieces))
        return tuple(params)

    def _renamed(self, name: str) -> str:
        """A prefix of a unit, or a name in one, as checkpoints call it that keep experts together."""
        before, after = FAMILIES[self.arch.family].stacked_prefix
        return name.replace(before, after) if before and self.stacked else name

    @staticmethod
    def _shape(tensor: Tensor, view: tuple[int, ...]) -> tuple[int, ...]:
        split = len(tensor.rows.split())
        return (prod(view[:split]), prod(view[split:])) if tensor.columns else (prod(view),)
