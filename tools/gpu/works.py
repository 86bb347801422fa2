"""That `rlflow train` does on one GPU what it promises: short runs of a shallow model, nothing about their speed.

    python -m tools.gpu.works [--folder FOLDER] [--shapes 0.5b 7b [--algorithms grpo ppo]] [section.key=value …]

GRPO and PPO with vLLM asleep at level 2 and everything else off the GPU meanwhile, the bridge proven and its sums
checked, deterministic kernels: two steps, a checkpoint and a third step after it; the same three steps without a break,
which must be equal to the last bit; PPO with critic and reference. Two runs at a time take about 100 s. Where memory
serves as FOLDER, the checkpoints do not wait for a disk. With `--shapes` real models take two steps of each algorithm,
each run alone, with all roles on the GPU at once; of 7b the host has a part of AdamW, as `ROOM` says.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlflow.tracking.records import Record
from tools.gpu.machine import require_gpu
from tools.gpu.report import emit
from tools.gpu.runs import (
    LARGEST_KL,
    MODELS,
    Sections,
    deadline,
    folder_of_runs,
    merged,
    parser_of_runs,
    prompts,
    steps_of,
    succeeds,
    tell,
    train,
    write_config,
)  # fmt: skip
from tools.gpu.shapes import SHAPES, save

SHAPE = replace(SHAPES["0.5b"], num_hidden_layers=4, vocab_size=16_384)
"""Heads and width of a real model; a checkpoint of it takes a second."""
LEARNT = ("train/", "actor/", "mismatch/")
"""Metrics that follow from the seed alone, unlike times and memory."""
PROMPTS, PROMPT, STEPS = 16, 64, 3
ROOM: dict[str, Sections] = {"7b": {"actor": {"recompute": "selective"}, "optimizer": {"cpu_offload": 0.6}}}
"""How a shape finds room on one GPU, where it would not by itself."""
CRITICS = {"7b": "0.5b"}
"""The critic's shape, where there is no room for two of the actor's."""
LARGEST_KLS = {"7b": 4e-3}
"""Of shapes that LARGEST_KL is no bound for: 28 layers 3,584 wide had 2.3e-3 on an H200, 8 of them 6e-4."""


def grpo(on_gpu: bool = True) -> Sections:
    """The configuration of GRPO; without a GPU as much of it as there is on a CPU."""
    return {
        "actor": {"micro_batch_tokens": 4096, "offload": on_gpu},
        "optimizer": {"lr": 1e-5},
        "rollout": {
            "n": 4, "max_prompt_length": PROMPT, "max_response_length": 64, "kv_cache_gib": 1.0,
            "max_num_seqs": 64, "sleep_level": 2 if on_gpu else 0,
        },
        "bridge": {"checksum": True},
        "trainer": {"steps": STEPS, "prompts_per_step": PROMPTS, "deterministic": True, "export": True},
    }  # fmt: skip


def ppo(on_gpu: bool = True) -> Sections:
    """The same with a critic and a moving reference, and two optimizer steps of each."""
    changes: Sections = {
        "algorithm": {
            "advantage": "gae", "kl_coef": 1e-3, "kl_in": "reward", "kl_estimator": "k1", "mini_batches": 2,
            "skip_zero_advantage": False,
        },
        "reference": {"update_every": 1, "ema": 0.5},
        "trainer": {"steps": 2, "export": False, "deterministic": False},
    }  # fmt: skip
    return merged(grpo(on_gpu), changes)


ALGORITHMS = {"grpo": grpo, "ppo": ppo}


def differences(one: Sequence[Record], other: Sequence[Record]) -> list[str]:
    """What was learnt otherwise in two runs: "step 2 actor/loss 0.1 0.2"; steps of one alone count too."""
    found = []
    for step in sorted({int(record["step"]) for record in (*one, *other)}):
        mine, theirs = (next((r for r in run if r["step"] == step), {}) for run in (one, other))
        for name in sorted(mine.keys() | theirs.keys()):
            if name.startswith(LEARNT) and mine.get(name) != theirs.get(name):
                found.append(f"step {step} {name} {mine.get(name)} {theirs.get(name)}")
    return found


def digest(config: Path) -> str:
    """Of the weights that a run exported."""
    total = hashlib.sha256()
    for file in sorted((config.parent / "run" / "model").glob("*.safetensors")):
        total.update(file.read_bytes())
    return total.hexdigest()


def of_shape(algorithm: str, name: str, models: Path) -> Sections:
    """The configuration of a real model's run, which needs no proof that a shallow one has not had."""
    changes: Sections = {
        "actor": {"offload": False},
        "bridge": {"startup_proof": False, "checksum": False},
        "trainer": {"steps": 2, "export": False, "deterministic": False},
    }
    if algorithm == "ppo" and name in CRITICS:
        changes["critic"] = {"path": str(models / CRITICS[name])}
    return merged(merged(ALGORITHMS[algorithm](), changes), ROOM.get(name, {}))


