"""Copies of regions: on a CPU as they are, and the tables and the kernel of a GPU through Triton's interpreter."""

import random

import numpy as np
import torch

from megatron_bridge.copies import BLOCK_BYTES, TILE_BYTES, FusedCopies, Kind, tabulate
from megatron_bridge.plan import Copy, Place
from tests.bridge.regions import random_case
from tests.interpreter import interpret


def test_copies_and_casts_are_those_of_torch() -> None:
    rng = random.Random(0)
    for _ in range(100):
        case = random_case(rng, 200)
        copies = FusedCopies(case.copies, *case.ends)
        copies.run()
        assert torch.equal(case.target, case.expected), case


def test_tensors_may_move_between_runs() -> None:
    source, target = {"a": torch.arange(4)}, {"b": torch.zeros(4, dtype=torch.int64)}
    copies = FusedCopies([Copy((4,), Place(0, "a", 0, (1,)), Place(0, "b", 0, (1,)))], source, target)
    copies.run()
    source["a"].data, target["b"].data = torch.arange(4) + 10, torch.zeros(4, dtype=torch.int64)
    copies.run()
    assert target["b"].tolist() == [10, 11, 12, 13]


def _table(columns: int, rows: int = 1, gap: int = 0, offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict:
    source = torch.zeros(offset + rows * (columns + gap), dtype=dtype)
    target = torch.zeros(rows * columns, dtype=torch.bfloat16)
    copy = Copy((rows, columns), Place(0, "a", offset, (columns + gap, 1)), Place(0, "b", 0, (columns, 1)))
    tables, plain = tabulate([copy], {"a": source}, {"b": target})
    assert not plain
    return tables


def test_kinds_follow_alignment_and_width() -> None:
    word, block = 8, BLOCK_BYTES // 8
    assert list(_table(1 << 20)) == [Kind(torch.int64, torch.int64, 2, 1, block)]
    assert list(_table(1024, rows=8, gap=1024)) == [Kind(torch.int64, torch.int64, 2, 8, block // 8)]  # 2-KiB rows
    assert list(_table(64, rows=64, gap=64)) == [Kind(torch.int64, torch.int64, 2, 64, block // 64)]
    assert list(_table(64, rows=7, gap=64)) == list(_table(64)) == list(_table(1 << 20))  # biases go with matrices
    assert next(iter(_table(1 << 20, offset=word // 2)))[:3] == (torch.int64, torch.int64, 1)  # 8 bytes
    assert next(iter(_table(1 << 20, offset=1)))[:3] == (torch.int16, torch.int16, 1)
    assert next(iter(_table(1 << 20, dtype=torch.float32)))[:3] == (torch.float32, torch.bfloat16, 8)
    assert next(iter(_table(1 << 20, offset=4, dtype=torch.float32)))[:3] == (torch.float32, torch.bfloat16, 8)
    assert next(iter(_table(1 << 20, offset=1, dtype=torch.float32)))[:3] == (torch.float32, torch.bfloat16, 1)


def test_tiles_are_capped_and_cover_everything() -> None:
    ((kind, table),) = _table(5 * TILE_BYTES // 4, rows=3, gap=8).items()
    bytes_each = table[:, 2] * table[:, 3] * 8 * kind.vector
    assert bytes_each.max() == TILE_BYTES
    assert bytes_each.sum() == 3 * 5 * TILE_BYTES // 2
    assert len(table) == 3 * 3
    ((kind, table),) = _table(1024, rows=100, gap=1024).items()
    high = TILE_BYTES // 2048  # rows of 2 KiB
    assert table[:, 2].tolist() == [high] * (100 // high) + [100 % high]
    assert set(np.diff(table[:, 0])) == {high * 4096}
    assert set(np.diff(table[:, 1])) == {high * 2048}


def test_other_casts_are_left_to_torch() -> None:
    copy = Copy((4,), Place(0, "a", 0, (1,)), Place(0, "b", 0, (1,)))
    ends = {"a": torch.zeros(4, dtype=torch.int64)}, {"b": torch.zeros(4)}
    assert tabulate([copy], *ends) == ({}, [copy])


def check_kernel() -> None:
    """Run the kernel on host memory, with blocks so small that tiles have several, rows and columns included.

    Each tile has a program, or a few programs take many tiles in turn.
    """
    from megatron_bridge import copies
    from megatron_bridge.copy_kernel import launch

    copies.TILE_BYTES, copies.BLOCK_BYTES = 1024, 512
    rng, kinds = random.Random(0), set()
    for _ in range(30):
        case = random_case(rng, 80)
        if case.target.dtype == torch.bfloat16 != case.source.dtype:
            continue  # the interpreter truncates where a GPU rounds
        tables, _ = tabulate(case.copies, *case.ends)
        for kind, table in tables.items():
            launch(kind, torch.from_numpy(table), rng.choice([None, 1, 3, 10**6]))
        kinds |= tables.keys()
        assert torch.equal(case.target, case.expected), case
    assert len(kinds) > 12


def test_the_kernel_in_the_interpreter() -> None:
    interpret(check_kernel)
