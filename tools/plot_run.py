"""Draw a run: reward and held-out accuracy against steps, the format rate apart.

python tools/plot_run.py RUN_DIR [--out FILE]      writes RUN_DIR/curve.png
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from rlflow.errors import UserError
from rlflow.tracking import format_metric, read_records, series
from rlflow.tracking.records import Record


def draw(records: Sequence[Record], title: str, out: Path) -> None:
    """Write the picture of a run's records to `out`."""
    figure, (learning, form) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    add_line(learning, records, "train/reward", "reward on training samples", color="tab:gray", alpha=0.8)
    add_line(
        learning, records, "eval/accuracy", "accuracy on held-out problems", color="tab:blue", marker="o", linewidth=2
    )
    learning.set_ylabel("reward, accuracy")
    learning.set_title(title, loc="left")
    train, held_out = format_metric(records, "train"), format_metric(records, "eval")
    add_line(form, records, train, "training samples", color="tab:gray", alpha=0.8)
    add_line(form, records, held_out, "held-out problems", color="tab:blue", marker="o", linewidth=2)
    form.set_ylabel("format rate")
    form.set_ylim(-0.05, 1.05)
    form.set_xlabel("step")
    for axes in (learning, form):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="lower right", frameon=False)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def add_line(axes: Axes, records: Sequence[Record], name: str | None, label: str, **style: object) -> None:
    """A metric against steps; nothing where the run does not have it."""
    steps, values = series(records, name) if name else ([], [])
    if steps:
        axes.plot(steps, values, label=label, **style)  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, help="picture to write; RUN_DIR/curve.png if left out")
    args = parser.parse_args()
    out = args.out or args.run_dir / "curve.png"
    try:
        draw(read_records(args.run_dir), args.run_dir.resolve().name, out)
    except UserError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
