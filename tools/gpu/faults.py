"""Whole runs on two GPUs that lose a rank in the middle of a step, and go on from their checkpoint on other grids.

    python -m tools.gpu.faults [--folder FOLDER] [--limit-s 280] [section.key=value …]

One run, tensor parallel, loses a rank in the update; another, of two pipeline stages sampling with vLLM TP2, in the
rollout, where the other rank waits on the GPU for it. Measured is the time from the kill until no process of the job is
left, and whether its output says what happened; then the newest checkpoint is taken up on another layout. Two runs at a
time take about two minutes; overrides go to `rlflow train`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tools.gpu.machine import leave_multicast_off, require_gpu
from tools.gpu.processes import descendants, running
from tools.gpu.report import emit
from tools.gpu.runs import (
    ROOT,
    Sections,
    deadline,
    environment,
    folder_of_runs,
    merged,
    parser_of_runs,
    prompts,
    steps_of,
    succeeds,
    tell,
    train,
    train_command,
    write_config,
)
from tools.gpu.shapes import save
from tools.gpu.works import SHAPE

RANKS = 2
PROMPTS, PROMPT, STEPS, SAVED = 64, 64, 4, 2
"""A step's prompts, their tokens, the steps of a run, and the step that it has saved when it loses a rank."""
TARGET = 30.0
"""Seconds from the kill to the end of the last process."""
PATIENCE = 60.0  # seconds that the last process may take, before it is ended from here
DEEP = 0.1  # seconds that a phase has lasted when the rank is killed
LOOK = 0.05  # seconds between looks at processes


@dataclass(frozen=True)
class Fault:
    """A run that loses a rank, and the layout on which it goes on."""

    name: str
    phase: str  # in which the rank is killed
    rank: int  # one that has samples to score
    layout: Sections
    later: Sections
    resumed: str  # the later layout in words

    def overrides(self) -> list[str]:
        """The later layout as words of the command line."""
        return [f"{name}.{key}={_word(value)}" for name, keys in self.later.items() for key, value in keys.items()]


def _word(value: Any) -> str:
    """As it is written behind section.key=."""
    return str(value).lower() if isinstance(value, bool) else str(value)


FAULTS = (
    Fault(
        "TP2 in the update", "update", 1,
        {"actor": {"tensor_parallel_size": 2, "sequence_parallel": True}},
        {"actor": {"tensor_parallel_size": 1, "sequence_parallel": False}},
        "DP2",
    ),
    Fault(
        "PP2, vLLM TP2 in the rollout", "generate", 0,  # of a replica's ranks the first has the samples
        {"actor": {"pipeline_parallel_size": 2}, "rollout": {"tensor_parallel_size": 2}},
        {"actor": {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}, "rollout": {"tensor_parallel_size": 1}},
        "TP2, vLLM TP1 × 2",
    ),
)  # fmt: skip


def grpo() -> Sections:
    """The configuration of the runs."""
    return {
        "actor": {"micro_batch_tokens": 4096, "offload": True},
        "optimizer": {"lr": 1e-5},
        "rollout": {
            "n": 4, "max_prompt_length": PROMPT, "max_response_length": 256, "kv_cache_gib": 2.0,
            "max_num_seqs": 256, "sleep_level": 2,
        },
        "bridge": {"checksum": True},
        "trainer": {"steps": STEPS, "prompts_per_step": PROMPTS, "save_every": SAVED, "export": False},
    }  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """How a run that lost a rank ended; times are seconds since the rank was killed."""

    launcher: float | None  # None where it was ended from here
    everything: float  # PATIENCE or more where something had to be ended from here
    left: tuple[str, ...]  # command lines of what was still there then
    place: str  # where the rank's main thread was
    said: str  # the end of the run's output
    code: int | None


def configure(folder: Path, model: Path, texts: Sequence[str], fault: Fault, sections: Sections) -> tuple[Path, Path]:
    """Write the configuration of a run that loses a rank; returns it with the file that will tell of the kill."""
    note = folder.resolve() / "killed.json"
    note.unlink(missing_ok=True)
    arguments: dict[str, Any] = {
        "rank": fault.rank, "phase": fault.phase, "seconds": DEEP, "note": str(note),
        "behind": str(folder.resolve() / "run" / "checkpoints" / f"step_{SAVED:06d}"),
    }  # fmt: skip
    kill = {"function": "tools.gpu.killing:kill_rank", "weight": 0.0, "args": arguments}
    return write_config(folder, model, texts, merged(sections, fault.layout), [kill]), note


