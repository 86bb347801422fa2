"""Box algebra: intervals of N-d views, and where their elements lie in a parameter's storage.

A box is a tuple of half-open intervals, one a dimension. Everything here is plain integers: which rank holds a box and
which one needs it is decided in `plan`, and nothing here knows a model, a framework or a process.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

Box = tuple[tuple[int, int], ...]
Dims = tuple[tuple[int, int], ...]  # (length, stride) a dimension, outermost first


def whole(shape: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Lengths of a box."""
    return tuple(hi - lo for lo, hi in box)


def volume(box: Box) -> int:
    """Number of elements of a box."""
    return prod(hi - lo for lo, hi in box)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1] if shape else ()


def meet(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, or None."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return both if all(lo < hi for lo, hi in both) else None


def minus(a: Box, b: Box) -> list[Box]:
    """What is left of `a` without `b`, as disjoint boxes."""
    hole = meet(a, b)
    if hole is None:
        return [a]
    rest = []
    for axis, ((lo, hi), (start, end)) in enumerate(zip(a, hole, strict=True)):
        sides = [side for side in ((lo, start), (end, hi)) if side[0] < side[1]]
        rest += [(*hole[:axis], side, *a[axis + 1 :]) for side in sides]
    return rest


def cut(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """The row-major interval [lo, hi) of `shape` as boxes in order: a bucket may end anywhere in a tensor."""
    if lo >= hi:
        return []
    if len(shape) <= 1:
        return [((lo, hi),) if shape else ()]
    inner, rest = prod(shape[1:]), shape[1:]
    first, last = lo // inner, hi // inner
    if first == last:
        return [((first, first + 1), *box) for box in cut(rest, lo - first * inner, hi - first * inner)]
    boxes: list[Box] = []
    if lo % inner:
        boxes += [((first, first + 1), *box) for box in cut(rest, lo - first * inner, inner)]
        first += 1
    if first < last:
        boxes.append(((first, last), *whole(rest)))
    return boxes + [((last, last + 1), *box) for box in cut(rest, 0, hi - last * inner)]


def within(dims: Dims, at: int, lo: int, hi: int) -> Iterator[tuple[int, Box]]:
    """Boxes over nested axes whose elements, `at` plus steps, all lie in [lo, hi), each with its first element's place.

    What is wholly inside is one box; at either side of it one index may be inside in part.
    """
    if not dims:
        if lo <= at < hi:
            yield at, ()
        return
    (n, step), rest = dims[0], dims[1:]
    extent = 1 + sum((m - 1) * s for m, s in rest)
    first, last = max(0, -((at - lo) // step)), min(n, (hi - extent - at) // step + 1)
    begin, end = max(0, (lo - at - extent) // step + 1), min(n, -((at - hi) // step))
    for i in range(begin, min(first, end)):
        yield from _inside(rest, at, i, step, lo, hi)
    if first < last:
        yield at + first * step, ((first, last), *whole(m for m, _ in rest))
    for i in range(max(begin, first, last), end):
        yield from _inside(rest, at, i, step, lo, hi)


def _inside(rest: Dims, at: int, i: int, step: int, lo: int, hi: int) -> Iterator[tuple[int, Box]]:
    for start, box in within(rest, at + i * step, lo, hi):
        yield start, ((i, i + 1), *box)


class Piece(NamedTuple):
    """A canonical box inside a parameter: element `i` of the box lies at `offset + sum(i * strides)`."""

    name: str
    box: Box
    offset: int
    strides: tuple[int, ...]

    def at(self, box: Box) -> int:
        """Where, in the parameter's storage, a box inside this one begins."""
        return self.offset + sum((b[0] - a[0]) * s for a, b, s in zip(self.box, box, self.strides, strict=True))


class Param(NamedTuple):
    """One parameter of one shard: its shape as the framework has it, its pieces, and elements of padding at its end."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    padding: int = 0


def stack(blocks: Iterable[tuple[str, Box]]) -> tuple[Piece, ...]:
    """Pieces for boxes that lie one after another, each row-major."""
    kept = [(name, box) for name, box in blocks if volume(box)]
    ends = accumulate((volume(box) for _, box in kept), initial=0)
    return tuple(Piece(name, box, at, row_major(shape_of(box))) for (name, box), at in zip(kept, ends, strict=False))


def interleave(blocks: Sequence[tuple[str, Box]]) -> tuple[Piece, ...]:
    """Pieces for boxes that share their first interval and alternate inside each of its indices."""
    sizes = [volume(box[1:]) for _, box in blocks]
    step = sum(sizes)
    return tuple(
        Piece(name, box, at, (step, *row_major(shape_of(box[1:]))))
        for (name, box), at in zip(blocks, accumulate(sizes, initial=0), strict=False)
    )


def merged(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """The same strided region(s) in the fewest dimensions, as (length, stride, …): neighbours that run on are one."""
    dims: list[tuple[int, ...]] = []
    for n, *steps in zip(shape, *strides, strict=True):
        if n == 1:
            continue
        if dims and all(outer == n * inner for outer, inner in zip(dims[-1][1:], steps, strict=True)):
            dims[-1] = (dims[-1][0] * n, *steps)
        else:
            dims.append((n, *steps))
    return dims


def tiles(param: Param) -> bool:
    """True if the pieces and the padding of a parameter cover each of its elements exactly once."""
    runs = [(p.offset, tuple((n, s) for n, s in merged(shape_of(p.box), p.strides))) for p in param.pieces]
    return _tile(runs, prod(param.shape) - param.padding)


def _tile(runs: list[tuple[int, Dims]], size: int) -> bool:
    """Whether strided runs tile [0, size): a repetition that all share is taken off first, then they are laid out."""
    outer = {dims[0] for _, dims in runs if dims}
    if len(outer) == 1 and all(dims for _, dims in runs):
        length, stride = outer.pop()
        if stride > 1 and length * stride == size:
            return _tile([(at, dims[1:]) for at, dims in runs], stride)
    end = 0
    for lo, hi in sorted(interval for at, dims in runs for interval in _intervals(at, dims)):
        if lo != end:
            return False
        end = hi
    return end == size


def _intervals(at: int, dims: Dims) -> list[tuple[int, int]]:
    if not dims:
        return [(at, at + 1)]
    (length, stride), rest = dims[0], dims[1:]
    if stride == 1 and not rest:
        return [(at, at + length)]
    return [interval for i in range(length) for interval in _intervals(at + i * stride, rest)]
