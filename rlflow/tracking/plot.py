"""The picture of a run: reward and held-out accuracy against steps, the format rate apart.

A run draws it at its end; `tools/plot_run.py` draws it at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.tracking.records import Record, format_metric, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "curve.png"
TRAINING: dict[str, Any] = {"color": "tab:gray", "alpha": 0.8}
HELD_OUT: dict[str, Any] = {"color": "tab:blue", "marker": "o", "linewidth": 2}


def draw(records: Sequence[Record], title: str, out: Path) -> None:
    """Write the picture of a run's records to `out`; a run whose rewards have no format rate has one panel."""
    from matplotlib.figure import Figure  # half a second that ranks which draw nothing need not wait for

    train_format, held_out_format = format_metric(records, "train"), format_metric(records, "eval")
    panels = 2 if train_format or held_out_format else 1
    figure = Figure(figsize=(8, 3 + 1.5 * panels), layout="constrained")  # pyplot would look for a display
    axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=(3, 1)[:panels])[:, 0]
    axes[0].set_title(title, loc="left")
    add_line(axes[0], records, "train/reward", "reward on training samples", **TRAINING)
    add_line(axes[0], records, "eval/accuracy", "accuracy on held-out problems", **HELD_OUT)
    finish(axes[0], "reward, accuracy")
    if panels == 2:
        add_line(axes[1], records, train_format, "training samples", **TRAINING)
        add_line(axes[1], records, held_out_format, "held-out problems", **HELD_OUT)
        axes[1].set_ylim(-0.05, 1.05)
        finish(axes[1], "format rate")
    axes[-1].set_xlabel("step")
    figure.savefig(out, dpi=120)


def add_line(axes: Axes, records: Sequence[Record], name: str | None, label: str, **style: Any) -> None:
    """A metric against steps; nothing where the run does not have it."""
    steps, values = series(records, name) if name else ([], [])
    if steps:
        axes.plot(steps, values, label=label, **style)


def finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="best", frameon=False)
