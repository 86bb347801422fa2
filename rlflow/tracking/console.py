"""What a run shows while it runs: one line a step, and a live bar below it where there is a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

# word in the line → metric
SHOWN = {
    "reward": "train/reward",
    "kl": "actor/kl",
    "gap": "mismatch/log_prob_mean",
    "len": "train/response_length",
    "accuracy": "eval/accuracy",
}


def step_line(step: int, total_steps: int, metrics: Mapping[str, float], seconds_left: float | None = None) -> str:
    """`step 3/40 reward 0.41 kl 0.002 len 12.3 tok/s 1,234 mem 4.5GiB eta 2:31 | generate 1.2s update 3.4s …`

    Words and values alternate, so that the line can be searched and cut; a metric that the step has not is left out,
    and so are parts of phases. `mem` is the phase that took most.
    """
    words = [f"step {step}/{total_steps}"]
    words += [f"{word} {metrics[name]:.3g}" for word, name in SHOWN.items() if name in metrics]
    if "perf/tokens_per_second" in metrics:
        words.append(f"tok/s {metrics['perf/tokens_per_second']:,.0f}")
    if memory := [value for name, value in metrics.items() if name.startswith("memory/")]:
        words.append(f"mem {max(memory):.3g}GiB")
    if seconds_left is not None:
        words.append(f"eta {clock_time(seconds_left)}")
    phases = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    phases.pop("step", None)
    times = [f"{name} {value:.1f}s" for name, value in phases.items() if value >= 0.05 and "/" not in name]
    return " ".join(words) + (" | " + " ".join(times) if times else "")


def clock_time(seconds: float) -> str:
    """2:31, or 1:02:31."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Console:
    """Prints the lines of a run; where standard output is a terminal a bar with the phase at work stays below them."""

    def __init__(self, total_steps: int, console: RichConsole | None = None) -> None:
        self._console = console or RichConsole()
        self._total = total_steps
        self._progress: Progress | None = None

    def phase(self, name: str) -> None:
        """Show what is being done now."""
        if self._console.is_terminal:
            progress = self._progress or self._start()
            progress.update(progress.task_ids[0], description=name)

    def line(self, text: str, step: int) -> None:
        """Print a step's line, and move the bar to that step."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def text(self, text: str) -> None:
        """Print lines that are laid out already."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self) -> Progress:
        columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console, transient=True
        )
        self._progress.add_task("", total=self._total)
        self._progress.start()
        self._console.show_cursor(True)  # a process that is killed cannot show it again
        return self._progress
