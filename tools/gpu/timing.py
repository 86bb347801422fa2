"""How long a call takes, and what a GPU does meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch


def seconds_of(call: Callable[[], object], *, warm_up: int = 2, repeats: int = 5) -> float:
    """Median over several calls, each until the GPU is done."""
    times = []
    for repeat in range(warm_up + repeats):
        begin = now()
        call()
        end = now()
        if repeat >= warm_up:
            times.append(end - begin)
    return statistics.median(times)


def seconds_each(call: Callable[[], object], calls: int = 4) -> float:
    """Of one of several calls in a row, between which the host does not wait."""

    def several() -> None:
        for _ in range(calls):
            call()

    return seconds_of(several, warm_up=1, repeats=3) / calls


def copy_rate() -> float:
    """Bytes a second, read and written, of a plain copy of 4 GiB within the GPU; a graph would copy slower."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_each(partial(target.copy_, source))


def now() -> float:
    """The clock once the GPU has done what it was asked for."""
    _synchronize()
    return time.perf_counter()


@dataclass(frozen=True)
class GpuWork:
    """What a GPU did in a call: kernels, copies and fills, those of replayed graphs included."""

    kernels: int
    busy: float  # seconds in which at least one ran
    costliest: tuple[str, ...]  # a line for each of the kernels that took most time, all its launches together


def gpu_work(call: Callable[[], object], *, costliest: int = 12) -> GpuWork | None:
    """Run a call under torch's profiler; None where there is no GPU. It takes longer than without."""
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        _synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == on_gpu and not getattr(event, "is_user_annotation", False)
    ]
    spans = [(start, end) for _, start, end in events]
    return GpuWork(len(events), covered(spans) / 1e6, tuple(_costliest(events, costliest)))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _costliest(events: list[tuple[str, float, float]], count: int) -> list[str]:
    took: dict[str, float] = {}
    launched: dict[str, int] = {}
    for name, start, end in events:
        took[name] = took.get(name, 0.0) + end - start
        launched[name] = launched.get(name, 0) + 1
    names = sorted(took, key=lambda name: -took[name])[:count]
    return [f"{took[name] / 1e3:8.2f} ms {launched[name]:6,} × {name[:100]}" for name in names]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
