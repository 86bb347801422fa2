"""The table at the end of a run: what was learnt, what it took, and where everything lies.

`python -m rlflow.tracking.table RUN_DIR` prints it for a run that has ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rlflow.errors import UserError
from rlflow.tracking.console import clock_time

# row → the pair of keys in summary.json
CHANGES = {
    "training reward": ("reward/first", "reward/last"),
    "held-out accuracy": ("eval/accuracy_first", "eval/accuracy_last"),
    "held-out format rate": ("eval/format_first", "eval/format_last"),
}
PATHS = {
    "curve": "curve.png",
    "TensorBoard": "tensorboard",
    "metrics": "metrics.jsonl",
    "samples": "samples",
    "trained model": "model",
}


def run_table(run_dir: Path, values: Mapping[str, float]) -> Table:
    """The table of a run from its summary; rows that the run has nothing for are left out."""
    table = Table("", "first", "last", title=f"{run_dir}", title_justify="left")
    for name, (first, last) in CHANGES.items():
        if first in values and last in values:
            table.add_row(name, f"{values[first]:.3f}", f"{values[last]:.3f}")
    table.add_section()
    table.add_row("steps", "", f"{values['steps']:.0f}")
    table.add_row("time of the steps", "", clock_time(values["seconds"]))
    if "tokens_per_second" in values:
        table.add_row("response tokens a second", "", f"{values['tokens_per_second']:,.0f}")
    return table


def show(run_dir: Path) -> None:
    """Print the table of a run that has ended and the paths of what it left. Raises UserError without a summary."""
    file = run_dir / "summary.json"
    if not file.exists():
        raise UserError(str(file), "does not exist: the run has not ended, or this is no run's folder")
    console = Console()
    console.print(run_table(run_dir, json.loads(file.read_text())))
    for name, path in PATHS.items():
        if (run_dir / path).exists():
            console.print(f"{name}: {run_dir / path}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rlflow.tracking.table RUN")
    try:
        show(Path(sys.argv[1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