def lose(config: Path, note: Path, overrides: Iterable[str], until: float) -> Ended | None:
    """Run until a rank was killed and all processes have ended; None, with the output's end, where none was killed."""
    log = config.with_name("broken.log")
    command = train_command(config, overrides, RANKS)
    with running(command, log, folder=ROOT, environment=environment()) as launcher:
        seen: set[psutil.Process] = set()
        while launcher.poll() is None and not _is_told(note) and time.monotonic() < until:
            seen.update(descendants(launcher.pid))
            time.sleep(LOOK)
        if not _is_told(note):
            print(f"{config.parent.name}: no rank was killed\n{_end_of(log)}", flush=True)
            return None
        killed = json.loads(note.read_text())
        ended = _wait(launcher, seen, killed["at"])
        left = _living(seen)
        shown = tuple(_command_line(process) for process in left)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return Ended(*ended, shown, killed["place"], _end_of(log), launcher.returncode)


def _is_told(note: Path) -> bool:
    """Whether the file about the kill is complete: it is empty from the moment at which the kill is prepared."""
    return note.is_file() and note.read_text().endswith("}")


def _wait(
    launcher: subprocess.Popen[bytes], seen: Iterable[psutil.Process], begin: float
) -> tuple[float | None, float]:
    """Seconds from `begin` to the launcher's end, None where it has none within PATIENCE, and to the last process's."""
    launched = None
    while True:
        now = time.monotonic() - begin
        if launched is None and launcher.poll() is not None:
            launched = now
        if now >= PATIENCE or (launched is not None and not _living(seen)):
            return launched, now
        time.sleep(LOOK)


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; what has ended and nobody waited for does not."""
    return [process for process in processes if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100]
    except psutil.NoSuchProcess:
        return "ended meanwhile"


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def is_named(fault: Fault, ended: Ended) -> bool:
    """Whether the output says which rank was killed."""
    return f"rank {fault.rank} was killed (SIGKILL)" in ended.said


def report(fault: Fault, ended: Ended) -> bool:
    """Emit how long the end took; whether the run ended as a failure, by itself and naming its cause."""
    named = is_named(fault, ended)
    emit(
        "faults", f"{fault.name}: from a rank's kill to the job's end", round(ended.everything, 2), "s", target=TARGET,
        more_is_better=False, details={
            "launcher_s": None if ended.launcher is None else round(ended.launcher, 2), "exit": ended.code,
            "cause": "named" if named else "not named", "killed_at": ended.place, "left": list(ended.left) or "nothing",
        },
    )  # fmt: skip
    good = named and not ended.left and ended.code == 1
    if not good or ended.everything > TARGET:
        print(ended.said, flush=True)
    return good


def go_on(fault: Fault, config: Path, overrides: Sequence[str], until: float) -> bool:
    """Take the run up on its later layout; whether it made every step behind the saved one, and soundly."""
    before = steps_of(config)
    good = train(config, [*overrides, *fault.overrides()], until=until, processes=RANKS)
    kept = steps_of(config)[:SAVED] == before[:SAVED]  # with their times, which no two steps share
    what = f"{fault.name}: steps, resumed as {fault.resumed}"
    told: dict[str, Any] = {"made before": len(before), "resumed behind": SAVED if kept else "nothing"}
    return tell("faults", what, config, STEPS, **told) and good and kept


def run(fault: Fault, folder: Path, model: Path, sections: Sections, overrides: Sequence[str], until: float) -> bool:
    """Lose a rank, then go on; whether all went as it should."""
    config, note = configure(folder, model, prompts(PROMPTS * STEPS, PROMPT), fault, sections)
    ended = lose(config, note, overrides, until)
    if ended is None:
        return False
    good = report(fault, ended)
    return go_on(fault, config, overrides, until) and good


def main() -> int:
    arguments = parser_of_runs(__doc__, 280.0).parse_intermixed_args()
    require_gpu(RANKS)
    leave_multicast_off()
    until = deadline(arguments.limit_s)
    with folder_of_runs(arguments.folder) as folder, ThreadPoolExecutor(len(FAULTS)) as pool:
        model = save(folder / "model", SHAPE)
        calls = [
            partial(run, fault, folder / fault.phase, model, grpo(), arguments.overrides, until) for fault in FAULTS
        ]
        return int(not all(list(pool.map(succeeds, calls))))


if __name__ == "__main__":
    sys.exit(main())
