"""What a Hugging Face folder is to hold: the dtype of each tensor, the file it lies in, and the rank that writes it."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import NamedTuple

import torch

from megatron_bridge.files import SINGLE, Shapes
from megatron_bridge.layouts import HFLayout, Layout, Unit
from megatron_bridge.layouts.layout import FLOAT32_KINDS

DEFAULT_FILE_BYTES = 4 * 2**30


class File(NamedTuple):
    """A file of tensors: its name, the rank that writes it, and the tensors in it."""

    name: str
    owner: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Contents:
    """The layout of a folder, whose units have owners; the dtype of each tensor; the files."""

    layout: HFLayout
    dtypes: Mapping[str, torch.dtype]
    shapes: Shapes
    files: tuple[File, ...]

    def of(self, file: File) -> Shapes:
        """Shape and dtype of each tensor of a file."""
        return {name: self.shapes[name] for name in file.tensors}

    @property
    def sent(self) -> torch.dtype:
        """The dtype that holds what the tensors hold, but for those that travel in float32 by themselves."""
        units = [unit for unit in self.layout.all_units if unit.kind not in FLOAT32_KINDS]
        return reduce(torch.promote_types, (self.dtypes[name] for u in units for name in _tensors(self.layout, u)))

    def bytes_of(self, file: File) -> int:
        """Bytes of the tensors of a file."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.of(file).values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.bytes_of(file) for file in self.files)


def plan_contents(source: Layout, names: HFLayout, dtypes: Mapping[str, torch.dtype], file_bytes: int) -> Contents:
    """The files for a source's weights under a layout's names, of at most `file_bytes` unless one tensor is larger.

    Each is written by a rank that holds its first unit in `source`, so that writers have about equally much to do. A
    unit has one writer; its tensors have several files only if it is larger than a file.
    """
    shapes = {name: (param.shape, dtypes[name]) for name, param in names.parameters(names.ranks[0]).items()}
    sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in source.ranks:
        for unit in source.units(rank):
            holders[unit.canonical].append(rank)
    filled: Counter[int] = Counter()
    owner_of: list[int] = []
    planned: list[tuple[int, tuple[str, ...]]] = []
    for units in _groups(names, sizes, file_bytes):
        owner = min(holders[units[0].canonical], key=lambda rank: (filled[rank], rank))
        held = [name for unit in units for name in _tensors(names, unit)]
        filled[owner] += sum(sizes[name] for name in held)
        owner_of += [owner] * len(units)
        planned += [(owner, part) for part in _fill_files(held, sizes, file_bytes)]
    numbered = (f"model-{i:05}-of-{len(planned):05}.safetensors" for i in range(1, len(planned) + 1))
    file_names = [SINGLE] if len(planned) == 1 else list(numbered)
    files = tuple(File(name, *file) for name, file in zip(file_names, planned, strict=True))
    layout = replace(names, ranks=tuple(sorted(set(owner_of))), owners=tuple(owner_of))
    return Contents(layout, dtypes, shapes, files)


def _tensors(names: HFLayout, unit: Unit) -> list[str]:
    return [unit.prefix + param.name for param in names.params(unit.kind, 0)]


def _groups(names: HFLayout, sizes: Mapping[str, int], file_bytes: int) -> Iterator[tuple[Unit, ...]]:
    """Units in their order, as many together as a file takes."""
    units: list[Unit] = []
    filled = 0
    for unit in names.all_units:
        size = sum(sizes[name] for name in _tensors(names, unit))
        if units and filled + size > file_bytes:
            yield tuple(units)
            units, filled = [], 0
        units.append(unit)
        filled += size
    yield tuple(units)


def _fill_files(names: list[str], sizes: Mapping[str, int], file_bytes: int) -> Iterator[tuple[str, ...]]:
    """Tensors in their order, as many together as a file takes."""
    together: list[str] = []
    for name in names:
        if together and sum(sizes[one] for one in together) + sizes[name] > file_bytes:
            yield tuple(together)
            together = []
        together.append(name)
    yield tuple(together)
