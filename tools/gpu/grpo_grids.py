"""GRPO end to end on two GPUs: training on every kind of grid, sampling with vLLM TP2 and TP1 × 2, beside one GPU.

    python -m tools.gpu.grpo_grids [--shape 1.5b] [--layers 14] [--steps 3] [--limit-s 330] [section.key=value …]

32 prompts of 128 tokens, 8 responses to each of exactly 256, one optimizer step, random weights in bfloat16; vLLM
sleeps at level 2 while the trainer works, whose state is off the GPU while vLLM does. Of each run are told the seconds
of the phases behind the first step, the gap of log-probs, and what the first rank received in a sync, which must be
what the layouts make it need. A run takes about 50 s; the last ones are left out where no time is left for them, with a
line that says so. Overrides go to `rlflow train`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bridge.families import load_architecture
from rlflow.config import load
from rlflow.models import split_layers
from rlflow.rollout.placement import choose
from rlflow.tracking.records import Record
from tools.gpu import several
from tools.gpu.report import emit
from tools.gpu.runs import LARGEST_KL, Sections, medians, merged, tell_step
from tools.gpu.several import RANKS, WORK, shared_sections
from tools.gpu.whole_step import Work

SHORTEST = 60.0
"""Seconds without which a run is not begun."""

TRAIN: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "PP2": {"pipeline_parallel_size": 2},
    "DP2": {},
    "CP2": {"context_parallel_size": 2},
}
ROLLOUT: dict[str, dict[str, Any]] = {"TP2": {"tensor_parallel_size": 2}, "TP1 × 2": {}}


@dataclass(frozen=True)
class Pair:
    """A grid of the trainer and the layout of vLLM on two GPUs; without names both are on one."""

    train: str = ""
    rollout: str = ""

    @property
    def ranks(self) -> int:
        return RANKS if self.train else 1

    def __str__(self) -> str:
        return f"{self.train} → vLLM {self.rollout}" if self.train else "one GPU"

    @property
    def folder(self) -> str:
        return "_".join(str(self).replace("→", "to").replace("×", "x").lower().split())


PAIRS = (
    Pair(), Pair("TP2", "TP2"), Pair("PP2", "TP1 × 2"), Pair("DP2", "TP1 × 2"), Pair("CP2", "TP2"),
    Pair("TP2", "TP1 × 2"), Pair("PP2", "TP2"), Pair("DP2", "TP2"), Pair("CP2", "TP1 × 2"),
)  # fmt: skip
"""With the first five every grid and both layouts have been there."""


def sections_of(pair: Pair, steps: int, work: Work = WORK) -> Sections:
    """The configuration of a run."""
    shared = merged(shared_sections(work, steps), {"actor": {"offload": True}})
    grid = {"actor": TRAIN[pair.train], "rollout": ROLLOUT[pair.rollout]} if pair.train else {}
    return merged(shared, grid)


def expected_bytes(config: Path, overrides: Sequence[str], ranks: int) -> int:
    """What the first rank needs of the weights that it samples with and does not hold of those that it trains."""
    run = load(config, overrides, world_size=ranks)
    architecture = load_architecture(run.model.path)
    stages = split_layers(architecture, run.actor.pipeline_parallel_size)
    return choose(run, architecture, stages, ranks, ranks).received_bytes[0]


class Runs(several.Runs):
    """Runs on pairs of grids; those on two GPUs are shown beside the one on one."""

    _one_gpu: float | None = None  # seconds of a step

    def __call__(self, pair: Pair) -> bool:
        """Train on a pair of grids and report the steps that it made; whether all was as it should be."""
        if time.monotonic() + SHORTEST > self.until:
            print(f"{pair}: left out, no time is left", flush=True)
            return True
        config = self.configure(pair.folder, sections_of(pair, self.steps, self.work))
        made, good = self.make(config, "grpo_grids", str(pair), pair.ranks)
        if not made:
            return False
        as_expected = report_sync(pair, made, expected_bytes(config, self.overrides, pair.ranks))
        beside = {} if self._one_gpu is None else {"bound": self._one_gpu, "against": "s on one GPU"}
        seconds = tell_step("grpo_grids", f"{pair}: step", made, **beside)
        if pair.ranks == 1:
            self._one_gpu = seconds
        return good and as_expected


def report_sync(pair: Pair, made: Sequence[Record], expected: int) -> bool:
    """Emit the gap of log-probs and the bytes of a sync; whether these are what the layouts ask for in each step."""
    received, seen = [step["sync/received_bytes"] for step in made], medians(made)
    gaps = {name: round(seen[f"mismatch/{name}"], 5) for name in ("log_prob_mean", "log_prob_max")}
    kl = max(step["mismatch/kl"] for step in made)
    emit("grpo_grids", f"{pair}: gap, k3", kl, "", target=LARGEST_KL, more_is_better=False, details=gaps)
    emit(
        "grpo_grids", f"{pair}: received in a sync by the first rank", max(received) / 1e6, "MB",
        target=expected / 1e6, more_is_better=False,
        details={"least_mb": min(received) / 1e6, "local_mb": round(seen["sync/local_bytes"] / 1e6, 1),
                 "weights_s": round(seen["time/sync/weights"], 4), "cache_s": round(seen["time/sync/cache"], 4)},
    )  # fmt: skip
    return set(received) == {float(expected)}


def main() -> int:
    return several.run(__doc__, Runs, PAIRS, shape="1.5b", layers=14, limit_s=330.0)


if __name__ == "__main__":
    sys.exit(main())
