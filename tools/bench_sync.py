"""Time of a weight sync into a running vLLM: in place by the bridge, and whole tensors through vLLM's `load_weights`.

    torchrun --nproc-per-node 2 -m tools.bench_sync --train pp=2 --rollout tp=2
    torchrun --nproc-per-node 8 -m tools.bench_sync --model Qwen2.5-7B --train tp=4,pp=2 --rollout tp=8

One JSON line. Both ways bring the same random weights from the same layout into the same engine, in turn: the first
moves what is missing into vLLM's parameters, the second brings every tensor whole to each rank that needs a part of it
and lets vLLM's loader cut it. Seconds are the slowest rank's in the best of the runs, CPU-seconds the means over ranks.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge import compat
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layout_options import read_layouts
from megatron_bridge.layouts import MegatronLayout
from megatron_bridge.layouts.megatron import DEFAULT_ORDER
from rlflow import parallel
from rlflow.config.schema import Rollout
from rlflow.rollout.vllm_process import start
from rlflow.rollout.weights import WeightReceiver
from rlflow.rollout.world import vllm_world

SMALL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 16, "hidden_size": 448,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 1536, "vocab_size": 8192,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
"""47 million weights, most of them in layers."""


def main() -> None:
    """Measure on all ranks and print on the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder, of which config.json is read; a small Qwen2")
    parser.add_argument("--train", default="tp=1", metavar="tp=2,pp=2", help="Megatron's layout")
    parser.add_argument("--rollout", default="tp=1", metavar="tp=2", help="vLLM's layout")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    parallel.initialize(600, 0)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            (Path(folder) / "config.json").write_text(json.dumps(SMALL))
        line = measure(args.model or Path(folder), args)
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)
    parallel.shutdown()


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What the JSON line says."""
    arch, dtype = load_architecture(folder), getattr(torch, args.dtype)
    source, engine = read_layouts(arch, args.train, args.rollout, DEFAULT_ORDER)
    config = Rollout(
        tensor_parallel_size=engine.tp, pipeline_parallel_size=engine.pp, expert_parallel=engine.ep,
        max_prompt_length=64, max_response_length=64, max_num_seqs=8, kv_cache_gib=1.0, cuda_graphs=False,
        sleep_level=0,
    )  # fmt: skip
    llm = None
    with vllm_world(engine.ranks, 600) as member:
        if member:
            on_gpu = parallel.device().type == "cuda"
            llm = start(arch, str(folder), config, dtype=args.dtype, timeout_seconds=600, on_gpu=on_gpu)
    receiver = WeightReceiver(engine, llm, dtype, 256 << 20, startup_proof=True)
    tensors = random_weights(arch, source, dtype)
    found: dict[str, Any] = {"proof": receiver.in_place}
    for way, in_place in ("in_place", True), ("loader", False):
        receiver.in_place = in_place
        found[way] = timed(receiver, source, tensors, args.repeat)
    receiver.release()
    if llm is not None:
        compat.stop_vllm(llm)
    size = sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    ratio = found["loader"]["seconds"] / found["in_place"]["seconds"]
    settings = {key: str(value) for key, value in vars(args).items() if value is not None}
    return {**settings, "ranks": dist.get_world_size(), "bytes_on_first_rank": size, **found, "ratio": round(ratio, 2)}


def random_weights(arch: Architecture, layout: MegatronLayout, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """This rank's shards; which values they have does not matter here."""
    params = layout.parameters(dist.get_rank())
    return {name: torch.randn(param.shape, device=parallel.device()).to(dtype) for name, param in params.items()}


def timed(
    receiver: WeightReceiver, layout: MegatronLayout, tensors: dict[str, torch.Tensor], repeat: int
) -> dict[str, float]:
    """Seconds and CPU-seconds of a sync, and the bytes that a rank receives at most."""
    traffic = receiver.receive(layout, tensors)
    best, begin_cpu = float("inf"), time.process_time()
    for _ in range(repeat):
        dist.barrier()
        begin = time.perf_counter()
        receiver.receive(layout, tensors)  # ends when all ranks have theirs
        best = min(best, time.perf_counter() - begin)
    cpu = (time.process_time() - begin_cpu) / repeat
    figures = torch.tensor([best, cpu, float(traffic.received)], dtype=torch.float64, device=parallel.device())
    largest = figures.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.all_reduce(figures)
    return {
        "seconds": round(largest[0].item(), 4),
        "cpu_seconds": round(figures[1].item() / dist.get_world_size(), 4),
        "received_bytes": largest[2].item(),
    }


if __name__ == "__main__":
    main()
