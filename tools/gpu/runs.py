"""Whole runs of `rlflow train` that measurements are taken from: prompts, configuration, processes, records, options.

What a run is meant to show, and against what it is held, is left to the part that starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlflow.errors import UserError
from rlflow.tracking import read_records
from rlflow.tracking.records import Record
from tools.gpu.processes import run_within
from tools.gpu.report import emit
from tools.make_tiny_model import make_tokenizer

ROOT = Path(__file__).parents[2]
WORDS = ("the", "of", "to", "and", "is", "in", "answer", "number", "plus", "times", "tree", "equals")
"""Of the tokenizer's corpus: each is one token with the blank before it."""
CHARACTER = "7"
"""Whose share of a response is its reward: what random models sample differs in it."""
MODELS = Path(tempfile.gettempdir()) / "rlflow-shapes"
"""Where models are kept for the parts that come after."""
LARGEST_KL = 2e-3
"""Of the log-probs of vLLM and trainer in bfloat16; a wrong weight gives more."""
LAST_LINES, LAST_SECONDS = 40, 15.0

Sections = dict[str, dict[str, Any]]
"""Of a configuration: section → key → value."""


def prompts(count: int, tokens: int) -> list[str]:
    """Texts of exactly so many tokens of `tools.make_tiny_model`'s tokenizer, no two alike."""
    draw = random.Random(0)
    texts = ["".join(f" {word}" for word in draw.choices(WORDS, k=tokens)) for _ in range(count)]
    lengths = {len(ids) for ids in make_tokenizer(0)(texts).input_ids}
    if lengths != {tokens}:
        raise RuntimeError(f"prompts of {tokens} tokens came out with {sorted(lengths)}: WORDS are no single tokens")
    return texts


def merged(sections: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Mapping[str, Any]]) -> Sections:
    """`changes` over `sections`, key by key."""
    names = dict.fromkeys([*sections, *changes])
    return {name: {**sections.get(name, {}), **changes.get(name, {})} for name in names}


def write_config(
    folder: Path, model: Path, texts: Sequence[str], sections: Mapping[str, Mapping[str, Any]],
    rewards: Sequence[Mapping[str, Any]] = (),
) -> Path:  # fmt: skip
    """Write a configuration for a run into `folder`/run over these prompts; `sections` go over its own keys.

    `rewards` come behind the share of `CHARACTER` in a response. An earlier run there is removed: the new one would go
    on from its checkpoint.
    """
    shutil.rmtree(folder / "run", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"prompt": text, "answer": CHARACTER}) + "\n" for text in texts)
    (folder / "train.jsonl").write_text(rows)
    config: Sections = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        # No sample may be left out: what a step takes must not hang on what random models sample.
        "algorithm": {"skip_zero_advantage": False},
        "rollout": {"ignore_eos": True},
        "data": {"train": str(folder / "train.jsonl"), "chat_template": False, "shuffle": False},
        "trainer": {"output_dir": str(folder / "run"), "export": False},
        "tracking": {"tensorboard": False},
    }
    whole: dict[str, Any] = dict(merged(config, sections))
    whole["rewards"] = [{"function": "rlflow.rewards:character_share"}, *rewards]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(whole, sort_keys=False))
    return path


def parser_of_runs(description: str | None, limit_s: float) -> argparse.ArgumentParser:
    """A parser with what all parts that make whole runs take, for `parse_intermixed_args`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the runs, to keep; default: one that goes at the end")
    parser.add_argument("--limit-s", type=float, default=limit_s, help="for all runs together")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    return parser


@contextlib.contextmanager
def folder_of_runs(given: Path | None) -> Iterator[Path]:
    """The folder that is given, or one that goes at the end."""
    with tempfile.TemporaryDirectory() as temporary:
        yield (given or Path(temporary)).resolve()


def succeeds(call: Callable[[], bool]) -> bool:
    """Whether a call returns true; what it raises is printed, for others are to be made all the same."""
    try:
        return call()
    except Exception:
        traceback.print_exc()
        return False


def deadline(limit_s: float) -> float:
    """The end of `limit_s` seconds from now, by `time.monotonic`, less what ending a run and telling of it may take."""
    return time.monotonic() + limit_s - LAST_SECONDS


def train(config: Path, overrides: Iterable[str] = (), *, until: float, processes: int = 1) -> bool:
    """Run `rlflow train` in so many processes to its end or to the deadline `until`; whether it ended well.

    Its output is in train.log beside the configuration; the last lines are printed where it fails. The steps that a run
    out of time has made are recorded.
    """
    log, begin = config.with_name("train.log"), time.monotonic()
    command = train_command(config, overrides, processes)
    status = run_within(command, log, max(1.0, until - begin), folder=ROOT, environment=environment())
    how = "out of time" if status is None else f"ended with {status}"
    print(f"{config.parent.name}: {how} after {time.monotonic() - begin:.0f} s", flush=True)
    if status != 0:
        print("\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]), flush=True)
    return status == 0


def train_command(config: Path, overrides: Iterable[str], processes: int) -> list[str]:
    """The words that start a run."""
    nproc = [] if processes == 1 else ["--nproc", str(processes)]
    return [sys.executable, "-m", "rlflow", "train", str(config), *overrides, *nproc]


def environment() -> dict[str, str]:
    """This process's for a run, without what torchrun gave it, and quiet about the network that may not be there."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"} | kept


def tell(section: str, what: str, config: Path, steps: int, *, largest_kl: float = LARGEST_KL, **details: Any) -> bool:
    """Report how many steps a run has made, with the gap of its log-probs; whether all are there and sound."""
    records = steps_of(config)
    seen = records[-1] if records else {}
    shown = ("mismatch/kl", "actor/grad_norm", "critic/grad_norm", "sync/local_bytes", "time/step", "time/save")
    told = {key: float(f"{seen[key]:.4g}") for key in shown if key in seen}
    peak = max((value for key, value in seen.items() if key.startswith("memory/")), default=math.nan)
    emit(section, what, len(records), "", target=steps, details=told | {"peak_gib": round(peak, 2)} | details)
    return len(records) == steps and all(record.get("mismatch/kl", math.inf) < largest_kl for record in records)


def steps_of(config: Path) -> list[Record]:
    """The records of the training steps that a run has made, in order; [] where it has made none."""
    try:
        records = read_records(config.parent / "run")
    except UserError:  # none was recorded
        return []
    return [record for record in records if "time/step" in record]


def medians(steps: Sequence[Record]) -> Record:
    """Of each metric over the steps behind the first, over the only one where there is no other."""
    counted = steps[1:] or steps
    return {name: statistics.median(step[name] for step in counted if name in step) for name in counted[-1]}


def tell_step(section: str, what: str, steps: Sequence[Record], **rest: Any) -> float:
    """Report a step of a run by its medians, with the time and the peak of each phase; returns its seconds.

    `rest` are further fields of the measurement.
    """
    seen = medians(steps)
    times = {name.removeprefix("time/"): round(value, 3) for name, value in seen.items() if name.startswith("time/")}
    whole, times = times["step"], {name: seconds for name, seconds in times.items() if seconds and name != "step"}
    peaks = {name: round(seen[f"memory/{name}_gib"], 1) for name in times if f"memory/{name}_gib" in seen}
    each = [round(step["time/step"], 2) for step in steps]
    emit(section, what, whole, "s", more_is_better=False, details={"s": times, "gib": peaks, "steps": each}, **rest)
    return whole
