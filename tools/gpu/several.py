"""Whole runs of one model in several ways on two GPUs, one after another, and the program that makes them.

In what the ways differ, and against what their steps are held, is left to the part that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlflow.tracking.records import Record
from tools.gpu.machine import leave_multicast_off, require_gpu
from tools.gpu.runs import (
    MODELS,
    Sections,
    deadline,
    folder_of_runs,
    parser_of_runs,
    prompts,
    steps_of,
    succeeds,
    tell,
    train,
    write_config,
)
from tools.gpu.shapes import SHAPES, save
from tools.gpu.whole_step import Work

RANKS = 2
WORK = Work(prompts=32, n=8, prompt=128, response=256)
ROLE: dict[str, Any] = {"micro_batch_tokens": 16_384, "logprob_chunk_tokens": 16_384}
Way = TypeVar("Way")


def shared_sections(work: Work, steps: int) -> Sections:
    """What the configurations of all ways have in common: vLLM sleeps at level 2 while the trainer works."""
    return {
        "actor": ROLE,
        "optimizer": {"lr": 1e-5},
        "rollout": {
            "n": work.n, "max_prompt_length": work.prompt, "max_response_length": work.response,
            "max_num_seqs": work.samples, "kv_cache_gib": 4.0, "sleep_level": 2,
        },
        "trainer": {"steps": steps, "prompts_per_step": work.prompts},
    }  # fmt: skip


class Runs:
    """Runs of a model with the same prompts, until a time of `time.monotonic`, each in a folder of its own."""

    def __init__(
        self, model: Path, folder: Path, overrides: Sequence[str], *, steps: int, until: float, work: Work = WORK
    ) -> None:
        self.folder, self.overrides = folder, list(overrides)
        self.steps, self.until, self.work = steps, until, work
        self._model, self._texts = model, prompts(work.prompts * steps, work.prompt)

    def configure(self, name: str, sections: Sections) -> Path:
        """Write the configuration of a run."""
        return write_config(self.folder / name, self._model, self._texts, sections)

    def make(self, config: Path, section: str, what: str, ranks: int = RANKS) -> tuple[list[Record], bool]:
        """Train, and report how many steps were made; returns them, and whether all are there and sound."""
        ended = train(config, self.overrides, until=self.until, processes=ranks)
        sound = tell(section, f"{what}: steps", config, self.steps)
        return steps_of(config), ended and sound


def run(
    description: str | None, runs: Callable[..., Callable[[Way], bool]], ways: Iterable[Way], *, shape: str,
    layers: int | None = None, limit_s: float,
) -> int:  # fmt: skip
    """The program of a part: make `runs` as `Runs` is made, and call it with each way; the exit status."""
    parser = parser_of_runs(description, limit_s)
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--layers", type=int, default=layers, help="in the place of the shape's own number")
    parser.add_argument("--steps", type=int, default=3, help="of each run, with the one that warms up")
    parser.add_argument("--models", type=Path, default=MODELS)
    arguments = parser.parse_intermixed_args()
    require_gpu(RANKS)
    leave_multicast_off()
    until = deadline(arguments.limit_s)
    name = arguments.shape if arguments.layers is None else f"{arguments.shape}-{arguments.layers}"
    model = save(arguments.models / name, arguments.shape, layers=arguments.layers)
    with folder_of_runs(arguments.folder) as folder:
        one_after_another = runs(model, folder, arguments.overrides, steps=arguments.steps, until=until)
        ended = [succeeds(partial(one_after_another, way)) for way in ways]
    return int(not all(ended))