def train_shape(algorithm: str, name: str, models: Path, folder: Path, overrides: Sequence[str], until: float) -> bool:
    """Two steps of a real model, and of a critic."""
    texts, sections = prompts(PROMPTS * 2, PROMPT), of_shape(algorithm, name, models)
    if "critic" in sections:
        save(sections["critic"]["path"], CRITICS[name])
    config = write_config(folder / f"{algorithm} {name}", save(models / name, name), texts, sections)
    good = train(config, overrides, until=until)
    largest_kl = LARGEST_KLS.get(name, LARGEST_KL)
    return tell("works", f"{algorithm.upper()} {name}: steps", config, 2, largest_kl=largest_kl) and good


class Jobs:
    """Runs of a shallow model, and what is told of them when they have ended."""

    def __init__(self, folder: Path, overrides: Sequence[str], until: float, on_gpu: bool) -> None:
        self._overrides, self._until = list(overrides), until
        model, texts = save(folder / "model", SHAPE), prompts(PROMPTS * STEPS, PROMPT)
        broken = merged(grpo(on_gpu), {"trainer": {"save_every": 2}})
        kinds = {"broken": broken, "whole": grpo(on_gpu), "ppo": ppo(on_gpu)}
        self._configs = {name: write_config(folder / name, model, texts, kind) for name, kind in kinds.items()}

    def run(self) -> bool:
        """All runs, two at a time; whether all of them ended well and said what they should."""
        lanes: list[Callable[[], list[bool]]] = [
            lambda: [self._train("broken", "trainer.steps=2", "trainer.export=false"), self._train("broken")],
            lambda: [self._train("whole"), self._train("ppo")],
        ]
        with ThreadPoolExecutor(len(lanes)) as pool:
            ended = [good for future in [pool.submit(lane) for lane in lanes] for good in future.result()]
        told = [
            tell("works", "GRPO, saved and resumed: steps", self._configs["broken"], STEPS),
            tell("works", "PPO with critic and reference: steps", self._configs["ppo"], 2),
            self._tell_differences(),
        ]
        return all(ended + told)

    def _train(self, name: str, *overrides: str) -> bool:
        return train(self._configs[name], [*self._overrides, *overrides], until=self._until)

    def _tell_differences(self) -> bool:
        """Whether a broken run and a whole one have made steps and learnt the same to the last bit."""
        broken, whole = self._configs["broken"], self._configs["whole"]
        records = steps_of(whole)
        found = differences(steps_of(broken), records) if records else ["no steps"]
        print("\n".join(found), flush=True)
        same = digest(broken) == digest(whole)
        emit(
            "works", "deterministic, broken against whole: metrics that differ", len(found), "", target=0,
            more_is_better=False, details={"weights": "equal" if same else "differ"},
        )  # fmt: skip
        return not found and same


def main() -> int:
    parser = parser_of_runs(__doc__, 240.0)
    parser.add_argument("--models", type=Path, default=MODELS, help="of real shapes")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=(), help="real models in place of shallow ones")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="of real models")
    arguments = parser.parse_intermixed_args()
    require_gpu()
    with folder_of_runs(arguments.folder) as folder:
        how = folder, arguments.overrides, deadline(arguments.limit_s)
        if not arguments.shapes:
            return int(not succeeds(lambda: Jobs(*how, on_gpu=True).run()))
        ended = [
            succeeds(partial(train_shape, algorithm, name, arguments.models, *how))
            for name in arguments.shapes
            for algorithm in arguments.algorithms
        ]
        return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main())
