"""How far the rollout's log-probs are from the trainer's in bfloat16, and what `rollout.match_trainer` makes of it.

    python -m tools.gpu.numerics [--shape 0.5b] [--limit-s 200]

Random weights; 256 responses of 512 tokens. Δ is the trainer's log-prob of a sampled token minus the rollout's, and
exp Δ the ratio of the first update where the rollout's samples are taken for the trainer's own. Truncated importance
sampling (TIS) weights a token by min(exp Δ, cap); what it leaves is the part above the cap. Three processes, one after
another, of about 50 s each: as it is, with `match_trainer`, and with vLLM's batch-invariant kernels besides, which are
no setting: they replace torch's softmax, mean and bmm for the trainer in the same process, too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.families import load_architecture
from rlflow import parallel
from rlflow.algorithms.importance import truncated_weights
from rlflow.batch import Batch, Prompt, Sample
from rlflow.config.schema import Algorithm, Rollout
from rlflow.roles import Engine
from rlflow.rollout.vllm_engine import VLLMRollout
from tools.gpu.alone import alone
from tools.gpu.machine import require_gpu
from tools.gpu.report import emit
from tools.gpu.runs import MODELS
from tools.gpu.shapes import SHAPES, save
from tools.gpu.timing import seconds_of

PROMPTS, N, PROMPT, RESPONSE = 32, 8, 128, 512
TEMPERATURES = (1.0, 0.7)
PERCENTILES = (50, 90, 99, 99.9, 100)
MICRO_BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Variant:
    """What is done to bring rollout and trainer together."""

    name: str
    match_trainer: bool = False
    batch_invariant: bool = False


VARIANTS = (
    Variant("as it is"),
    Variant("match_trainer", match_trainer=True),
    Variant("match_trainer, batch-invariant kernels", match_trainer=True, batch_invariant=True),
)


def measure(folder: Path, variant: Variant) -> dict[str, Any]:
    """Everything about one variant: what it costs, and by temperature what remains of the gap."""
    from transformers import AutoTokenizer

    if variant.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    parallel.initialize(120, 0)
    architecture = load_architecture(folder)
    config = Rollout(
        n=N, max_prompt_length=PROMPT, max_response_length=RESPONSE, max_num_seqs=PROMPTS * N, kv_cache_gib=16.0,
        ignore_eos=True, match_trainer=variant.match_trainer,
    )  # fmt: skip
    rollout = VLLMRollout(
        architecture, str(folder), config, AutoTokenizer.from_pretrained(folder), dtype="bfloat16", seed=0
    )
    trainer = _engine(folder, torch.bfloat16, exact_logits=variant.match_trainer)
    rollout.sync(trainer.layout, trainer.parameters_by_name())
    reference = _engine(folder, torch.float32)
    found: dict[str, Any] = {"in_place": rollout.weights.in_place}
    for step, temperature in enumerate((*TEMPERATURES, 1.0)):  # the last again, warm
        begin = time.perf_counter()
        samples = rollout.generate(_prompts(architecture.vocab), n=N, temperature=temperature, step=step)
        found["rollout_tokens_per_s"] = round(PROMPTS * N * RESPONSE / (time.perf_counter() - begin))
        found[str(temperature)] = _gap(samples, trainer, reference, temperature)
    batch = _batch(samples)
    found["log_probs_s"] = round(seconds_of(lambda: trainer.log_probs(batch, 1.0), warm_up=1, repeats=3), 4)
    rollout.shutdown()
    return found


def _engine(folder: Path, dtype: torch.dtype, **options: Any) -> Engine:
    engine = Engine(
        load_architecture(folder), parallel.Grid(), dtype=dtype, micro_batch_tokens=MICRO_BATCH_TOKENS, **options
    )
    engine.load_hf(folder)
    return engine


def _prompts(vocab: int) -> list[Prompt]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(4, vocab, (PROMPTS, PROMPT), generator=draw).tolist()
    return [Prompt(str(number), row, {}, None) for number, row in enumerate(rows)]


def _batch(samples: list[Sample]) -> Batch:
    return Batch.from_samples(samples, {str(number): number for number in range(PROMPTS)})


def _gap(samples: list[Sample], trainer: Engine, reference: Engine, temperature: float) -> dict[str, Any]:
    batch = _batch(samples)
    sampled = batch.tokens["rollout_log_probs"].double()
    trained, exact = (engine.log_probs(batch, temperature).cpu().double() for engine in (trainer, reference))
    delta = trained - sampled
    ratio = delta.exp()
    weight = truncated_weights(trained, sampled, Algorithm().importance_cap)
    values = {
        "mean": delta.abs().mean(),
        "max": delta.abs().max(),
        "k3": (ratio - delta - 1).mean(),
        "tis_leaves": (ratio - weight).mean(),
        "tis_cut": (ratio > weight).double().mean(),
        "effective_samples": weight.sum().square() / weight.square().sum() / len(weight),
        "rollout_to_float32": (sampled - exact).abs().mean(),
        "trainer_to_float32": (trained - exact).abs().mean(),
    }
    rounded = {name: float(f"{value.item():.3g}") for name, value in values.items()}
    return rounded | {"ratio_error": _percentiles((ratio - 1).abs())}


def _percentiles(values: Tensor) -> dict[str, float]:
    ordered = values.sort().values
    last = len(ordered) - 1
    return {f"p{percent:g}": float(f"{ordered[round(percent / 100 * last)]:.3g}") for percent in PERCENTILES}


def report(shape: str, variant: Variant, found: dict[str, Any]) -> None:
    """The gap at each temperature, and the cost."""
    cost = {name: found[name] for name in ("rollout_tokens_per_s", "log_probs_s", "in_place")}
    for temperature in TEMPERATURES:
        gap = found[str(temperature)]
        what = f"{shape} {variant.name}, temperature {temperature}: mean |Δ|"
        emit("numerics", what, gap.pop("mean"), "nats", more_is_better=False, details=gap | cost)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--limit-s", type=float, default=200.0)
    arguments = parser.parse_args()
    require_gpu()
    folder = save(arguments.models / arguments.shape, arguments.shape)
    until, failed = time.monotonic() + arguments.limit_s, False
    for variant in VARIANTS:
        found = alone(variant.name, measure, folder, variant, until=until)
        failed |= found is None
        if found is not None:
            report(arguments.shape, variant, found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
