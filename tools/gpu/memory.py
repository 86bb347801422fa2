"""Peaks of GPU memory by phase, beside what `rlflow.inspect` predicts, and the calibration that follows from them.

    python -m tools.gpu.memory --out FOLDER [--limit-s 240] [--runs FOLDER …]
    python -m tools.gpu.memory --check [calibration.json]

Measures the trainer's engine alone in many configurations, in one process that is replaced when one fails, and whole
short runs of `rlflow train` with vLLM; peaks are those of steady steps. `--runs` adds other finished runs by their
output folders. FOLDER/calibration.json then has all measurements and the coefficients fitted to them: it is to replace
rlflow/inspect/calibration.json. `--check` shows the errors of such a file, also of each configuration where only the
others are fitted; it needs no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from rlflow import parallel
from rlflow.algorithms import PolicyObjective
from rlflow.config.load import interpret, read
from rlflow.config.schema import Config, Model
from rlflow.errors import UserError
from rlflow.inspect import calibration
from rlflow.inspect.calibration import Calibration
from rlflow.roles import Engine
from rlflow.roles.build import build_engine
from rlflow.tracking import read_records
from rlflow.tracking.memory import PhaseMemory, kept_by_graphs
from tests.workers import RankFailure, World
from tools.gpu import runs
from tools.gpu.batches import random_batch
from tools.gpu.calibrate import Measured, architecture, errors_left_out, fit
from tools.gpu.machine import describe_machine, require_gpu
from tools.gpu.report import emit
from tools.gpu.shapes import SHAPES, save

PROMPT, RESPONSE = 512, 513  # the last token is no row: 1,024 rows a sample
STEPS = 3  # moments are made in the first, graphs captured in the second
TARGET = 0.1
LIBRARIES = 2**28
"""Bytes that libraries may keep for themselves; more is what the case before has left."""
RUN_SECONDS = 65.0  # that a whole run is expected to take at most
SECTIONS = ("model", "actor", "critic", "reference", "optimizer", "algorithm", "rollout", "bridge", "trainer")
NOT_KEPT = ("path", "tokenizer", "output_dir", "resume", "export", "seed", "keep", "save_every", "name")
"""Keys that say nothing of memory."""


@dataclass(frozen=True)
class Case:
    """What is to be measured."""

    shape: str
    tokens: int = 16_384  # of a micro-batch
    n: int = 1  # responses that share a prompt
    actor: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = [f"{name} {value}" for name, value in self.actor.items()]
        shared = [f"{self.n} responses a prompt"] if self.n > 1 else []
        return ", ".join([f"{self.shape} {self.tokens}", *shared, *options])

    def sections(self) -> dict[str, dict[str, Any]]:
        """Of a configuration with two full micro-batches in each optimizer step."""
        samples = 2 * self.tokens // (PROMPT + RESPONSE - 1)
        return {
            "actor": {"micro_batch_tokens": self.tokens, "share_prompts": self.n > 1, **self.actor},
            "algorithm": {"mini_batches": 1, "epochs": 2},  # two steps a rollout: the actor predicts, too
            "rollout": {
                "n": self.n, "max_prompt_length": PROMPT, "max_response_length": RESPONSE, "ignore_eos": True,
            },
            "trainer": {"prompts_per_step": samples // self.n},
        }  # fmt: skip


CASES = (
    Case("0.5b"),
    Case("1.5b"),
    Case("7b8"),
    Case("1.5b", 8192, actor={"logprob_chunk_tokens": 8192}),
    Case("7b8", 8192, actor={"recompute": "full"}),
    Case("0.5b", 16_384, actor={"cuda_graphs": True}),
    Case("0.5b", 8192, actor={"offload": True}),
    Case("0.5b", 16_384, n=8),
    Case("0.5b", 32_768, actor={"recompute": "full", "logprob_chunk_tokens": 16_384}),
    Case("1.5b", 16_384, actor={"cuda_graphs": True}),
    Case("1.5b", 8192, actor={"recompute": "selective"}),
    Case("1.5b", 8192, n=8),
    Case("7b8", 4096, actor={"logprob_chunk_tokens": 4096}),
)

WHOLE_RUNS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "0.5b run, reference, all away in the rollout": ("0.5b", {
        "actor": {"offload": True, "micro_batch_tokens": 8192},
        "algorithm": {"kl_coef": 1e-3, "mini_batches": 2},
        "rollout": {"n": 8, "max_prompt_length": 128, "max_response_length": 256, "kv_cache_gib": 8.0},
        "trainer": {"steps": 2, "prompts_per_step": 32},
    }),
    "1.5b run, all stays, vLLM without graphs": ("1.5b", {
        "actor": {"micro_batch_tokens": 8192},
        "rollout": {
            "n": 8, "max_prompt_length": 128, "max_response_length": 128, "kv_cache_gib": 12.0, "max_num_seqs": 1024,
            "sleep_level": 0, "cuda_graphs": False,
        },
        "trainer": {"steps": 2, "prompts_per_step": 128},
    }),
}  # fmt: skip


def engine_peaks(shape: str, config: Config) -> dict[str, float]:
    """GiB of the last of a few steps; weights are zeros, which take as much as others. In a process with one GPU."""
    parallel.initialize(120, 0)
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated() + kept_by_graphs()
    left = left if left > LIBRARIES else 0
    with patch.object(Engine, "load_hf"):
        engine = build_engine(config, "actor", architecture(shape), parallel.Grid())
    rollout, memory = config.rollout, PhaseMemory()
    batch = random_batch(
        engine.architecture.vocab, prompts=config.trainer.prompts_per_step, n=rollout.n,
        prompt=rollout.max_prompt_length, response=rollout.max_response_length,
    )  # fmt: skip
    for _ in range(STEPS):
        memory.take()
        with memory.phase("predict/actor"):
            engine.log_probs(batch, 1.0)
        with memory.phase("update/actor"):
            engine.train_step(batch, PolicyObjective(), lr=1e-5)
    return phases_of(memory.take(), left / calibration.GIB)


def phases_of(record: dict[str, float], left: float = 0.0) -> dict[str, float]:
    """GiB by phase of a run's metrics, those phases that are predicted."""
    found = {
        name.removeprefix("memory/").removesuffix("_gib"): round(value - left, 3)
        for name, value in record.items()
        if name.startswith("memory/")
    }
    computing = ("predict/", "update/")
    return {name: value for name, value in found.items() if name in ("generate", "sync") or name.startswith(computing)}


