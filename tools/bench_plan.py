"""Time and memory of planning a sync of Llama-70B shapes over many ranks, printed as one JSON line.

    python tools/bench_plan.py [--ranks 1024]

The actor is TP8 × PP8 × DP, the rollout TP8 engines on all ranks. A rank plans once and expands its own copies; the
targets are 1 second and 200 MB at 1,024 ranks.
"""

import argparse
import json
import time
import tracemalloc

from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.plan import Plan

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}


def plan_and_expand(ranks: int) -> tuple[Plan, int]:
    """The plan, and the number of copies that rank 0 takes part in."""
    arch = load_architecture(LLAMA_70B)
    actor = MegatronLayout(arch, tp=8, pp=8, dp=ranks // 64)
    plan = Plan(actor, VLLMLayout(arch, 8, tuple(range(ranks))), itemsize=2, ranks_per_node=8)
    return plan, sum(1 for _ in plan.into(0)) + sum(1 for _ in plan.out_of(0))


def main() -> None:
    """Measure time and memory in runs of their own, because tracing memory slows planning."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 64")
    ranks = parser.parse_args().ranks
    begin = time.process_time()
    plan, copies = plan_and_expand(ranks)
    seconds = time.process_time() - begin
    received = [plan.received_bytes(rank) for rank in range(0, ranks, 8)]
    tracemalloc.start()
    plan_and_expand(ranks)
    _, peak = tracemalloc.get_traced_memory()
    print(
        json.dumps(
            {
                "benchmark": "plan llama-70b tp8 pp8 -> tp8",
                "ranks": ranks,
                "cpu_seconds": round(seconds, 3),
                "peak_mb": round(peak / 1e6, 1),
                "copies_of_rank_0": copies,
                "received_gb_largest": round(max(received) / 1e9, 3),
                "rounds_of_256_mib": plan.rounds(256 * 2**20),
            }
        )
    )


if __name__ == "__main__":
    main()
