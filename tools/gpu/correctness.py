"""Run the GPU tests and tell how many pass.

    python -m tools.gpu.correctness [--jobs 8] [--limit-s 280] [-k EXPRESSION]

Each file of tests/gpu is a process of its own, several at a time on the same GPU; what compares how much of its memory
is free before and after runs before all others, alone, in at most a third of the time. Logs are printed of files with
failures only, and kept in --out.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu.machine import leave_multicast_off, require_gpu
from tools.gpu.processes import run_within
from tools.gpu.report import emit

ROOT = Path(__file__).parent.parent.parent
SCRATCH = Path(tempfile.gettempdir()) / "rlflow-gpu-tests"  # models and runs, gigabytes of them
ALONE = ("test_memory.py",)
OUTCOME = re.compile(r"^(tests/\S+\.py)::(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
COLLECTED = re.compile(r"\bcollected (\d+) items?(?: / (\d+) deselected)?")
FINE = (0, 5)  # of pytest: all passed or were skipped; there was nothing to run
TAIL = 4000  # characters of a log with failures that are shown


@dataclass(frozen=True)
class Tally:
    """What a file's log says; `collected` counts tests that the limit left out, too."""

    collected: int
    outcomes: Counter[str]
    failures: tuple[str, ...]
    status: int | None  # of the process; None where it was ended at its limit
    seconds: float

    @property
    def unfinished(self) -> int:
        return self.collected - sum(self.outcomes.values())


def read_log(text: str, status: int | None, seconds: float) -> Tally:
    """Count what pytest -v printed, also where it was ended early."""
    found = COLLECTED.search(text)
    collected = int(found[1]) - int(found[2] or 0) if found else 0
    named = {f"{file}::{test}": outcome for file, test, outcome in OUTCOME.findall(text)}
    failures = tuple(name for name, outcome in named.items() if outcome in ("FAILED", "ERROR"))
    return Tally(collected, Counter(named.values()), failures, status, seconds)


def run_file(file: Path, out: Path, end: float, expression: str) -> Tally:
    """Run a file's tests until `end` (monotonic seconds)."""
    log, begin = out / f"{file.stem}.log", time.monotonic()
    command = [
        sys.executable, "-m", "pytest", "-v", "-rP", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=170",
        f"--basetemp={SCRATCH / file.stem}", *(["-k", expression] if expression else []), str(file.relative_to(ROOT)),
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    status = run_within(command, log, max(0.0, end - begin), folder=ROOT, environment=environment)
    return read_log(log.read_text(errors="replace"), status, time.monotonic() - begin)


def run_all(files: Sequence[Path], out: Path, limit: float, jobs: int, expression: str) -> dict[Path, Tally]:
    begin = time.monotonic()
    call = partial(run_file, out=out, expression=expression)
    tallies = {file: call(file, end=begin + limit / 3) for file in files if file.name in ALONE}
    call = partial(call, end=begin + limit)
    others = [file for file in files if file not in tallies]
    with ThreadPoolExecutor(jobs) as pool:
        return tallies | dict(zip(others, pool.map(call, others), strict=True))


def report(file: Path, tally: Tally, log: Path) -> bool:
    """One measurement of a file; returns whether all of its tests that can run here passed."""
    counts = tally.outcomes
    details: dict[str, Any] = {"skipped": counts["SKIPPED"], "unfinished": tally.unfinished, "s": round(tally.seconds)}
    if tally.failures:
        details |= {"failed": ", ".join(name.partition("::")[2] for name in tally.failures)}
    good = tally.status in FINE
    wanted = max(tally.collected - counts["SKIPPED"], 0 if good else 1)
    if not good:
        how = details["ended"] = "out of time" if tally.status is None else f"pytest ended with {tally.status}"
        print(f"--- {file.name}: {how}\n{log.read_text(errors='replace')[-TAIL:]}", flush=True)
    emit("correctness", file.name, counts["PASSED"], "passed", target=wanted, details=details)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=8, help="files at a time")
    parser.add_argument("--limit-s", type=float, default=280.0)
    parser.add_argument("--out", type=Path, default=SCRATCH / "logs", help="folder for logs")
    parser.add_argument("-k", dest="expression", default="", help="only these tests, as for pytest")
    arguments = parser.parse_args()
    require_gpu()
    leave_multicast_off()
    for folder in (arguments.out, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    tallies = run_all(files, arguments.out, arguments.limit_s, arguments.jobs, arguments.expression)
    good = [report(file, tally, arguments.out / f"{file.stem}.log") for file, tally in tallies.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
