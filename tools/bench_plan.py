"""Time and memory of planning syncs over many ranks, one JSON line each.

    python tools/bench_plan.py [--ranks 1024]

Llama-3-70B from TP8 × PP8 × DP into engines of TP8: at most 1 second and 200 MB at 1,024 ranks. DeepSeek-V3 from PP16 ×
EP64 (both tensor sizes 1) into engines of TP32 that hold whole experts: at most 10 seconds; into engines of TP8 that
cut each expert, so that every rank hears from every other, for comparison. Every rank plans, then expands the copies
that it takes part in; both are counted.
"""

import argparse
import json
import time
import tracemalloc
from typing import Any, NamedTuple

from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.placement import natural
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
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}

EP64 = {"pp": 16, "ep": 64, "stages": (4,) * 15 + (1,)}


class Case(NamedTuple):
    """A sync on so many ranks, and the seconds and megabytes that planning it may take."""

    name: str
    model: dict[str, Any]
    grid: dict[str, Any]
    engine: dict[str, Any]
    seconds: float
    megabytes: float


CASES = (
    Case("llama-70b tp8 pp8 -> tp8", LLAMA_70B, {"tp": 8, "pp": 8}, {"tp": 8}, 1.0, 200.0),
    Case("llama-70b tp4 pp2 -> tp8", LLAMA_70B, {"tp": 4, "pp": 2}, {"tp": 8}, 1.0, 200.0),
    Case("deepseek-v3 pp16 ep64 -> tp32 ep32", DEEPSEEK_V3, EP64, {"tp": 32, "ep": True}, 10.0, 1000.0),
    Case("deepseek-v3 pp16 ep64 -> tp8, experts cut", DEEPSEEK_V3, EP64, {"tp": 8}, 10.0, 1000.0),
)


def layouts(case: Case, ranks: int) -> tuple[MegatronLayout, VLLMLayout]:
    """Both on all ranks, the trainer with as many replicas as fill them."""
    arch = load_architecture(case.model)
    grid = {**case.grid, "dp": ranks // (case.grid.get("tp", 1) * case.grid["pp"])}
    return MegatronLayout(arch, **grid), VLLMLayout(arch, ranks=tuple(range(ranks)), **case.engine)


def plan_and_expand(train: MegatronLayout, rollout: VLLMLayout) -> tuple[Plan, int]:
    """The plan, and the number of copies that rank 0 takes part in."""
    plan = Plan(train, rollout, itemsize=2, ranks_per_node=8)
    expanded = (copies for phase in range(plan.phases) for copies in (plan.into(0, phase=phase), plan.out_of(0, phase)))
    return plan, sum(1 for copies in expanded for _ in copies)


def measure(case: Case, ranks: int) -> dict[str, Any]:
    """Time and memory in runs of their own, because tracing memory slows planning."""
    begin = time.process_time()
    plan, copies = plan_and_expand(*layouts(case, ranks))
    seconds = time.process_time() - begin
    received = [plan.received_bytes(rank) for rank in range(ranks)]
    sent = [plan.sent_bytes(rank) for rank in range(ranks)]
    bound = natural(plan.source, plan.target).received_bytes  # type: ignore[arg-type]
    rounds = [plan.rounds(256 * 2**20, phase) for phase in range(plan.phases)]
    across = sum(n for (s, t), n in plan.traffic.items() if s // 8 != t // 8) * 2
    del plan
    tracemalloc.start()
    plan_and_expand(*layouts(case, ranks))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "benchmark": f"plan {case.name}",
        "ranks": ranks,
        "cpu_seconds": round(seconds, 3),
        "cpu_seconds_bound": case.seconds,
        "peak_mb": round(peak / 1e6, 1),
        "peak_mb_bound": case.megabytes,
        "copies_of_rank_0": copies,
        "received_gb_largest": round(max(received) / 1e9, 3),
        "received_to_bound": round(sum(received) / sum(bound), 6),
        "sent_largest_to_mean": round(max(sent) * len(sent) / sum(sent), 3),
        "between_nodes_gb": round(across / 1e9, 1),
        "rounds_of_256_mib": rounds,
    }


def main() -> None:
    """Print one JSON line a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="a multiple of 1,024")
    ranks = parser.parse_args().ranks
    for case in CASES:
        print(json.dumps(measure(case, ranks)), flush=True)


if __name__ == "__main__":
    main()
