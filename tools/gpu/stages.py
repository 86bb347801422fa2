"""Where the time of a transfer goes: packing, exchange, unpacking and local copies, at work together and each alone.

What `megatron_bridge.exchange` does is marked from outside while it runs, with events of the GPU, or on a CPU with the
clock, where an exchange is then waited for at once. Which transfers to look at is left to `tools.gpu.reshard`.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_bridge.execute import Transfer
from megatron_bridge.groups import exchange_bytes
from tools.bench_reshard import timed
from tools.gpu.timing import covered

Found = TypeVar("Found")
Mark = Any  # an event of the GPU, or seconds of the clock
STAGES = ("packing", "exchange", "unpacking", "local")


class Clock:
    """Moments in the order of the streams' work, or of the host's without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> Mark:
        """When the current stream has done what it was given so far."""
        if self._aside is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def arrival(self, work: dist.Work) -> Mark:
        """When an exchange is done."""
        with contextlib.nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
            work.wait()
            return self.mark()

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two marks, once both have passed."""
        if self._aside is None:
            return end - begin
        begin.synchronize()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


class Recorder:
    """The spans of each stage in a run of a transfer, and the exchanges that were made in it."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._spans: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)
        self.exchanges: list[tuple[Any, ...]] = []  # the arguments of each `exchange_bytes`

    def run(self, transfer: Transfer, repeat: int) -> dict[str, float]:
        """Run a transfer some times; of this rank's fastest, seconds in which each stage was at work, and of all.

        Collective. An exchange is at work from when its bucket is packed until its arrival: it may be waiting for room
        on the GPU, or for another rank.
        """
        with self._marking(transfer):
            return min((self._once(transfer) for _ in range(repeat)), key=lambda found: found["whole"])

    def _once(self, transfer: Transfer) -> dict[str, float]:
        self._spans.clear()
        self.exchanges.clear()
        dist.barrier()  # else the first exchange would last for as long as the last rank takes to come
        begin = self._clock.mark()
        transfer.run()
        whole = self._clock.seconds(begin, self._clock.mark())
        return {"whole": whole} | {stage: self._at_work(stage, begin) for stage in STAGES}

    def _at_work(self, stage: str, begin: Mark) -> float:
        """Seconds that a stage's spans cover, which overlap where several exchanges are under way."""
        between = self._clock.seconds
        return covered((between(begin, one), between(begin, two)) for one, two in self._spans[stage])

    @contextlib.contextmanager
    def _marking(self, transfer: Transfer) -> Iterator[None]:
        with contextlib.ExitStack() as patches:
            for phase in transfer.phases:
                for part, method, stage in (
                    (phase.local, "run", "local"),
                    (phase.exchange, "pack", "packing"),
                    (phase.exchange, "unpack", "unpacking"),
                ):
                    patches.enter_context(patch.object(part, method, self._span(stage, getattr(part, method))))
            patches.enter_context(patch("megatron_bridge.exchange.exchange_bytes", self._exchange))
            yield

    def _span(self, stage: str, call: Callable[..., Found]) -> Callable[..., Found]:
        def marked(*given: Any) -> Found:
            begin = self._clock.mark()
            found = call(*given)
            self._spans[stage].append((begin, self._clock.mark()))
            return found

        return marked

    def _exchange(self, *given: Any) -> dist.Work:
        packed = self._clock.mark()
        work = exchange_bytes(*given)
        self._spans["exchange"].append((packed, self._clock.arrival(work)))
        self.exchanges.append(given)
        return work


def each_alone(
    transfer: Transfer, exchanges: list[tuple[Any, ...]], repeat: int, device: torch.device
) -> dict[str, float]:
    """Seconds of each stage of all rounds without the others, of the slowest rank in the best run. Collective."""
    rounds = [(phase.exchange, k) for phase in transfer.phases for k in range(len(phase.exchange.rounds))]

    def pack() -> None:
        for exchange, k in rounds:
            exchange.pack(k)

    def send() -> None:
        for given in exchanges:
            exchange_bytes(*given).wait()

    def unpack() -> None:
        for exchange, k in rounds:
            exchange.unpack(k)

    def copy() -> None:
        for phase in transfer.phases:
            phase.local.run()

    return {
        stage: timed(call, repeat, device)[0] for stage, call in zip(STAGES, (pack, send, unpack, copy), strict=True)
    }


def host_seconds(transfer: Transfer) -> float:
    """Seconds of a run in which the host gives the GPU its work; on a CPU, in which it does it. Collective."""
    spent: list[float] = []

    def clocked(call: Callable[..., None]) -> Callable[..., None]:
        def run(*given: Any) -> None:
            begin = time.perf_counter()
            call(*given)
            spent.append(time.perf_counter() - begin)

        return run

    with contextlib.ExitStack() as patches:
        for phase in transfer.phases:
            patches.enter_context(patch.object(phase.exchange, "run", clocked(phase.exchange.run)))
        transfer.run()
    return sum(spent)
