"""The Triton kernel that copies tiles of strided rows from one list of addresses to another.

Imported on CUDA devices only. Tables are made by `copies`.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from megatron_bridge.copies import Kind

WARPS = 8
TYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8,
}  # fmt: skip


def launch(kind: "Kind", table: torch.Tensor, programs: int | None = None) -> None:
    """Copy the tiles of a table (int64 [tiles, 6], on the device) on the current stream.

    Programs take as much of the device as they find, or there are at most `programs`, so that others find some too.
    """
    tiles = len(table)
    types = TYPES[kind.source], TYPES[kind.target]
    if programs is None:
        copy_tiles[(tiles,)](table, *types, kind.vector, kind.rows, kind.columns, num_warps=WARPS)
    else:
        grid = (min(programs, tiles),)
        copy_in_turn[grid](table, tiles, *types, kind.vector, kind.rows, kind.columns, num_warps=WARPS)


@triton.jit
def copy_tiles(
    table,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile a program."""
    copy_tile(table + tl.program_id(0) * 6, SOURCE, TARGET, VECTOR, ROWS, COLUMNS)


@triton.jit
def copy_in_turn(
    table,
    tiles,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Every so manieth tile a program, as many as there are programs."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        copy_tile(table + tile * 6, SOURCE, TARGET, VECTOR, ROWS, COLUMNS)


@triton.jit
def copy_tile(
    entry,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile in blocks of ROWS × COLUMNS elements; what the table's entry counts in vectors becomes elements."""
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    target = tl.load(entry + 1).to(tl.pointer_type(TARGET))
    rows = tl.load(entry + 2)
    columns = tl.load(entry + 3) * VECTOR
    source_stride = tl.load(entry + 4) * VECTOR
    target_stride = tl.load(entry + 5) * VECTOR
    if VECTOR > 1:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    for i in range(0, rows, ROWS):
        for j in range(0, columns, COLUMNS):
            inside = (i + row < rows) & (j + column < columns)
            values = tl.load(source + (i + row) * source_stride + (j + column), mask=inside)
            tl.store(target + (i + row) * target_stride + (j + column), values.to(TARGET), mask=inside)
