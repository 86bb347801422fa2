"""What going from training to sampling and back takes on one GPU, and how fast weights are handed over.

    python -m tools.gpu.phase_change [--shapes 0.5b 1.5b] [--limit-s 200]

As in a run with `actor.offload` and `rollout.sleep_level: 2`: gradients and optimizer leave, vLLM's weights wake, the
actor's are written into them and leave too, vLLM's cache wakes; back, vLLM sleeps and all of the actor returns. The
sync's bytes are those it reads and those it writes. A process for each shape, of about 60 s (0.5b) and 75 s (1.5b).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_bridge.families import load_architecture
from rlflow import parallel
from rlflow.algorithms import PolicyObjective
from rlflow.config.schema import Optimizer, Rollout
from rlflow.roles import Engine
from rlflow.rollout.vllm_engine import VLLMRollout
from tools.gpu.alone import alone
from tools.gpu.batches import random_batch
from tools.gpu.machine import require_gpu
from tools.gpu.report import emit
from tools.gpu.runs import MODELS
from tools.gpu.shapes import SHAPES, save
from tools.gpu.timing import now, seconds_of

CYCLES = 4  # the first takes pinned host memory and is not counted
SEQUENCES, LENGTH = 1024, 1280  # whose cache sleeps and wakes
CHANGE_SECONDS = {"1.5b": 1.5}
SYNC_RATE = 3.4e12
"""Bytes a second, read and written, that a hand-over is to reach."""


def measure(folder: Path) -> dict[str, float]:
    """Medians of the seconds of each part, and bytes a second of a sync and of a plain copy of as many bytes."""
    from transformers import AutoTokenizer

    parallel.initialize(120, 0)
    architecture = load_architecture(folder)
    config = Rollout(
        n=8, max_prompt_length=LENGTH // 5, max_response_length=LENGTH - LENGTH // 5, max_num_seqs=SEQUENCES,
        kv_cache_gib=64.0, cuda_graphs=False,
    )  # fmt: skip
    rollout = VLLMRollout(
        architecture, str(folder), config, AutoTokenizer.from_pretrained(folder), dtype="bfloat16", seed=0, prove=False
    )
    engine = Engine(
        architecture, parallel.Grid(), dtype=torch.bfloat16, micro_batch_tokens=16_384, optimizer=Optimizer(),
        offload=True,
    )  # fmt: skip
    engine.load_hf(folder)
    batch = random_batch(architecture.vocab, prompts=2, prompt=1, response=512)
    engine.train_step(batch, PolicyObjective(), temperature=1.0, lr=1e-6)
    rollout.sleep()
    cycles = [cycle(engine, rollout) for _ in range(CYCLES)]
    found = {name: statistics.median(one[name] for one in cycles[1:]) for name in cycles[0]}
    engine.residency.load("weights")
    rollout.wake_weights()
    return found | rates(engine, rollout)


def cycle(engine: Engine, rollout: VLLMRollout) -> dict[str, float]:
    """Into the rollout and back, seconds of each part in order."""
    residency, seconds = engine.residency, {}

    def take(name: str, call: Callable[[], object]) -> None:
        begin = now()
        call()
        seconds[name] = now() - begin

    take("optimizer and gradients away", lambda: residency.offload("gradients", "optimizer"))
    take("wake weights", rollout.wake_weights)
    take("sync", lambda: rollout.sync(engine.layout, engine.parameters_by_name()))
    take("weights away", lambda: residency.offload("weights"))
    take("wake cache", rollout.wake_kv_cache)
    take("sleep", rollout.sleep)
    take("all back", residency.load)
    return seconds


def rates(engine: Engine, rollout: VLLMRollout) -> dict[str, float]:
    """Bytes a second, read and written: of the hand-over on the host's clock, of its kernels, and of a plain copy."""
    tensors = engine.parameters_by_name()
    traffic = [rollout.sync(engine.layout, tensors) for _ in range(8)]
    moved = 2 * traffic[-1].local
    whole = seconds_of(lambda: rollout.sync(engine.layout, tensors), warm_up=2, repeats=9)
    source = torch.empty(traffic[-1].local, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = seconds_of(lambda: target.copy_(source), warm_up=3, repeats=9)
    transfer = statistics.median(one.seconds for one in traffic[2:])
    return {"sync_rate": moved / whole, "transfer_rate": moved / transfer, "copy_rate": moved / copy, "bytes": moved}


def report(name: str, found: dict[str, float]) -> None:
    """The whole change and its parts; the hand-over beside a plain copy."""
    rates_of = {key: found.pop(key) for key in ("sync_rate", "transfer_rate", "copy_rate", "bytes")}
    parts = {part: round(seconds, 4) for part, seconds in found.items()}
    whole = sum(found.values())
    target = CHANGE_SECONDS.get(name)
    emit(
        "phase_change", f"{name} into the rollout and back", round(whole, 3), "s", target=target, more_is_better=False,
        details=parts,
    )  # fmt: skip
    for what in ("transfer", "sync"):
        emit(
            "phase_change", f"{name} {what}, read and written", round(rates_of[f"{what}_rate"] / 1e12, 2), "TB/s",
            target=SYNC_RATE / 1e12 if what == "transfer" else None, bound=round(rates_of["copy_rate"] / 1e12, 2),
            against="a plain copy", details={"GB": round(rates_of["bytes"] / 1e9, 2)},
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=("0.5b", "1.5b"))
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--limit-s", type=float, default=200.0)
    arguments = parser.parse_args()
    require_gpu()
    until, failed = time.monotonic() + arguments.limit_s, False
    for name in arguments.shapes:
        found = alone(name, measure, save(arguments.models / name, name), until=until)
        failed |= found is None
        if found is not None:
            report(name, found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
