"""Time of a weight sync, Megatron layout to vLLM layout, on tensors alone; checked bit by bit; one JSON line.

    torchrun --nproc-per-node 2 tools/bench_transfer.py --source pp --layers 8

The actor is TP or PP over all ranks, the rollout one TP engine over all ranks (`--engine tp`) or one engine a rank
(`--engine replicas`). Shapes are Qwen2.5-1.5B's, weights bfloat16; NCCL where there is a GPU, else gloo. The bound is
what the slowest rank must receive; `copy_gb_s` is what plain copies of one large tensor reach here.
"""

import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

from megatron_bridge.execute import connect
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout

QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
DTYPE = torch.bfloat16


def tensors(layout: Layout, device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's tensors, filled with what no weight is."""
    params = layout.parameters(dist.get_rank())
    return {name: torch.full(p.shape, torch.nan, dtype=DTYPE, device=device) for name, p in params.items()}


def checkpoint(layout: HFLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """The same random weights on every rank."""
    generator = torch.Generator(device).manual_seed(0)
    return {name: tensor.normal_(generator=generator) for name, tensor in tensors(layout, device).items()}


def copy_speed(device: torch.device) -> float:
    """GB/s, read + written, of one large copy."""
    a, b = torch.ones(2, 2**27, dtype=DTYPE, device=device)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        b.copy_(a)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return 2 * a.nbytes / min(seconds) / 1e9


def main() -> None:
    """Plan, check and time a sync on the processes that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", choices=["tp", "pp", "dp"], default="pp")
    parser.add_argument("--engine", choices=["tp", "replicas"], default="tp")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--bucket-mib", type=int, default=256)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = tuple(range(world))
    arch = load_architecture({**QWEN_1_5B, "num_hidden_layers": options.layers})
    sizes = {"tp": 1, "pp": 1, "dp": 1} | {options.source: world}
    actor = MegatronLayout(arch, sizes["tp"], sizes["pp"], sizes["dp"])
    engine = VLLMLayout(arch, world if options.engine == "tp" else 1, ranks)
    files = HFLayout(arch, ranks)
    weights, held, filled, expected = checkpoint(files, device), *(tensors(x, device) for x in (actor, engine, engine))
    settings = {"rank": rank, "dtype": DTYPE, "bucket_bytes": options.bucket_mib * 2**20}
    for layout, target in (actor, held), (engine, expected):
        connect(files, weights, layout, target, **settings).run()
    sync = connect(actor, held, engine, filled, **settings)
    runs = [sync.run() for _ in range(6)]
    equal = all(torch.equal(filled[name], expected[name]) for name in expected)
    seconds = statistics.median(run.seconds for run in runs[1:])
    report = {
        "benchmark": f"sync {options.source}{world} -> {options.engine}",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "rank": rank,
        "bitwise": equal,
        "model_gb": round(sum(tensor.nbytes for tensor in weights.values()) / 1e9, 3),
        "local_gb": round(runs[0].local / 1e9, 3),
        "received_gb": round(runs[0].received / 1e9, 3),
        "rounds": sync.rounds,
        "seconds": round(seconds, 4),
        "filled_gb_s": round((runs[0].local + runs[0].received) / seconds / 1e9, 1),
        "received_gb_s": round(runs[0].received / seconds / 1e9, 1),
        "copy_gb_s": round(copy_speed(device), 1),
    }
    reports: list[dict | None] = [None] * world
    dist.all_gather_object(reports, report)
    if rank == 0:
        print(json.dumps(max((found for found in reports if found), key=lambda found: found["seconds"])))
    dist.destroy_process_group()
    if not equal:
        raise SystemExit("the synced weights differ")


if __name__ == "__main__":
    main()
