"""Measure one GPU: training steps of each layer spec with their MFU, rollout tokens a second, and the weight sync.

Usage: python -m tools.bench_gpu --out FOLDER [--parts train rollout] [--peak-tflops 989]. A random model in the shape
of Qwen2.5-0.5B is made in FOLDER. Times are medians of synchronised calls after warm-up.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron_bridge.families import Architecture, load_architecture
from rlflow import parallel
from rlflow.algorithms import PolicyObjective
from rlflow.batch import Batch, Prompt, Ragged
from rlflow.config.schema import Optimizer, Rollout
from rlflow.models import has_transformer_engine
from rlflow.roles import Engine
from rlflow.rollout.vllm_engine import VLLMRollout
from tests.gpu.devices import save_qwen

SEQUENCES, PROMPT, RESPONSE = 16, 512, 513  # the last token of a response is no row: 16 × 1,024 = 16,384 rows


def seconds_of(call: Callable[[], object], warm_up: int, repeats: int) -> float:
    """Median of several calls, each until the GPU is done."""
    times = []
    for repeat in range(warm_up + repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if repeat >= warm_up:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def training_flops(arch: Architecture) -> float:
    """6 × weights × rows of the layers, causal attention, and the head for the rows that it scores."""
    rows, scored, length = SEQUENCES * (PROMPT + RESPONSE - 1), SEQUENCES * RESPONSE, PROMPT + RESPONSE - 1
    width = arch.heads * arch.head_dim
    layer = arch.hidden * (2 * width + 2 * arch.kv_heads * arch.head_dim) + 3 * arch.hidden * arch.ffn
    attention = 12 * arch.layers * width * (length / 2) * rows
    return 6.0 * arch.layers * layer * rows + attention + 6.0 * arch.hidden * arch.vocab * scored


def random_batch(arch: Architecture) -> Batch:
    draw = torch.Generator().manual_seed(0)
    prompts, responses = (
        Ragged.from_rows([torch.randint(4, arch.vocab, (size,), generator=draw).tolist() for _ in range(SEQUENCES)])
        for size in (PROMPT, RESPONSE)
    )
    tokens = SEQUENCES * RESPONSE
    return Batch(
        prompts=prompts,
        responses=responses,
        prompt_of=torch.arange(SEQUENCES),
        samples={"group": torch.arange(SEQUENCES), "index": torch.zeros(SEQUENCES, dtype=torch.int64)},
        tokens={
            "mask": torch.ones(tokens, dtype=torch.bool),
            "advantages": torch.randn(tokens, generator=draw),
            "weights": torch.full((tokens,), 1.0 / tokens),
        },
    )


def bench_training(folder: Path, peak_flops: float) -> None:
    arch = load_architecture(folder)
    batch = random_batch(arch).to(parallel.device())
    for transformer_engine in [False] + [True] * has_transformer_engine(torch.bfloat16):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        bench_spec(folder, batch, peak_flops, transformer_engine)


def bench_spec(folder: Path, batch: Batch, peak_flops: float, transformer_engine: bool) -> None:
    """A whole optimizer step, and log-probs alone, under one layer spec."""
    arch = load_architecture(folder)
    engine = Engine(
        arch, parallel.Grid(), dtype=torch.bfloat16, micro_batch_tokens=16_384, optimizer=Optimizer(lr=1e-5),
        share_prompts=False, transformer_engine=transformer_engine,
    )  # fmt: skip
    engine.load_hf(folder)
    step = seconds_of(partial(engine.train_step, batch, PolicyObjective(), temperature=1.0, lr=1e-5), 3, 7)
    score = seconds_of(partial(engine.log_probs, batch, 1.0), 2, 5)
    mfu = training_flops(arch) / step / peak_flops
    print(
        f"training {engine.layout.spec}: step of 16,384 packed tokens {step:.4f} s, MFU {mfu:.3f}, "
        f"log-probs {score:.4f} s, peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB",
        flush=True,
    )


def bench_rollout(folder: Path, sequences: int = 256, length: int = 256) -> None:
    """Rollout with CUDA graphs, then the sync from an engine and the sleep cycle around it."""
    from transformers import AutoTokenizer

    arch = load_architecture(folder)
    config = Rollout(max_prompt_length=64, max_response_length=length, max_num_seqs=sequences, kv_cache_gib=8.0, n=8)
    begin = time.perf_counter()
    rollout = VLLMRollout(
        arch, str(folder), config, AutoTokenizer.from_pretrained(folder), dtype="bfloat16", seed=0, prove=False
    )
    print(f"rollout: vLLM starts in {time.perf_counter() - begin:.1f} s", flush=True)
    engine = Engine(arch, parallel.Grid(), dtype=torch.bfloat16, micro_batch_tokens=16_384)
    engine.load_hf(folder)
    rollout.sync(engine.layout, engine.parameters_by_name())
    draw = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(str(number), torch.randint(4, arch.vocab, (64,), generator=draw).tolist(), {}, None)
        for number in range(sequences // 8)
    ]

    def sample() -> None:
        found = rollout.generate(prompts, n=8, temperature=1.0, step=0, min_tokens=length)
        assert sum(len(one.response_ids) for one in found) == sequences * length

    spent = seconds_of(sample, 1, 3)
    print(f"rollout: {sequences} × {length} tokens in {spent:.2f} s, {sequences * length / spent:,.0f} tokens/s")
    traffic = [rollout.sync(engine.layout, engine.parameters_by_name()) for _ in range(5)]
    sync = statistics.median(one.seconds for one in traffic)
    print(f"sync: {traffic[0].local / 1e9:.3f} GB in place in {sync:.4f} s, {traffic[0].local / sync / 1e9:.0f} GB/s")
    cycle = {
        name: seconds_of(call, 0, 1)
        for name, call in (
            ("sleep", rollout.sleep),
            ("weights", rollout.wake_weights),
            ("cache", rollout.wake_kv_cache),
        )
    }
    print("sleep cycle: " + ", ".join(f"{name} {spent:.3f} s" for name, spent in cycle.items()), flush=True)
    rollout.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the random model")
    parser.add_argument("--parts", nargs="+", choices=("train", "rollout"), default=("rollout", "train"))
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of the GPU, dense bfloat16")
    arguments = parser.parse_args()
    parallel.initialize(300, 0)
    folder = arguments.out
    if not (folder / "config.json").is_file():
        save_qwen(folder)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for part in arguments.parts:
        if part == "train":
            bench_training(folder, arguments.peak_tflops * 1e12)
        else:
            bench_rollout(folder)
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
