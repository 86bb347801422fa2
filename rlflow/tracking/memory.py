"""What a step's phases take of the memory that is short: the GPU's, or the process's where there is none."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil
import torch
import torch.distributed as dist

GIB = 2**30


class PhaseMemory:
    """The peak of each phase in bytes; a part of a phase counts for the phase too."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peaks: dict[str, int] = {}
        self._running: list[int] = []  # peaks so far of the phase at work and its parts
        self._before = 0  # of what no peak is known of, when it was last looked at
        self._in_graphs = 0  # what captured graphs keep of the GPU for their replays

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._note()
        self._running.append(0)
        try:
            yield
        finally:
            self._note()
            self._peaks[name] = max(self._running.pop(), self._peaks.get(name, 0))

    def forget(self) -> None:
        """Let the phases since the last call of `take` count for none."""
        self._peaks = {}

    def take(self) -> dict[str, float]:
        """`memory/<phase>_gib` of the phases since the last call.

        What graphs were captured meanwhile keep counts from now on; until then it is counted as they allocate it.
        """
        peaks, self._peaks = self._peaks, {}
        if torch.cuda.is_initialized():
            self._in_graphs = kept_by_graphs()
        return {f"memory/{name}_gib": peak / GIB for name, peak in peaks.items()}

    def _note(self) -> None:
        """Let the peak since the last call count for all phases at work."""
        peak = self._peak_of_gpu() if torch.cuda.is_initialized() else self._peak_of_process()
        self._running = [max(peak, before) for before in self._running]

    def _peak_of_gpu(self) -> int:
        """The most that torch had allocated at once, and all that the GPU holds besides torch's pool.

        The driver counts what vLLM's engine and NCCL have mapped. Memory of a sleeping engine is allocated for torch
        and not there for the driver: the difference of the two leaves it out. Of what changes outside torch within a
        phase the larger of both ends counts. Graphs keep memory that torch has not given out, and nobody else can have.
        """
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        peak = torch.cuda.max_memory_allocated() + max(outside, self._before) + self._in_graphs
        torch.cuda.reset_peak_memory_stats()
        self._before = outside
        return peak

    def _peak_of_process(self) -> int:
        """The resident set, at the larger of both ends."""
        resident = self._process.memory_info().rss
        peak, self._before = max(resident, self._before), resident
        return peak


def kept_by_graphs() -> int:
    """Bytes that the pools of captured graphs hold for replays, without tensors in them that are alive.

    torch walks over all its blocks for this, which takes milliseconds: ask once a step.
    """
    segments = torch.cuda.memory_snapshot()
    private = [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def max_over_ranks(values: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each name over the ranks that have it. Collective over the job.

    Names are gathered only where a checksum says that ranks have others: mostly all have the same.
    """
    if not dist.is_initialized():
        return dict(values)
    names = sorted(values)  # the order in which a rank met them does not matter
    checksum = float(zlib.crc32("\n".join(names).encode()))
    high, negated_low = _largest([checksum, -checksum])
    if high != -negated_low:
        gathered: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(gathered, names)
        names = sorted(set().union(*gathered))
    found = dict(zip(names, _largest([values.get(name, -math.inf) for name in names]), strict=True))
    return {name: found[name] for name in [*values, *names]}


def _largest(values: Sequence[float]) -> list[float]:
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()
