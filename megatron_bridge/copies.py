"""Copies of strided regions between tensors, many at once: local copies, packing and unpacking are all of this kind.

On a CUDA device all regions are cut into tiles of similar size, whose addresses one table holds and one kernel of
`copy_kernel` works off; the table is built when tensors are first seen and again when they move. Elsewhere, and
where Triton is missing, every region is a plain `copy_`. Which regions to copy is left to `plan` and `streams`.
"""

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_bridge.boxes import merged
from megatron_bridge.plan import Copy

TILE_BYTES = 32 << 10  # what one program copies, at most, if rows are contiguous; 64 KiB were 2 % slower on an H200
BLOCK_BYTES = 16 << 10  # what it has in flight
WIDEST = 16  # bytes of the widest load
NARROWER = (1, 8, 64)  # a block is as wide as it is large, or this many times narrower and as many rows high
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # the kernel casts between them
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}  # what unchanged bytes are copied as


class Kind(NamedTuple):
    """What one launch of the kernel has to know of its tiles at compile time.

    `vector` elements follow one another wherever a row begins or ends, and their addresses are multiples of 16 bytes;
    1 promises nothing. A block is `rows` × `columns` elements.
    """

    source: torch.dtype
    target: torch.dtype
    vector: int
    rows: int
    columns: int


class Rows(NamedTuple):
    """A region as rows of contiguous elements: addresses in bytes, the rest in elements of the kind."""

    source: int
    target: int
    rows: int
    columns: int
    source_stride: int
    target_stride: int


