"""In which order elements travel between two ranks, how their stream is cut into rounds, and where messages lie.

Sender and receiver both derive the stream from the plan's copies, so messages need no header. A message is seen as
copies whose other end is the place `BUCKET`. This module is integers only; packing and exchanging tensors is left to
`exchange`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from megatron_bridge.boxes import cut, merged, row_major, shape_of, volume
from megatron_bridge.plan import Copy, Place, Plan

BUCKET = "bucket"  # in copies between a parameter and a message, the name of the message's end
ALIGNMENT = 16  # bytes: messages begin, and streams are cut, where the widest loads of a GPU may begin
DIGEST_BYTES = 16
PIPELINED = 4  # rounds that overlap well
SMALL_BUCKET_BYTES = 64 << 20  # below this a round costs more than it hides


@dataclass
class Message:
    """What one rank sends another in one round: `elements` of them, as copies at one of the two ends."""

    elements: int = 0
    copies: list[Copy] = field(default_factory=list)

    @property
    def parameters(self) -> list[str]:
        """The parameters that a message fills or comes from, in its order."""
        ends = ((copy.source.parameter, copy.target.parameter) for copy in self.copies)
        return list(dict.fromkeys(name for pair in ends for name in pair if name != BUCKET))


class Slot(NamedTuple):
    """Where one peer's message lies in a bucket, in bytes; its digest, if any, is at the end."""

    peer: int
    begin: int
    nbytes: int


Streams = dict[int, list[Message]]  # peer, ascending -> its message of each round


def rounds(plan: Plan, bucket_bytes: int, phase: int, digests: bool) -> int:
    """Exchanges of a phase, so that no bucket takes more than `bucket_bytes`, alignment and digests included.

    Where one or two buckets would do, more and smaller ones are taken, so that one is packed while another travels.
    """
    few = min(PIPELINED, _rounds(plan, SMALL_BUCKET_BYTES, phase, digests))
    return max(few, _rounds(plan, bucket_bytes, phase, digests))


def _rounds(plan: Plan, bucket_bytes: int, phase: int, digests: bool) -> int:
    """The plan keeps one element a peer free. Asked in units of what a message may take besides its share, it keeps
    one of these free instead."""
    slack = ALIGNMENT + DIGEST_BYTES * digests
    return -(-plan.rounds(bucket_bytes * plan.itemsize // slack, phase) // (slack // plan.itemsize))


def slots(streams: Streams, k: int, itemsize: int, digests: bool) -> list[Slot]:
    """The messages of round k side by side in a bucket, by ascending peer."""
    found, begin = [], 0
    for peer, stream in streams.items():
        nbytes = -(-stream[k].elements * itemsize // ALIGNMENT) * ALIGNMENT + DIGEST_BYTES * digests
        found.append(Slot(peer, begin, nbytes))
        begin += nbytes
    return found


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


def messages(copies: Iterable[Copy], rounds: int, end: Literal["source", "target"], multiple: int = 1) -> list[Message]:
    """The stream of `copies` cut into `rounds` messages of about equal size, as one end sees them.

    Cuts are where a multiple of `multiple` elements ends. Places in the messages are relative to their beginning.
    """
    listed = list(copies)
    total = sum(prod(copy.shape) for copy in listed)
    bounds = [min(total, -(-k * total // (rounds * multiple)) * multiple) for k in range(rounds + 1)]
    out = [Message(hi - lo) for lo, hi in pairwise(bounds)]
    begin = k = 0
    for copy in listed:
        size, lo = prod(copy.shape), 0
        while lo < size:
            while bounds[k + 1] <= begin + lo:
                k += 1
            hi = min(size, bounds[k + 1] - begin)
            place: Place = getattr(copy, end)
            out[k].copies += _parts(copy.shape, place, lo, hi, begin + lo - bounds[k], end == "source")
            lo = hi
        begin += size
    return [Message(message.elements, list(compact(message.copies))) for message in out]


def _parts(shape: Sequence[int], place: Place, lo: int, hi: int, at: int, packing: bool) -> Iterator[Copy]:
    """The elements [lo, hi) of a strided region to or from a message, where they begin at `at`."""
    for box in cut(shape, lo, hi):
        offset = place.offset + sum(start * stride for (start, _), stride in zip(box, place.strides, strict=True))
        ends = place._replace(offset=offset), Place(place.rank, BUCKET, at, row_major(shape_of(box)))
        yield Copy(shape_of(box), *(ends if packing else ends[::-1]))
        at += volume(box)
