"""What a torch profiler has recorded of a step, reduced to spans of time: phases, device work, launches and operators.

Reads the profiler's raw events, because torch's own event objects take minutes for the million kernels of a long
rollout. What is said of the spans is left to `profile_table`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import torch

LAUNCH = re.compile(r"cu(da)?(Graph)?Launch(?!HostFunc)")
"""Calls of the CUDA runtime or driver that start kernels: one each, or a graph of many."""


class Span(NamedTuple):
    """Something that took from `start` to `end`, nanoseconds of one clock for host and device."""

    name: str
    start: int
    end: int


class Spans:
    """Spans in the order of their starts."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        ordered = sorted(spans, key=lambda span: span.start)
        self.names = [span.name for span in ordered]
        self.starts = numpy.array([span.start for span in ordered], numpy.int64)
        self.ends = numpy.array([span.end for span in ordered], numpy.int64)

    def __len__(self) -> int:
        return len(self.names)

    def within(self, windows: Sequence[Span]) -> Spans:
        """Those that start in one of the windows, which follow one another."""
        part = Spans()
        for window in windows:
            first, last = numpy.searchsorted(self.starts, [window.start, window.end])
            part.names = part.names + self.names[first:last]
            part.starts = numpy.concatenate([part.starts, self.starts[first:last]])
            part.ends = numpy.concatenate([part.ends, self.ends[first:last]])
        return part

    def covered(self) -> float:
        """Seconds in which at least one of them was at work."""
        if not len(self):
            return 0.0
        reached = numpy.maximum.accumulate(self.ends)
        before = numpy.concatenate([self.starts[:1], reached[:-1]])
        return float(numpy.maximum(self.ends - numpy.maximum(self.starts, before), 0).sum()) / 1e9

    def by_name(self) -> list[tuple[str, int, float]]:
        """(name, how many, seconds of all), the costliest first."""
        counts: dict[str, int] = defaultdict(int)
        spent: dict[str, int] = defaultdict(int)
        for name, nanoseconds in zip(self.names, (self.ends - self.starts).tolist(), strict=True):
            counts[name] += 1
            spent[name] += nanoseconds
        return [(name, counts[name], spent[name] / 1e9) for name in sorted(spent, key=lambda name: -spent[name])]


@dataclass
class Recording:
    """The spans of one step on one rank; without a GPU there are no `device` spans and no `launches`."""

    phases: list[Span] = field(default_factory=list)  # in the order of their starts, the parts of one behind it
    device: Spans = field(default_factory=Spans)  # kernels, copies and sets of memory
    launches: Spans = field(default_factory=Spans)
    operators: Spans = field(default_factory=Spans)  # time of an operator itself, without those it calls


def read(events: Iterable[Any], prefix: str) -> Recording:
    """The spans in a profiler's raw events (`kineto_results.events()`); phases are annotations that `prefix` begins."""
    phases, device, launches = [], [], []
    threads: dict[int, list[Span]] = defaultdict(list)
    for event in events:
        start = event.start_ns()
        span = Span(event.name(), start, start + event.duration_ns())
        on_host = event.device_type() == torch.autograd.DeviceType.CPU
        if event.is_user_annotation():  # the device has a copy of each
            if on_host and span.name.startswith(prefix):
                phases.append(span._replace(name=span.name.removeprefix(prefix)))
        elif not on_host:
            device.append(span)
        elif LAUNCH.match(span.name):
            launches.append(span)
        else:
            threads[event.start_thread_id()].append(span)
    # On a GPU operators only launch: what takes the time is the device's work.
    operators = [] if device else [own for spans in threads.values() for own in own_times(spans)]
    return Recording(sorted(phases, key=_outermost), Spans(device), Spans(launches), Spans(operators))


def own_times(spans: Sequence[Span]) -> Iterator[Span]:
    """The spans of one thread, which nest, each shortened by what it holds."""
    held = [0] * len(spans)
    ordered = sorted(spans, key=_outermost)
    open_spans: list[int] = []
    for number, span in enumerate(ordered):
        while open_spans and ordered[open_spans[-1]].end <= span.start:
            open_spans.pop()
        if open_spans:
            held[open_spans[-1]] += span.end - span.start
        open_spans.append(number)
    for span, inside in zip(ordered, held, strict=True):
        yield span._replace(end=span.end - inside)


def _outermost(span: Span) -> tuple[int, int]:
    return span.start, -span.end