class FusedCopies:
    """Copies from parameter to parameter, carried out together by `run`, any number of times.

    `source` and `target` are looked at anew in each run, so tensors may move; regions must not overlap at the target.
    Types may differ: values are then cast as `Tensor.to` casts. `run` does not wait for the device.
    """

    def __init__(self, copies: Iterable[Copy], source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        self._copies = list(copies)
        self._source, self._target = source, target
        self.elements = sum(prod(copy.shape) for copy in self._copies)
        self._names = (
            sorted({copy.source.parameter for copy in self._copies}),
            sorted({copy.target.parameter for copy in self._copies}),
        )
        self._built_for: tuple[list[int], list[torch.dtype]] | None = None
        self._launches: list[tuple[Kind, Tensor]] = []
        self._plain = self._copies

    @torch.no_grad()
    def run(self) -> None:
        """Copy all regions, on the device's current stream."""
        tensors = [self._source[name] for name in self._names[0]] + [self._target[name] for name in self._names[1]]
        places = [*map(Tensor.data_ptr, tensors)], [tensor.dtype for tensor in tensors]
        if places != self._built_for:
            devices = {tensor.device for tensor in tensors}
            if not self._shift(devices, *places):
                self._build(devices)
            self._built_for = places
        if self._launches:
            from megatron_bridge.copy_kernel import launch

            for kind, table in self._launches:
                launch(kind, table)
        for copy in self._plain:
            region(self._target[copy.target.parameter], copy.shape, copy.target.strides, copy.target.offset).copy_(
                region(self._source[copy.source.parameter], copy.shape, copy.source.strides, copy.source.offset)
            )

    def _shift(self, devices: set[torch.device], addresses: list[int], types: list[torch.dtype]) -> bool:
        """Correct the tables if all sources moved alike, and all targets: a bucket that was allocated anew."""
        if self._built_for is None or self._plain or types != self._built_for[1]:
            return False
        if devices != {table.device for _, table in self._launches}:
            return False
        moved = [now - before for now, before in zip(addresses, self._built_for[0], strict=True)]
        ends = moved[: len(self._names[0])], moved[len(self._names[0]) :]
        if any(len(set(by)) != 1 or by[0] % WIDEST for by in ends):
            return False
        for _, table in self._launches:
            for end, by in enumerate(ends):
                table[:, end] += by[0]
        return True

    def _build(self, devices: set[torch.device]) -> None:
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self._launches, self._plain = [], self._copies
        if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            tables, self._plain = tabulate(self._copies, self._source, self._target)
            longest_first = sorted(tables.items(), key=lambda item: -len(item[1]))  # it runs while others are launched
            self._launches = [(kind, torch.from_numpy(table).to(device)) for kind, table in longest_first]


def region(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    """A strided region of a contiguous tensor, strides and offset in elements."""
    tensor = tensor.detach()
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def tabulate(
    copies: Sequence[Copy], source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> tuple[dict[Kind, np.ndarray], list[Copy]]:
    """The tables of tiles, int64 [tiles, 6] with the columns of `Rows`, by kind; and the copies the kernel cannot do.

    Columns and strides are counted in vectors, so that the kernel sees by arithmetic that its loads are aligned.
    """
    found: dict[Kind, list[Rows]] = defaultdict(list)
    plain = []
    for copy in copies:
        read, written = source[copy.source.parameter], target[copy.target.parameter]
        if read.dtype == written.dtype or {read.dtype, written.dtype} <= set(FLOATS):
            for rows in _as_rows(copy, read, written):
                kind, counted = _classify(rows, read.dtype, written.dtype)
                found[kind].append(counted)
        else:
            plain.append(copy)
    return {kind: _tiles(kind, np.array(rows, dtype=np.int64)) for kind, rows in found.items()}, plain


def _as_rows(copy: Copy, source: Tensor, target: Tensor) -> Iterator[Rows]:
    dims = merged(copy.shape, copy.source.strides, copy.target.strides)
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    columns, (rows, *strides) = dims[-1][0], dims[-2] if len(dims) > 1 else (1, 0, 0)
    outer = dims[:-2]
    read = source.data_ptr() + copy.source.offset * source.element_size()
    written = target.data_ptr() + copy.target.offset * target.element_size()
    for index in product(*(range(n) for n, _, _ in outer)):
        behind = [sum(i * dim[end] for i, dim in zip(index, outer, strict=True)) for end in (1, 2)]
        yield Rows(
            read + behind[0] * source.element_size(), written + behind[1] * target.element_size(), rows, columns,
            *strides,
        )  # fmt: skip


def _classify(rows: Rows, source: torch.dtype, target: torch.dtype) -> tuple[Kind, Rows]:
    """The kind of a region and the region counted in the kind's vectors."""
    narrow = min(source.itemsize, target.itemsize)
    vector = WIDEST // narrow
    if source == target:
        bits = rows.source | rows.target | WIDEST
        for n in (rows.columns, rows.source_stride, rows.target_stride):
            bits |= n * narrow
        width = bits & -bits  # the largest power of 2 that divides all
        source = target = WORDS[min(width, 8)]
        vector, scale = max(1, width // 8), narrow
    else:
        aligned = not (rows.source | rows.target) % WIDEST
        if not aligned or any(n % vector for n in (rows.columns, rows.source_stride, rows.target_stride)):
            vector = 1
        width, scale = vector, 1
    counted = Rows(rows.source, rows.target, rows.rows, *(n * scale // width for n in rows[3:]))
    block = BLOCK_BYTES // max(source.itemsize, target.itemsize)
    # No block is higher than its region: norms and biases are not worth a launch of their own.
    fitting = [n for n in NARROWER if n <= rows.rows and block // n >= min(counted.columns * vector, block)]
    return Kind(source, target, vector, fitting[-1], block // fitting[-1]), counted


def _tiles(kind: Kind, regions: np.ndarray) -> np.ndarray:
    """Regions cut into tiles: as many rows as make up a tile, rows that are longer into pieces."""
    sizes = np.array([kind.source.itemsize, kind.target.itemsize], dtype=np.int64) * kind.vector
    most = TILE_BYTES // int(sizes.max())
    high = np.maximum(1, most // regions[:, 3])
    down, across = -(-regions[:, 2] // high), -(-regions[:, 3] // most)
    count = down * across
    which = np.repeat(np.arange(len(regions)), count)
    index = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    tiles = regions[which]
    row, column = index // across[which] * high[which], index % across[which] * most
    for end in (0, 1):
        tiles[:, end] += (row * tiles[:, 4 + end] + column) * sizes[end]
    tiles[:, 2] = np.minimum(high[which], tiles[:, 2] - row)
    tiles[:, 3] = np.minimum(most, tiles[:, 3] - column)
    return tiles