def measure_engines(cases: Sequence[Case], end: float) -> tuple[list[Measured], int]:
    """The cases until the time is up, and how many failed."""
    measured, failed, world = [], 0, World("nccl")
    for case in cases:
        wanted = Measured(str(case), case.shape, case.sections(), False, {})
        if time.monotonic() > end:
            print(f"not measured: {case}", flush=True)
            continue
        begin = time.monotonic()
        try:
            peaks = world(1, engine_peaks, case.shape, wanted.run(), timeout=max(10.0, end - begin))[0]
            measured.append(replace(wanted, gib=peaks))
            print(f"{case}: {peaks} ({time.monotonic() - begin:.1f} s)", flush=True)
        except RankFailure as failure:
            failed += 1
            print(f"FAILED: {case}\n{failure}", flush=True)
    world.close()
    return measured, failed


def measure_runs(models: Path, folder: Path, end: float) -> tuple[list[Measured], int]:
    """Whole runs of `rlflow train`, as far as the time allows, and how many failed."""
    measured, failed = [], 0
    for number, (what, (shape, sections)) in enumerate(WHOLE_RUNS.items()):
        if time.monotonic() > end - RUN_SECONDS:
            print(f"not measured: {what}", flush=True)
            continue
        try:
            measured.append(measure_run(what, shape, sections, models, folder / str(number), end))
            print(f"{what}: {measured[-1].gib}", flush=True)
        except Exception:  # the other run and all that was measured count all the same
            failed += 1
            print(f"FAILED: {what}\n{traceback.format_exc()}", flush=True)
    return measured, failed


def measure_run(
    what: str, shape: str, sections: dict[str, dict[str, Any]], models: Path, folder: Path, until: float
) -> Measured:
    """A run in `folder` of a random model, which is made in `models` if it is not there."""
    prompts, steps = sections["trainer"]["prompts_per_step"], sections["trainer"]["steps"]
    texts = runs.prompts(prompts * steps, sections["rollout"]["max_prompt_length"])
    model = save(models / shape, shape)
    config = runs.write_config(folder, model, texts, {"bridge": {"startup_proof": False}, **sections})
    if not runs.train(config, until=until):
        raise RuntimeError("the run did not end well")
    return finished_run(config.parent / "run", what, shape)


