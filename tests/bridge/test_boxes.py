"""Box algebra: cutting, meeting and subtracting boxes loses and doubles nothing."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bridge.boxes import (
    Box,
    Param,
    Piece,
    cut,
    interleave,
    meet,
    merged,
    minus,
    row_major,
    stack,
    tiles,
    volume,
)

intervals = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted).filter(lambda x: x[0] < x[1]).map(tuple)
boxes = st.tuples(intervals, intervals, intervals)


def test_row_major_strides_are_torchs() -> None:
    assert row_major((2, 3, 4)) == torch.empty(2, 3, 4).stride() == (12, 4, 1)
    assert row_major((7,)) == (1,)
    assert row_major(()) == ()


def test_cut_gives_the_interval_in_order() -> None:
    for shape in (7,), (3, 5), (2, 3, 4):
        size, order = prod(shape), torch.arange(prod(shape)).view(shape)
        for lo in range(size + 1):
            for hi in range(lo, size + 1):
                parts = [order[tuple(slice(*side) for side in box)].flatten() for box in cut(shape, lo, hi)]
                assert torch.cat([order.flatten()[:0], *parts]).tolist() == list(range(lo, hi))


@given(boxes, boxes)
def test_meet_and_minus_split_a_box(a: Box, b: Box) -> None:
    rest, shared = minus(a, b), meet(a, b)
    assert sum(map(volume, rest)) + (volume(shared) if shared else 0) == volume(a)
    assert not any(meet(x, y) for i, x in enumerate(rest) for y in [*rest[:i], b])


def test_merged_dimensions_run_on_at_both_ends() -> None:
    assert merged((2, 3, 4), (12, 4, 1)) == [(24, 1)]
    assert merged((2, 3, 4), (12, 4, 1), (24, 4, 1)) == [(2, 12, 24), (12, 1, 1)]
    assert merged((1, 1), (9, 9)) == []


def test_a_stack_and_an_interleaving_tile_their_parameter() -> None:
    blocks = [("q", ((0, 2), (0, 3), (0, 4))), ("k", ((0, 2), (0, 1), (0, 4))), ("v", ((0, 2), (0, 1), (0, 4)))]
    assert tiles(Param("stacked", (40,), stack(blocks)))
    assert tiles(Param("fused", (40,), interleave(blocks)))
    assert tiles(Param("padded", (44,), interleave(blocks), padding=4))
    assert [piece.offset for piece in interleave(blocks)] == [0, 12, 16]


def test_a_gap_or_an_overlap_does_not_tile() -> None:
    box = ((0, 2), (0, 3))
    assert not tiles(Param("gap", (8,), stack([("a", box)])))
    assert not tiles(Param("overlap", (6,), (Piece("a", box, 0, (3, 1)), Piece("b", ((0, 1),), 5, (1,)))))
    assert not tiles(Param("twice", (6,), (Piece("a", box, 0, (3, 1)), Piece("b", box, 0, (3, 1)))))
    assert not tiles(
        Param("interleaved gap", (8,), (Piece("a", box, 0, (4, 1)), Piece("b", ((0, 2), (0, 1)), 2, (4, 1))))
    )
    assert tiles(Param("transposed", (6,), (Piece("a", box, 0, (1, 2)),)))
