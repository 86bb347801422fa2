"""In which order elements travel between two ranks, and how their stream is cut into rounds.

Sender and receiver both derive the stream from the plan's copies, so the messages need no header. This module is
integers only; packing and exchanging tensors is left to `execute`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from megatron_bridge.boxes import cut, merged, shape_of, volume
from megatron_bridge.plan import Copy, Place


class Region(NamedTuple):
    """A strided region of a parameter and where its elements, row-major, begin in a message."""

    parameter: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    message_offset: int


@dataclass
class Message:
    """What one rank sends another in one round: `elements` of them, seen as regions at one of the two ends."""

    elements: int = 0
    regions: list[Region] = field(default_factory=list)


def compact(copies: Iterable[Copy]) -> Iterator[Copy]:
    """The same copies in the same element order, in as few and as flat regions as possible."""
    last: Copy | None = None
    for copy in map(_flatten, copies):
        if last is not None and _runs_on(last, copy):
            last = last._replace(shape=(last.shape[0] + copy.shape[0],))
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _flatten(copy: Copy) -> Copy:
    dims = merged(copy.shape, copy.source.strides, copy.target.strides) or [(1, 1, 1)]
    shape, source, target = (tuple(column) for column in zip(*dims, strict=True))
    return Copy(shape, copy.source._replace(strides=source), copy.target._replace(strides=target))


def _runs_on(a: Copy, b: Copy) -> bool:
    """Whether b continues a contiguous run at both ends."""
    return len(a.shape) == len(b.shape) == 1 and all(
        x.parameter == y.parameter and x.strides == y.strides == (1,) and x.offset + a.shape[0] == y.offset
        for x, y in ((a.source, b.source), (a.target, b.target))
    )


def messages(copies: Iterable[Copy], rounds: int, end: Literal["source", "target"]) -> list[Message]:
    """The stream of `copies` cut into `rounds` messages of equal size, up to one element, as one end sees them.

    Message k holds elements [k·n // rounds, (k + 1)·n // rounds) of the n that the copies have in all.
    """
    listed = list(copies)
    total = sum(prod(copy.shape) for copy in listed)
    bounds = [k * total // rounds for k in range(rounds + 1)]
    out = [Message(hi - lo) for lo, hi in pairwise(bounds)]
    begin = k = 0
    for copy in listed:
        size, lo = prod(copy.shape), 0
        while lo < size:
            while bounds[k + 1] <= begin + lo:
                k += 1
            hi = min(size, bounds[k + 1] - begin)
            place: Place = getattr(copy, end)
            out[k].regions += _regions(copy.shape, place, lo, hi, begin + lo - bounds[k])
            lo = hi
        begin += size
    return out


def _regions(shape: Sequence[int], place: Place, lo: int, hi: int, at: int) -> Iterator[Region]:
    for box in cut(shape, lo, hi):
        offset = place.offset + sum(start * stride for (start, _), stride in zip(box, place.strides, strict=True))
        yield Region(place.parameter, shape_of(box), place.strides, offset, at)
        at += volume(box)
