"""The run folder's metrics.jsonl, one line a step, and what can be said of a run from it.

Plots, tables and reports read runs through here; NaN and infinite values are left out, for JSON has none.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.errors import UserError

Record = dict[str, float]
FILE_NAME, EARLIER = "metrics.jsonl", "metrics.earlier.jsonl"
log = logging.getLogger(__name__)


class Records:
    """Appends to metrics.jsonl; a run that resumes replaces the steps that it does again, a new one keeps the file."""

    def __init__(self, run_dir: Path, first_step: int) -> None:
        self._path = run_dir / FILE_NAME
        if first_step <= 1 and self._path.exists():  # what is there belongs to an earlier run
            os.replace(self._path, run_dir / EARLIER)
            log.warning("%s holds an earlier run, which this one replaces; its metrics are in %s now", run_dir, EARLIER)
        kept = [line for line in _lines(self._path) if json.loads(line)["step"] < first_step]
        part = self._path.with_suffix(".part")
        part.write_text("".join(kept))
        os.replace(part, self._path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")

    def close(self) -> None:
        """Nothing stays open between steps."""


def _lines(path: Path) -> list[str]:
    """Complete lines: the last may have been cut off when a run was killed."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def read_records(run_dir: Path) -> list[Record]:
    """The records of a run in order of steps. Raises UserError where the folder has none."""
    records = [json.loads(line) for line in _lines(run_dir / FILE_NAME)]
    if not records:
        raise UserError(str(run_dir / FILE_NAME), "holds no steps: not the folder of a run that has made one")
    return records


def series(records: Sequence[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was recorded."""
    found = [(int(record["step"]), record[name]) for record in records if name in record]
    return [step for step, _ in found], [value for _, value in found]


def format_metric(records: Sequence[Record], prefix: str) -> str | None:
    """The first metric under `prefix` that is the format rate of a reward, such as eval/integer_answer/format."""
    names = dict.fromkeys(name for record in records for name in record)
    return next((name for name in names if name.startswith(f"{prefix}/") and name.endswith("/format")), None)


def summary(records: Sequence[Record]) -> Record:
    """First and last reward and held-out accuracy, and format rate where there is one; time and speed of all steps.

    `seconds` is the time of the training steps; `tokens_per_second` counts response tokens over that time.
    """
    seconds = sum(series(records, "time/step")[1])
    tokens = sum(series(records, "perf/response_tokens")[1])
    shown: Record = {"steps": max(record["step"] for record in records), "seconds": seconds}
    if seconds:
        shown["tokens_per_second"] = tokens / seconds
    sources = {
        "reward": "train/reward",
        "eval/accuracy": "eval/accuracy",
        "eval/format": format_metric(records, "eval"),
    }
    for name, source in sources.items():
        values = series(records, source)[1] if source else []
        if values:
            separator = "/" if name == "reward" else "_"
            shown |= {f"{name}{separator}first": values[0], f"{name}{separator}last": values[-1]}
    return shown
