"""The output matrix that a checkpoint of a tied model has all the same: it may be left out only if it is the embedding.

Both are compared in windows, so that of mapped files no more than one is in memory.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_bridge.boxes import Box
from megatron_bridge.errors import UserError

WINDOW = 2**22  # elements that are compared at a time


def check_tied(where: object, head: str, embedding: str, are_equal: bool) -> None:
    """UserError, which names both matrices, unless they are equal."""
    if not are_equal:
        raise UserError(
            where,
            f"tie_word_embeddings is true, but {head} and {embedding} differ: set it to false to keep both, or remove"
            f" {head}",
        )


def equal(a: Tensor, b: Tensor, release: Callable[[], None]) -> bool:
    """Whether two matrices are equal, bit by bit if they are of one dtype; `release` is called after each window."""
    if a.shape != b.shape:
        return False
    for rows in _windows(a):
        same = _same(a[rows], b[rows])
        release()
        if not same:
            return False
    return True


def _windows(matrix: Tensor) -> Iterator[slice]:
    rows = max(1, WINDOW // max(1, matrix.shape[-1]))
    for begin in range(0, matrix.shape[0], rows):
        yield slice(begin, begin + rows)


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype == b.dtype:
        return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    wide = torch.promote_types(a.dtype, b.dtype)
    return torch.equal(a.to(wide), b.to(wide))


def shared(a: Box, b: Box, rows: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where two boxes of a matrix overlap in its first rows, counted inside each; slices of nothing where they do not.

    `rows` are those that are no padding.
    """
    limits = (rows, *(hi for _, hi in a[1:]))
    both = [(max(lo, low), min(hi, high, limit)) for (lo, hi), (low, high), limit in zip(a, b, limits, strict=True)]
    spans = [(lo, max(lo, hi)) for lo, hi in both]
    inside_a, inside_b = (
        tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(spans, box, strict=True)) for box in (a, b)
    )
    return inside_a, inside_b
