"""The trainer's engine on one GPU: MFU of steps and log-prob passes by shape, attention kernels and CUDA graphs.

    python -m tools.gpu.training --shapes 0.5b 1.5b 7b8 [--attention te torch] [--cuda-graphs on off]

A micro-batch is 16 packed sequences of 1,024 tokens, all of whose rows are scored, by default from logits that are
computed once. MFU is (6·N·T + attention) over time and 989 TFLOP/s with all weights in N, for log-probs a third of the
operations; `details` have it without an embedding that is not the head, too. Every variant has a process of its own.
All take about 5 minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron_bridge.families import load_architecture
from rlflow import parallel
from rlflow.algorithms import PolicyObjective
from rlflow.config.schema import Optimizer
from rlflow.models import has_transformer_engine
from rlflow.roles import Engine
from tools.gpu.alone import Attempts
from tools.gpu.machine import require_gpu
from tools.gpu.report import GIB, emit
from tools.gpu.runs import MODELS
from tools.gpu.shapes import PEAK_FLOPS, SHAPES, TIMED, Shape, save
from tools.gpu.steps import LEARNING_RATE, STEPS, Work, loss_of, most_memory, speed_of, without_optimizer
from tools.gpu.timing import GpuWork, gpu_work, seconds_of

TARGETS = {
    "te": {"0.5b": 0.45, "1.5b": 0.55, "7b8": 0.75},
    "torch": {"0.5b": 0.30, "1.5b": 0.50, "7b8": 0.65},
}
LARGEST_DIFFERENCE = 0.02  # between variants' losses after these steps, in nats; the loss begins near 12
MATRIX = 8192


@dataclass(frozen=True)
class Variant:
    """One way to compute a shape."""

    attention: str  # whose kernels: "te", Transformer Engine's, or "torch"
    cuda_graphs: bool
    logprob_chunk_tokens: int

    def __str__(self) -> str:
        chunks = f" chunks of {self.logprob_chunk_tokens}" if self.logprob_chunk_tokens < Work().rows else ""
        return f"{self.attention}{' graphs' if self.cuda_graphs else ''}{chunks}"


@dataclass(frozen=True)
class Timing:
    """What one variant took: seconds of medians, bytes, nats."""

    forward_backward: float  # of one micro-batch, in a step without its optimizer
    whole_step: float  # all micro-batches, clipping and AdamW included
    log_probs: float  # of all micro-batches
    gpu: GpuWork | None  # of the forward and backward
    peak: int  # of tensors, those that graphs hold while they are captured included
    reserved: int  # the most that torch took of the GPU for them
    product: float | None  # operations a second of a large product, the most that layers can reach
    loss_before: float  # mean of −log-probs
    loss_after: float  # after `STEPS` steps on one micro-batch


def measure(folder: Path, shape: Shape, variant: Variant, work: Work) -> Timing:
    """Everything about a variant, on the random model in `folder`, which is written if need be."""
    parallel.initialize(120, 0)
    save(folder, shape)
    engine = Engine(
        load_architecture(folder), parallel.Grid(), dtype=torch.bfloat16, micro_batch_tokens=work.rows,
        optimizer=Optimizer(lr=LEARNING_RATE), share_prompts=False, logprob_chunk_tokens=variant.logprob_chunk_tokens,
        transformer_engine=variant.attention == "te", cuda_graphs=variant.cuda_graphs,
    )  # fmt: skip
    engine.load_hf(folder)
    one, several = (work.batch(shape, count) for count in (1, work.micro_batches))
    train = partial(engine.train_step, objective=PolicyObjective(), lr=LEARNING_RATE)
    loss_before = loss_of(engine, one)
    for _ in range(STEPS):
        train(one)
    loss_after = loss_of(engine, one)
    with without_optimizer(engine):
        forward_backward = seconds_of(partial(train, one), warm_up=2, repeats=7)
    whole_step = seconds_of(partial(train, several), warm_up=1, repeats=3)
    log_probs = seconds_of(partial(engine.log_probs, several, 1.0), warm_up=1, repeats=3)
    peak, reserved = most_memory()
    with without_optimizer(engine):
        gpu = gpu_work(partial(train, one))  # last: the profiler slows down what comes after it
    return Timing(
        forward_backward, whole_step, log_probs, gpu, peak, reserved, _product_rate(), loss_before, loss_after
    )  # fmt: skip


def _product_rate() -> float | None:
    """Of random matrices: zeros are multiplied faster."""
    if not torch.cuda.is_available():
        return None
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2.0 * MATRIX**3 / seconds_of(lambda: torch.mm(left, right), warm_up=5, repeats=21)


def report(name: str, variant: Variant, timing: Timing, work: Work, *, judged: bool) -> None:
    """Three measurements of a variant; `judged` tells whether targets are meant for it."""
    target = TARGETS[variant.attention][name] if judged else None
    bound = None if timing.product is None else round(timing.product / PEAK_FLOPS, 3)
    several = work.micro_batches
    optimizer = {"optimizer_s": round(timing.whole_step - several * timing.forward_backward, 4)}
    for what, passes, micro_batches, seconds, wanted, details in (
        ("", 3, 1, timing.forward_backward, target, _details(timing)),
        (" whole step", 3, several, timing.whole_step, None, optimizer),
        (" log-probs", 1, several, timing.log_probs, target, {}),
    ):
        mfu, speed = speed_of(SHAPES[name], work.length, micro_batches * work.rows, passes, seconds)
        emit(
            "training", f"MFU {name} {variant}{what}", mfu, target=wanted, bound=bound,
            against=f"bf16 product of {MATRIX}³", details=speed | details,
        )  # fmt: skip
    if timing.gpu is not None:
        print(f"costliest kernels of {name} {variant}:", *timing.gpu.costliest, sep="\n", flush=True)


def _details(timing: Timing) -> dict[str, float]:
    """What the GPU did in a forward and backward, memory, and what was learned."""
    kernels: dict[str, float] = {}
    if timing.gpu is not None:
        busy = timing.gpu.busy / timing.forward_backward
        kernels = {"kernels": timing.gpu.kernels, "busy": round(busy, 3)}
    memory = {"peak_gib": round(timing.peak / GIB, 2), "reserved_gib": round(timing.reserved / GIB, 2)}
    return kernels | memory | {"loss": round(timing.loss_after, 4)}


def report_losses(name: str, losses: dict[str, float]) -> None:
    """Whether all variants of a shape learned the same."""
    what = f"{name} loss after {STEPS} steps, largest difference"
    difference = max(losses.values()) - min(losses.values())
    details = {variant: round(loss, 5) for variant, loss in losses.items()}
    emit("training", what, difference, "nats", target=LARGEST_DIFFERENCE, more_is_better=False, details=details)


def bench(name: str, folder: Path, variants: list[Variant], attempts: Attempts) -> None:
    """All variants of a shape; targets are meant for those with CUDA graphs, where any have them."""
    work, losses = Work(), {}
    with_graphs = any(variant.cuda_graphs for variant in variants)
    for variant in variants:
        found = attempts(f"{name} {variant}", partial(measure, folder, SHAPES[name], variant, work))
        if found is not None:
            (timing,) = found
            report(name, variant, timing, work, judged=variant.cuda_graphs == with_graphs)
            losses[str(variant)] = timing.loss_after
    if losses:
        report_losses(name, losses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=TIMED, default=TIMED)
    parser.add_argument("--attention", nargs="+", choices=TARGETS, help="default: te where it is installed, and torch")
    parser.add_argument("--cuda-graphs", nargs="+", choices=("on", "off"), default=("on", "off"))
    parser.add_argument("--logprob-chunk-tokens", nargs="+", type=int, default=[Work().rows])
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--variant-limit-s", type=float, default=100.0)
    arguments = parser.parse_args()
    require_gpu()
    kernels = arguments.attention or [*["te"] * has_transformer_engine(torch.bfloat16), "torch"]
    variants = [
        Variant(attention, graphs == "on", chunk)
        for attention in kernels
        for graphs in arguments.cuda_graphs
        for chunk in arguments.logprob_chunk_tokens
    ]
    attempts = Attempts(len(arguments.shapes) * len(variants), arguments.variant_limit_s)
    for name in arguments.shapes:
        bench(name, arguments.models / name, variants, attempts)
    attempts.close()
    return 1 if attempts.failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
