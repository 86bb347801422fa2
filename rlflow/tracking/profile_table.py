"""The table of a profiled step: what each phase took on host and device, and which kernels or operators took most.

Pure: it reads a `Recording` and writes text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from rlflow.tracking.spans import Recording, Span, Spans

STEP = "step"  # the phase that holds all others
WIDTH = 150
COSTLIEST = 6  # kernels shown of each phase
LEAST_SHARE = 0.01  # of the step, below which a phase's kernels are not shown
NOISE = re.compile(r"^void |at::native::|\(anonymous namespace\)::|<unnamed>::|std::array<char\*, \d+ul>")


def profile_text(recording: Recording, cpu_seconds: Mapping[str, float], title: str) -> str:
    """Both tables as plain text, for a file or a console that is `WIDTH` characters wide.

    `cpu_seconds` are those of the process's threads in each phase, of which `recording` has no word.
    """
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, color_system=None)
    console.print(phase_table(recording, cpu_seconds, title))
    console.print(cost_table(recording))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def phase_table(recording: Recording, cpu_seconds: Mapping[str, float], title: str) -> Table:
    """A row for each phase and part of one, indented, then what no phase covers, then the step."""
    table = Table("phase", title=title, title_justify="left")
    figures = ("GPU busy s", "busy", "launches", "kernels") if len(recording.device) else ("operators",)
    for name in ("s", "share", "CPU s", *figures):
        table.add_column(name, justify="right")
    step, phases = _step_and_phases(recording)
    outer = [name for name in phases if "/" not in name]
    between = _between(step, [span for name in outer for span in phases[name]])
    rest = cpu_seconds.get(STEP, 0.0) - sum(cpu_seconds.get(name, 0.0) for name in outer)
    for name, spans in phases.items():
        table.add_row("  " * name.count("/") + name, *_row(recording, spans, step, cpu_seconds.get(name, 0.0)))
    table.add_section()
    table.add_row("other", *_row(recording, between, step, rest))
    table.add_row("step", *_row(recording, [step], step, cpu_seconds.get(STEP, 0.0)))
    return table


def cost_table(recording: Recording) -> Table:
    """The costliest kernels and copies, or operators where there is no GPU, of each phase that has no parts."""
    work, kind = (recording.device, "kernel") if len(recording.device) else (recording.operators, "operator")
    table = Table("phase", title=f"costliest {kind}s, and their shares of all in the phase", title_justify="left")
    for name in ("s", "share", "calls", "µs each"):
        table.add_column(name, justify="right")
    table.add_column(kind, no_wrap=True, overflow="ellipsis")
    step, phases = _step_and_phases(recording)
    for name, spans in phases.items():
        has_parts = any(other.startswith(f"{name}/") for other in phases)
        if not has_parts and _seconds(spans) >= LEAST_SHARE * _seconds([step]):
            table.add_section()
            for heading, figures in zip((name, *[""] * COSTLIEST), _costs(work.within(spans)), strict=False):
                table.add_row(heading, *figures)
    return table


def _step_and_phases(recording: Recording) -> tuple[Span, dict[str, list[Span]]]:
    """The span of the step, and those of each phase in it."""
    step = next(span for span in recording.phases if span.name == STEP)
    phases: dict[str, list[Span]] = {}
    for span in recording.phases:
        if span is not step:
            phases.setdefault(span.name, []).append(span)
    return step, phases


def _row(recording: Recording, spans: Sequence[Span], step: Span, cpu_seconds: float) -> Iterator[str]:
    seconds = _seconds(spans)
    yield from (f"{seconds:.3f}", f"{seconds / _seconds([step]):.1%}", f"{cpu_seconds:.2f}")
    if not len(recording.device):
        yield f"{len(recording.operators.within(spans)):,}"
        return
    work = recording.device.within(spans)
    yield from (f"{work.covered():.3f}", f"{work.covered() / seconds:.0%}" if seconds else "")
    yield from (f"{len(recording.launches.within(spans)):,}", f"{len(work):,}")


def _costs(work: Spans) -> Iterator[tuple[str, ...]]:
    """Seconds, share, number, microseconds each and name of what took most."""
    found = work.by_name()
    whole = sum(seconds for _, _, seconds in found) or 1.0
    for name, calls, seconds in found[:COSTLIEST]:
        each = f"{seconds / calls * 1e6:,.1f}"
        yield f"{seconds:.3f}", f"{seconds / whole:.1%}", f"{calls:,}", each, NOISE.sub("", name)


def _between(step: Span, covered: Sequence[Span]) -> list[Span]:
    """What of the step none of the spans covers, which follow one another."""
    edges = [
        step.start,
        *(edge for span in sorted(covered, key=lambda span: span.start) for edge in span[1:]),
        step.end,
    ]
    return [Span("other", start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _seconds(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans) / 1e9
