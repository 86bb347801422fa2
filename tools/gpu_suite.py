"""Check and time everything on the GPUs of one machine, in one call with one table.

    python -m tools.gpu_suite --out FOLDER [--parts correctness training rollout …] [--limit-s 500]

Parts are programs, most of them in `tools.gpu`, that run alone, one after another, each within its limit and what is
left of the whole. Those that need more GPUs than are visible are left out, as are those whose packages are not
installed. FOLDER gets a log of each part, and suite.jsonl: what was run on which card with which versions and
when, and every measurement. Ends with 1 where a part failed; a missed target is shown and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.gpu.machine import describe_machine, leave_multicast_off, require_gpu, visible_gpus
from tools.gpu.processes import FAREWELL_SECONDS, run_within
from tools.gpu.report import Measurement, read

ROOT = Path(__file__).parent.parent
SCRATCH = Path(tempfile.gettempdir()) / "rlflow-gpu-suite"
WIDEST = 1000  # columns of the table
TAIL = 1500  # characters of the log of a failed part that are shown


@dataclass(frozen=True)
class Part:
    """A program and how long it may take.

    In its arguments `{out}` is a folder that it may make for logs, `{scratch}` one that parts share for their runs,
    `{limit}` the seconds that it has. It is left out where a package that it `needs` is not installed or fewer than
    `gpus` are visible.
    """

    name: str
    limit: float  # seconds
    arguments: str = ""
    needs: tuple[str, ...] = ()
    module: str = ""  # "": tools.gpu.<name>
    gpus: int = 1  # at least so many

    def command(self, out: Path, seconds: float) -> list[str]:
        values = {"out": out / self.name, "scratch": SCRATCH, "limit": int(seconds)}
        module = self.module or f"tools.gpu.{self.name}"
        return [sys.executable, "-m", module, *(text.format_map(values) for text in self.arguments.split())]

    def obstacle(self) -> str:
        """Why it cannot run here; "": it can."""
        lacking = ", ".join(name for name in self.needs if importlib.util.find_spec(name) is None)
        if lacking:
            return f"{lacking} not installed"
        return f"needs {self.gpus} GPUs" if self.gpus > visible_gpus() else ""


PARTS = (
    Part("correctness", 400, "--limit-s {limit} --out {out}"),
    Part("works", 240, "--limit-s {limit} --folder {scratch}/works", needs=("vllm",)),
    Part("head", 100),
    Part("kernels", 120),
    Part("training", 400),
    Part("rollout", 420, "--limit-s {limit}", needs=("vllm",)),
    Part("phase_change", 220, "--limit-s {limit}", needs=("vllm",)),
    Part("numerics", 250, "--limit-s {limit}", needs=("vllm",)),
    Part("whole_step", 500, "--limit-s {limit} --folder {scratch}/whole_step", needs=("vllm",)),
    Part("peer", 250, "--limit-s {limit} --beside {scratch}/whole_step", ("vllm", "trl"), "tools.peer_trl_gpu"),
    Part("learning", 300, "--limit-s {limit}", ("vllm", "reasoning_gym")),
    Part("memory", 300, "--limit-s {limit} --out {out}", needs=("vllm",)),
    Part("grids", 560, "--limit-s {limit}", gpus=2),
    Part("reshard", 420, "--limit-s {limit}", gpus=2),
    Part("grpo_grids", 330, "--limit-s {limit}", needs=("vllm",), gpus=2),
    Part("placement", 160, "--limit-s {limit}", needs=("vllm",), gpus=2),
    Part("faults", 280, "--limit-s {limit}", needs=("vllm",), gpus=2),
)


@dataclass
class Outcome:
    """How a part went."""

    part: Part
    command: list[str]
    status: int | None = None  # of the process; None: not started or ended at its limit
    seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)
    said: str = ""  # the end of its log
    left_out: str = ""  # why it was; "": it was not

    @property
    def failed(self) -> bool:
        return self.status != 0 and not self.left_out

    def __str__(self) -> str:
        if self.left_out:
            return f"{self.part.name}: left out, {self.left_out}"
        how = "passed" if not self.failed else "out of time" if self.status is None else f"ended with {self.status}"
        return f"{self.part.name}: {how} after {self.seconds:.0f} s, {len(self.measurements)} measurements"


def run(part: Part, out: Path, seconds: float) -> Outcome:
    """Run a part for at most so long; what it printed is in FOLDER/<part>.log, its measurements are returned."""
    outcome = Outcome(part, part.command(out, seconds - FAREWELL_SECONDS), left_out=part.obstacle())
    if outcome.left_out or seconds <= FAREWELL_SECONDS:
        return outcome
    log, begin = out / f"{part.name}.log", time.monotonic()
    outcome.status = run_within(outcome.command, log, seconds, folder=ROOT)
    outcome.seconds = time.monotonic() - begin
    text = log.read_text(errors="replace")
    outcome.measurements, outcome.said = read(text.splitlines()), text[-TAIL:]
    return outcome


def write(path: Path, machine: dict[str, str], outcomes: Sequence[Outcome]) -> None:
    """A line for each part, with card, versions and date, and one for each of its measurements behind it."""
    with path.open("w") as sink:
        for outcome in outcomes:
            part = {"part": outcome.part.name, "status": outcome.status, "seconds": round(outcome.seconds, 1)}
            print(json.dumps(part | {"command": " ".join(outcome.command[1:])} | machine), file=sink)
            for measurement in outcome.measurements:
                print(json.dumps(asdict(measurement)), file=sink)


def table(measurements: Sequence[Measurement]) -> str:
    """A row for each measurement, under its section; lines are as long as they need to be."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("what", "measured", "target", "", "bound", "details"):
        right = name in ("measured", "target", "bound")
        shown.add_column(name, justify="right" if right else "left", no_wrap=True)
    section = ""
    for one in measurements:
        if one.section != section:
            section = one.section
            shown.add_section()
            shown.add_row(Text(section, style="bold"))
        shown.add_row(*_row(one))
    console = Console(file=io.StringIO(), width=WIDEST, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _row(one: Measurement) -> tuple[Text, ...]:
    verdict = {True: "met", False: "missed", None: ""}[one.meets_target]
    sign = "≥" if one.more_is_better else "≤"
    target = "" if one.target is None else f"{sign} {_number(one.target)}"
    bound = "" if one.bound is None else f"{_number(one.bound)} {one.against}".strip()
    details = " · ".join(f"{name} {value}" for name, value in _flat(one.details))
    cells = (one.what, f"{_number(one.value)} {one.unit}".strip(), target, verdict, bound, details)
    return tuple(Text(cell) for cell in cells)  # brackets in a test's name are no markup


def _flat(details: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each detail by its name, `ratio_error.p99` of one within another; lists are written in one cell."""
    for name, value in details.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in _flat(value))
        elif isinstance(value, list):
            yield name, ", ".join(_number(one) if isinstance(one, (int, float)) else str(one) for one in value)
        elif value is not None:
            yield name, _number(value)


def _number(value: float | str) -> str:
    """Five digits of a float, all of a whole number."""
    if isinstance(value, str):
        return value
    if float(value).is_integer() or abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.5g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and suite.jsonl")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="in this order; default: all")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for all parts together")
    arguments = parser.parse_args()
    require_gpu()
    leave_multicast_off()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    known = {part.name: part for part in PARTS}
    machine, end = describe_machine(), time.monotonic() + arguments.limit_s
    print(machine["card"], machine["stack"], machine["date"], sep="\n", flush=True)
    outcomes: list[Outcome] = []
    for name in arguments.parts or known:
        part = known[name]
        outcomes.append(run(part, arguments.out, min(part.limit, end - time.monotonic() - FAREWELL_SECONDS)))
        print(outcomes[-1], flush=True)
        write(arguments.out / "suite.jsonl", machine, outcomes)
    show(outcomes)
    return int(any(outcome.failed for outcome in outcomes))


def show(outcomes: Sequence[Outcome]) -> None:
    """What failed with the end of its log, then the table, so that the table is what stays on the screen."""
    for outcome in outcomes:
        if outcome.failed and outcome.said:
            print(f"--- the end of {outcome.part.name}.log\n{outcome.said}")
    print(table([one for outcome in outcomes for one in outcome.measurements]))
    for outcome in outcomes:
        print(outcome)


if __name__ == "__main__":
    sys.exit(main())
