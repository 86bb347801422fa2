"""Carries the messages of a phase between ranks: pack, exchange and unpack, at the same time for neighbouring rounds.

Two buckets a direction are all the memory this takes. On a GPU packing and unpacking have a stream each beside the
backend's own, and only events order them; with gloo the backend's threads exchange while this one packs and unpacks.
What a message holds is left to `streams`, how regions are copied to `copies`.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge import checksum
from megatron_bridge.copies import FusedCopies
from megatron_bridge.errors import SyncError
from megatron_bridge.groups import Group, exchange_bytes
from megatron_bridge.plan import Copy
from megatron_bridge.streams import BUCKET, Slot, Streams, slots


class Buckets:
    """Two buckets to send from and two to receive into, allocated when first needed and kept until `release`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._nbytes = [0, 0]
        self.outgoing: list[dict[str, Tensor]] = [{}, {}]  # in the form in which copies look tensors up
        self.incoming: list[dict[str, Tensor]] = [{}, {}]

    def require(self, outgoing: int, incoming: int) -> None:
        """Make buckets at least this large, in bytes."""
        self._nbytes = [max(self._nbytes[0], outgoing), max(self._nbytes[1], incoming)]

    def allocate(self) -> None:
        """Take the memory, unless it is there."""
        for pair, nbytes in zip((self.outgoing, self.incoming), self._nbytes, strict=True):
            for bucket in pair:
                if BUCKET not in bucket:
                    bucket[BUCKET] = torch.empty(nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)

    def release(self) -> None:
        """Give the memory back."""
        for bucket in (*self.outgoing, *self.incoming):
            bucket.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all four when allocated."""
        return 2 * sum(self._nbytes)


@dataclass(frozen=True)
class Round:
    """One round of a rank: where messages lie in its buckets, and the copies that pack and unpack them."""

    sends: list[Slot]
    receives: list[Slot]
    pack: FusedCopies
    unpack: FusedCopies


class Exchange:
    """The messages between this rank and its peers in one phase; ranks are the group's.

    `sends` and `receives` are messages by peer and round, `source` and `target` the tensors that they name. `run`
    needs every rank of the group.
    """

    def __init__(
        self, sends: Streams, receives: Streams, source: Mapping[str, Tensor], target: Mapping[str, Tensor],
        buckets: Buckets, *, rank: int, rounds: int, digests: bool,
    ) -> None:  # fmt: skip
        self.receives = receives
        self._rank, self._buckets, self._digests, self._run = rank, buckets, digests, 0
        size = buckets.dtype.itemsize
        self.rounds = []
        for k in range(rounds):
            out, into = slots(sends, k, size, digests), slots(receives, k, size, digests)
            buckets.require(*(sum(slot.nbytes for slot in side) for side in (out, into)))
            self.rounds.append(
                Round(
                    out,
                    into,
                    FusedCopies(_placed(sends, k, out, size), source, buckets.outgoing[k % 2]),
                    FusedCopies(_placed(receives, k, into, size), buckets.incoming[k % 2], target),
                )
            )
        self._lanes = _Lanes(buckets.device)
        self._broken: list[tuple[int, int, Tensor]] = []

    @property
    def sent(self) -> int:
        """Elements that the messages carry from this rank in a run."""
        return sum(each.pack.elements for each in self.rounds)

    @property
    def received(self) -> int:
        """Elements that the messages carry to this rank in a run."""
        return sum(each.unpack.elements for each in self.rounds)

    def run(self, group: Group, meanwhile: Callable[[], None]) -> None:
        """Exchange everything; `meanwhile` is called once, when the first exchange is under way.

        SyncError says in which round an exchange failed: a peer is gone, or did not answer within the group's timeout.
        """
        if not self.rounds:  # all stays on this rank: the lanes would only hold up its copies
            meanwhile()
            return
        self._buckets.allocate()
        self._run += 1
        self._broken = []
        self._lanes.begin()
        works: list[dist.Work] = []
        for k in range(len(self.rounds)):
            works.append(self._post(group, k, works))
            if k == 0:
                meanwhile()
            else:
                self._take(k - 1, works[k - 1])
        self._take(len(works) - 1, works[-1])
        self._lanes.end()

    def _post(self, group: Group, k: int, works: list[dist.Work]) -> dist.Work:
        """Pack a bucket, once what it carried two rounds ago has left, and start its exchange."""
        with self._lanes.packing(k, works):
            outgoing, incoming = self.pack(k), self.incoming(k)
            received, sent = (_by_rank(side, group.size()) for side in (self.rounds[k].receives, self.rounds[k].sends))
            with self._explained(k):
                return exchange_bytes(group, incoming, outgoing, received, sent)

    def _take(self, k: int, work: dist.Work) -> None:
        with self._lanes.unpacking(k):
            with self._explained(k):
                work.wait()
            self.unpack(k)

    @contextlib.contextmanager
    def _explained(self, k: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            peers = sorted({slot.peer for slot in self.rounds[k].sends + self.rounds[k].receives})
            raise SyncError(
                f"rank {self._rank}: the exchange with ranks {peers} failed in round {k + 1} of {len(self.rounds)}, "
                f"the target is half written: {error}"
            ) from error

    def pack(self, k: int) -> Tensor:
        """Fill the bucket that leaves in round k; returns its bytes, uint8."""
        self._buckets.allocate()
        self.rounds[k].pack.run()
        outgoing = _used(self._buckets.outgoing[k % 2], self.rounds[k].sends)
        for slot in self.rounds[k].sends if self._digests else ():
            checksum.seal(outgoing[slot.begin :][: slot.nbytes], self._identity(k, self._rank))
        return outgoing

    def incoming(self, k: int) -> Tensor:
        """The bytes of the bucket that round k arrives in, uint8."""
        return _used(self._buckets.incoming[k % 2], self.rounds[k].receives)

    def unpack(self, k: int) -> None:
        """Write what arrived in round k into the target."""
        if self._digests:
            incoming = self.incoming(k)
            for slot in self.rounds[k].receives:
                message = incoming[slot.begin :][: slot.nbytes]
                self._broken.append((k, slot.peer, checksum.broken(message, self._identity(k, slot.peer))))
        self.rounds[k].unpack.run()

    def _identity(self, k: int, sender: int) -> int:
        """Which message it is: of which run, round and sender."""
        return (self._run * len(self.rounds) + k) << 20 | sender

    def faults(self) -> list[str]:
        """Each message of the last run that did not arrive as it was sent: round, ranks and the parameters it fills.

        Waits for the device.
        """
        found, self._broken = self._broken, []
        if not found:
            return []
        broken = torch.stack([bad for _, _, bad in found]).tolist()
        return [
            f"round {k + 1} of {len(self.rounds)}, rank {peer} to rank {self._rank}, "
            + _range(self.receives[peer][k].parameters)
            for (k, peer, _), bad in zip(found, broken, strict=True)
            if bad
        ]


class _Lanes:
    """The streams of packing and unpacking, and what each has to wait for; on a CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._device = device
            self._pack, self._unpack = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._unpacked = [torch.cuda.Event(), torch.cuda.Event()]

    def begin(self) -> None:
        """Let both start after what the caller's stream has been given: the weights' last update."""
        if self._cuda:
            for stream in (self._pack, self._unpack):
                stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        """Let the caller's stream go on after both."""
        if self._cuda:
            for stream in (self._pack, self._unpack):
                torch.cuda.current_stream(self._device).wait_stream(stream)

    @contextlib.contextmanager
    def packing(self, k: int, works: Sequence[dist.Work]) -> Iterator[None]:
        """Where round k is packed and its exchange started: its two buckets are those of round k − 2."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._pack):
            if k >= 2:
                works[k - 2].wait()
                self._pack.wait_event(self._unpacked[k % 2])
            yield

    @contextlib.contextmanager
    def unpacking(self, k: int) -> Iterator[None]:
        """Where round k is unpacked."""
        if not self._cuda:
            yield
            return
        with torch.cuda.stream(self._unpack):
            yield
            self._unpacked[k % 2].record(self._unpack)


def _placed(streams: Streams, k: int, places: Sequence[Slot], itemsize: int) -> list[Copy]:
    """The copies of round k, with places in the bucket instead of in each message."""
    found = []
    for slot in places:
        begin = slot.begin // itemsize
        for shape, *ends in streams[slot.peer][k].copies:
            found.append(
                Copy(shape, *(p._replace(offset=p.offset + begin) if p.parameter == BUCKET else p for p in ends))
            )
    return found


def _used(bucket: Mapping[str, Tensor], places: Sequence[Slot]) -> Tensor:
    return bucket[BUCKET].view(torch.uint8)[: sum(slot.nbytes for slot in places)]


def _by_rank(places: Sequence[Slot], size: int) -> list[int]:
    sizes = [0] * size
    for slot in places:
        sizes[slot.peer] = slot.nbytes
    return sizes


def _range(parameters: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([*parameters[:1], *parameters[-1:]])) or "no parameter"
