"""PPO on two GPUs: roles side by side, each with GPUs of its own, against all roles on both GPUs.

    python -m tools.gpu.placement [--shape 0.5b] [--steps 3] [--limit-s 160] [section.key=value …]

Side by side the actor has one GPU, critic and reference the other, and passes of the two run at the same time; on both
GPUs every role is data parallel over the two, one role after another. vLLM samples on each GPU in either case. 32
prompts of 128 tokens, 8 responses to each of exactly 256, two optimizer steps of actor and critic, nothing is taken off
the GPUs but vLLM, which sleeps at level 2. Told are the seconds of a step and its phases behind the first step, and the
peaks of memory. A run takes about a minute; overrides go to `rlflow train`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu.machine import leave_multicast_off, require_gpu
from tools.gpu.runs import (
    MODELS,
    Sections,
    deadline,
    merged,
    prompts,
    steps_of,
    succeeds,
    tell,
    tell_step,
    train,
    write_config,
)
from tools.gpu.shapes import SHAPES, save
from tools.gpu.whole_step import Work

RANKS = 2
WORK = Work(prompts=32, n=8, prompt=128, response=256)
PLACES: dict[str, Sections] = {
    "on both GPUs": {},
    "side by side": {"actor": {"ranks": [0]}, "critic": {"ranks": [1]}, "reference": {"ranks": [1]}},
}


def sections_of(place: str, steps: int, work: Work = WORK) -> Sections:
    """The configuration of a run."""
    role = {"micro_batch_tokens": 16_384, "logprob_chunk_tokens": 16_384}
    shared: Sections = {
        "actor": role, "critic": role, "reference": role,
        "optimizer": {"lr": 1e-5},
        "algorithm": {"advantage": "gae", "kl_coef": 1e-3, "mini_batches": 2},
        "rollout": {
            "n": work.n, "max_prompt_length": work.prompt, "max_response_length": work.response,
            "max_num_seqs": work.samples, "kv_cache_gib": 4.0, "sleep_level": 2,
        },
        "bridge": {"startup_proof": False},  # `tools.gpu.grpo_grids` has it
        "trainer": {"steps": steps, "prompts_per_step": work.prompts},
    }  # fmt: skip
    return merged(shared, PLACES[place])


class Runs:
    """The same work with the roles in one place and in another."""

    def __init__(
        self, model: Path, folder: Path, overrides: Sequence[str], *, steps: int, until: float, work: Work = WORK
    ) -> None:
        self._model, self._folder, self._overrides = model, folder, list(overrides)
        self._steps, self._until, self._work = steps, until, work
        self._texts = prompts(work.prompts * steps, work.prompt)
        self._before: dict[str, Any] = {}  # what is told of the step of the run before, beside the next

    def __call__(self, place: str) -> bool:
        """Train with the roles in a place and report the steps that were made; whether all are there and sound."""
        sections = sections_of(place, self._steps, self._work)
        config = write_config(self._folder / place.replace(" ", "_"), self._model, self._texts, sections)
        ended = train(config, self._overrides, until=self._until, processes=RANKS)
        sound = tell("placement", f"PPO {place}: steps", config, self._steps)
        made = steps_of(config)
        if made:
            seconds = tell_step("placement", f"PPO {place}: step", made, **self._before)
            self._before = {"bound": seconds, "against": f"s {place}"}
        return ended and sound


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--steps", type=int, default=3, help="of each run, with the one that warms up")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--folder", type=Path, help="for the runs, to keep; default: one that goes at the end")
    parser.add_argument("--limit-s", type=float, default=160.0, help="for both runs together")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    arguments = parser.parse_intermixed_args()
    require_gpu(RANKS)
    leave_multicast_off()
    until = deadline(arguments.limit_s)
    model = save(arguments.models / arguments.shape, arguments.shape)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        runs = Runs(model, folder, arguments.overrides, steps=arguments.steps, until=until)
        ended = [succeeds(partial(runs, place)) for place in PLACES]
        return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main())
