"""Profiles the steps that the configuration names, and marks every phase for whoever listens.

Phases are ranges of NVTX where CUDA is in use, for Nsight Systems, and of torch's profiler; without a listener that
costs microseconds. What is said of a profile is left to `profile_table`.
"""

from __future__ import annotations

import gc
import gzip
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlflow.config.ranks import rank_list
from rlflow.config.roles import role_sections
from rlflow.config.schema import Config
from rlflow.tracking.profile_table import STEP, profile_text
from rlflow.tracking.spans import Recording, read

PREFIX = "rlflow: "
"""What the names of phases begin with in traces, where libraries have ranges of their own."""
FOLDER = "profile"
log = logging.getLogger(__name__)


@contextmanager
def marked(phase: str) -> Iterator[None]:
    """Mark what is inside as a phase, in traces of NVTX and of torch's profiler."""
    with ExitStack() as marks:
        if torch.cuda.is_initialized():
            marks.enter_context(torch.cuda.nvtx.range(PREFIX + phase))
        marks.enter_context(record_function(PREFIX + phase))
        yield


def profiled_ranks(config: Config, world_size: int) -> set[int]:
    """The first rank that samples and the first of each role: among them every phase has one that works in it."""
    parts = [config.rollout.ranks, *(role.ranks for role in role_sections(config).values())]
    return {rank_list(ranks, world_size)[0] for ranks in parts}


class Profile:
    """`begin(step)`, some `phase(name)` blocks, `end(step)`; of steps other than `steps` it only marks the phases.

    A profiled step leaves `step_000003_rank_0.txt` in `folder`, the table, and with `trace` a file for Perfetto beside
    it. Recording slows the step down; to read and write what a rollout of a million kernels leaves takes some ten
    seconds, which count for the next step.
    """

    def __init__(self, steps: tuple[int, ...], folder: Path, *, rank: int, trace: bool) -> None:
        self._steps, self._folder, self._rank, self._trace = steps, folder, rank, trace
        self._recorder: profile | None = None
        self._whole = ExitStack()
        self._cpu_seconds: dict[str, float] = {}

    def begin(self, step: int) -> None:
        """Start to record, if the step is one of those."""
        if step in self._steps:
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_initialized() else [])]
            self._recorder = profile(activities=kinds)
            self._recorder.start()
            self._cpu_seconds = {}
            self._whole.enter_context(self.phase(STEP))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase, and count what the process's threads compute in it."""
        start = time.process_time()
        with marked(name):
            yield
        self._cpu_seconds[name] = self._cpu_seconds.get(name, 0.0) + time.process_time() - start

    def end(self, step: int) -> str | None:
        """Write what was recorded of the step, if it was; its table."""
        if (recorder := self._recorder) is None:
            return None
        self._whole.close()
        recorder.stop()
        self._recorder = None
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step:06}_rank_{self._rank}"
        title = f"step {step} on rank {self._rank}, {_device_name()}; recording slows it down"
        text = profile_text(_recording(recorder), self._cpu_seconds, title)
        path.with_suffix(".txt").write_text(text)
        if self._trace:
            _write_trace(recorder, path.with_suffix(".json"))
        log.info("the profile of step %d is in %s.*", step, path)
        return text


def _recording(recorder: profile) -> Recording:
    assert recorder.profiler is not None
    assert recorder.profiler.kineto_results is not None
    collects = gc.isenabled()
    gc.disable()  # it would look through a million new spans again and again
    try:
        return read(recorder.profiler.kineto_results.events(), PREFIX)
    finally:
        if collects:
            gc.enable()


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "CPU"


def _write_trace(recorder: profile, path: Path) -> None:
    """The trace as JSON, compressed: quickly, for a long rollout's takes hundreds of megabytes."""
    recorder.export_chrome_trace(str(path))
    with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
    path.unlink()
