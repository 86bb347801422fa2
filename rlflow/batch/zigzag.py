"""Which rows of packed sequences each context-parallel rank holds, and what they see: the zigzag cut.

Every sequence is cut into 2·size chunks, of which rank r holds the r-th and the r-th from the end, so that all ranks
have as many rows and as many pairs of query and key. Pure functions of the sequences' bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.batch.ragged import spans

Segment = tuple[int, int, int, int]  # (prefix_start, prefix_end, start, end), as in `packing.MicroBatch`


def context_rows(segments: Sequence[Segment], rank: int, size: int) -> Tensor:
    """The rows that a rank holds, in their order there: int64 [T / size].

    Raises ValueError for a segment that 2·size does not divide, or that sees rows of another one.
    """
    bounds = torch.tensor(segments, dtype=torch.int64).reshape(-1, 4)
    if int((bounds[:, 1] - bounds[:, 0]).sum()) or int(((bounds[:, 3] - bounds[:, 2]) % (2 * size)).sum()):
        raise ValueError(f"segments {list(segments)} are not packed for {size} context-parallel ranks")
    chunks = (bounds[:, 3] - bounds[:, 2]) // (2 * size)
    early, late = (bounds[:, 2] + number * chunks for number in _chunks_of(rank, size))
    return spans(torch.stack([early, late], 1).flatten(), chunks.repeat_interleave(2))


def context_segments(segments: Sequence[Segment], rank: int, size: int) -> list[Segment]:
    """The chunks that a rank holds, each with the rows of its sequence before it as its prefix; all rows global."""
    chunks: list[Segment] = []
    for _, _, start, end in segments:
        length = (end - start) // (2 * size)
        first_rows = (start + number * length for number in _chunks_of(rank, size))
        chunks += [(start, first, first, first + length) for first in first_rows]
    return chunks


def gathered_places(segments: Sequence[Segment], size: int) -> Tensor:
    """Where each row lies when the rows of all ranks are concatenated in the order of the ranks: int64 [T]."""
    order = torch.cat([context_rows(segments, rank, size) for rank in range(size)])
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _chunks_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank
