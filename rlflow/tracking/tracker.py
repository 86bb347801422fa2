"""Records a run: times its phases, shows its progress, and writes metrics, samples and a summary to its folder.

Every rank has a tracker and measures its phases; only the main rank's writes and shows. Times are the main rank's own,
memory is that of the rank that took most. Other metrics come ready made: means over all ranks are the trainer's matter,
and samples are those that the main rank was given.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from rlflow.batch import Sample
from rlflow.config.schema import Config
from rlflow.run_folder import naming_full_disk
from rlflow.tracking import plot
from rlflow.tracking.clock import StepClock
from rlflow.tracking.console import Console, step_line
from rlflow.tracking.memory import PhaseMemory, max_over_ranks
from rlflow.tracking.profile import FOLDER, Profile, profiled_ranks
from rlflow.tracking.records import Record, Records, read_records, summary
from rlflow.tracking.writers import TensorBoard, WeightsAndBiases, Writer, write_samples

RECENT_STEPS = 10  # steps that the time left is estimated from


class Tracker:
    """`begin(step)`, some `phase(name)` blocks, `end(step, metrics, samples)`; at last `finish()`.

    `entered` is told which phase is at work whenever that changes.
    """

    def __init__(
        self, config: Config, output_dir: Path | str, is_main: bool, total_steps: int,
        entered: Callable[[str], None] = lambda phase: None,
    ) -> None:  # fmt: skip
        self._config = config
        self._run_dir = Path(output_dir)
        self._is_main = is_main
        self._total = total_steps
        self._clock = StepClock(entered=entered)
        self._memory = PhaseMemory()
        self._profile = _profile(config, self._run_dir / FOLDER)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._console = Console(total_steps) if is_main and config.tracking.console else None
        self._writers: list[Writer] = []  # opened when the first step is known
        self._tensorboard: TensorBoard | None = None  # the writer that takes texts too

    def begin(self, step: int) -> None:
        """Start a step's clock, and its profile if one is asked for; the memory of phases before it counts for none."""
        self._profile.begin(step)  # what that takes counts as `track`
        self._clock.begin()
        self._memory.forget()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of a step; of phases only parts nest, such as `update/critic` in `update`."""
        if self._console is not None:
            self._console.phase(name)
        with self._profile.phase(name), self._clock.phase(name), self._memory.phase(name):
            yield

    @property
    def running(self) -> str:
        """The phase at work, or the one that an exception left, for the report of a failure."""
        return self._clock.current

    def end(self, step: int, metrics: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Stop the step's clock and record the step. Collective over the job.

        Adds `time/…`, `memory/…`, `perf/response_tokens` and `perf/tokens_per_second`: response tokens over the whole
        step's time. Memory, and the time of parts of phases, are those of the rank that took most.
        """
        times = self._clock.end()
        if (table := self._profile.end(step)) and self._console is not None:
            self._console.text(table)
        parts = {name: seconds for name, seconds in times.items() if name.count("/") > 1}
        most = max_over_ranks(self._memory.take() | parts)
        self._recent.append(times["time/step"])
        if not self._is_main:
            return
        metrics = {**metrics, **times, **most, **self._speed(metrics, times["time/step"])}
        left = (self._total - step) * sum(self._recent) / len(self._recent)
        with naming_full_disk(self._run_dir, f"step {step} (metrics, samples)"):
            self._record(step, metrics, left)
            if samples:
                self._record_samples(step, samples)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics measured outside of a step, such as those before the first."""
        if self._is_main and metrics:
            with naming_full_disk(self._run_dir, f"step {step} (metrics)"):
                self._record(step, metrics, None)

    def finish(self) -> Record:
        """Write summary.json and curve.png from everything recorded, also before a resume; returns the summary."""
        with naming_full_disk(self._run_dir, "the summary"):
            return self._finish()

    def _finish(self) -> Record:
        self.close()
        if not self._is_main:
            return {}
        records = read_records(self._run_dir)
        plot.draw(records, self._run_dir.resolve().name, self._run_dir / plot.FILE_NAME)
        result = summary(records)
        (self._run_dir / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
        return result

    def close(self) -> None:
        """Close what is open; also right after a failure."""
        for writer in self._writers:
            writer.close()
        self._writers, self._tensorboard = [], None
        if self._console is not None:
            self._console.close()

    def _speed(self, metrics: Mapping[str, float], seconds: float) -> Record:
        if "train/response_length" not in metrics:
            return {}
        samples = self._config.trainer.prompts_per_step * self._config.rollout.n
        tokens = samples * metrics["train/response_length"]
        return {"perf/response_tokens": tokens, "perf/tokens_per_second": tokens / seconds}

    def _record(self, step: int, metrics: Mapping[str, float], seconds_left: float | None) -> None:
        for writer in self._writers or self._open(step):
            writer.write(step, metrics)
        if self._console is not None:
            self._console.line(step_line(step, self._total, metrics, seconds_left), step)

    def _record_samples(self, step: int, samples: Sequence[Sample]) -> None:
        write_samples(self._run_dir, step, samples, self._config.data.prompt_key)
        if self._tensorboard is not None:
            self._tensorboard.texts(step, samples[: self._config.tracking.samples_per_step])

    def _open(self, first_step: int) -> list[Writer]:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        tracking = self._config.tracking
        self._writers = [Records(self._run_dir, first_step)]
        if tracking.tensorboard:
            self._tensorboard = TensorBoard(self._run_dir, first_step)
            self._writers.append(self._tensorboard)
        if tracking.wandb:
            self._writers.append(WeightsAndBiases(self._run_dir, tracking.wandb, dataclasses.asdict(self._config)))
        return self._writers


def _profile(config: Config, folder: Path) -> Profile:
    """What profiles this rank; on most ranks no step."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    steps = config.profile.steps if rank in profiled_ranks(config, size) else ()
    return Profile(steps, folder, rank=rank, trace=config.profile.trace)