def finished_run(folder: Path, what: str, shape: str | None = None) -> Measured:
    """What a run has measured in its last step, and of what; its shape is found by its model where it is not given."""
    config, _ = interpret(read(folder / "config.yaml"))
    peaks = phases_of(read_records(folder)[-1])
    return Measured(what, shape or shape_of(config.model.path), changed(config), True, peaks)


def given_runs(folders: Sequence[Path]) -> list[Measured]:
    """Those of the finished runs that are there, and whose models have a known shape."""
    found = []
    for folder in folders:
        try:
            found.append(finished_run(folder, f"run in {folder.parent.name}"))
        except (OSError, ValueError, UserError) as error:
            print(f"not taken: {folder}: {error}", flush=True)
    return found


def shape_of(folder: str) -> str:
    """The name of the shape that a model's folder has."""
    found = json.loads((Path(folder) / "config.json").read_text())
    for name, shape in SHAPES.items():
        if all(found.get(key) == value for key, value in asdict(shape).items()):
            return name
    raise ValueError(f"{folder} holds none of {', '.join(SHAPES)}")


def changed(config: Config) -> dict[str, dict[str, Any]]:
    """The keys that are not at their defaults, of those that memory may depend on."""
    sections = {}
    for name in SECTIONS:
        section = getattr(config, name)
        defaults = {item.name: item.default for item in fields(Model if name == "model" else type(section))}
        sections[name] = {
            key: value for key, value in asdict(section).items()
            if defaults[key] is not MISSING and value != defaults[key] and key not in NOT_KEPT
        }  # fmt: skip
    return {name: keys for name, keys in sections.items() if keys}


def report(measured: Sequence[Measured], coefficients: Calibration) -> None:
    """The largest error of each configuration, beside that of the analysis without any measurement."""
    for one in measured:
        peaks = one.peaks(coefficients).items()
        gib = {phase: round(peak.total(coefficients) / calibration.GIB, 2) for phase, peak in peaks}
        emit(
            "memory", f"error, {one.what}", round(one.largest_error(coefficients), 4), target=TARGET,
            more_is_better=False,
            details={
                "measured GiB": one.gib, "predicted GiB": gib,
                "error uncalibrated": round(one.largest_error(Calibration()), 4),
            },
        )  # fmt: skip
    print("coefficients", json.dumps(asdict(coefficients)), flush=True)


def write(path: Path, measured: Sequence[Measured], coefficients: Calibration) -> None:
    """The file that `rlflow.inspect.calibration` reads."""
    content = {
        "measured": describe_machine() | {"command": "python -m tools.gpu.memory --out FOLDER"},
        "coefficients": asdict(coefficients),
        "measurements": [asdict(one) for one in measured],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def check(path: Path) -> int:
    """Show the errors of a calibration on its own measurements, and of each where the others alone were fitted."""
    measured = [Measured(**one) for one in calibration.read(path)["measurements"]]
    if not measured:
        print(f"{path} has no measurements: predictions are those of the analysis")
        return 0
    report(measured, calibration.load_calibration(path))
    errors = {one.what: round(error, 4) for one, error in zip(measured, errors_left_out(measured), strict=True)}
    emit("memory", "largest error, fitted without the configuration", max(errors.values()), target=TARGET,
         more_is_better=False, details=errors)  # fmt: skip
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for calibration.json")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="FOLDER", help="of finished runs")
    parser.add_argument("--models", type=Path, default=runs.MODELS)
    parser.add_argument("--check", type=Path, nargs="?", const=calibration.FILE, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.check is not None:
        try:
            return check(arguments.check)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if arguments.out is None:
        parser.error("--out FOLDER or --check is needed")
    require_gpu()
    end = runs.deadline(arguments.limit_s)
    given = given_runs(arguments.runs)
    measured, failed = measure_engines(CASES, end - len(WHOLE_RUNS) * RUN_SECONDS)
    with tempfile.TemporaryDirectory() as temporary:
        of_runs, more = measure_runs(arguments.models, Path(temporary), end)
    measured += of_runs + given
    coefficients = fit(measured)
    write(arguments.out / "calibration.json", measured, coefficients)
    report(measured, coefficients)
    return 1 if failed + more else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
