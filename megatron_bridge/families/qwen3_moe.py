"""Qwen3-MoE: Qwen3's attention, and layers of routed experts, between which some may be dense."""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.architecture import Experts
from megatron_bridge.families.declare import Family
from megatron_bridge.families.experts import ROUTED, router, size_faults, stacked
from megatron_bridge.families.llama import ATTENTION, MLP, OUTER, unsupported_or_windowed
from megatron_bridge.families.qwen3 import QK_NORMS


def count_key(config: Mapping[str, Any]) -> str:
    """The config's key for the number of experts; transformers 5 writes the longer one."""
    return "num_experts" if "num_experts" in config else "num_local_experts"


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts, and which layers have them."""
    dense, step = config.get("mlp_only_layers") or (), int(config.get("decoder_sparse_step", 1))
    kinds = [
        "moe" if i not in dense and (i + 1) % step == 0 else "layer" for i in range(int(config["num_hidden_layers"]))
    ]
    experts = Experts(
        count=int(config[count_key(config)]),
        per_token=int(config["num_experts_per_tok"]),
        ffn=int(config["moe_intermediate_size"]),
        normalize=bool(config.get("norm_topk_prob", False)),
    )
    return {"qk_norm": True, "layer_kinds": tuple(kinds), "experts": experts}


def limits(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: Llama's, window attention, and absent sizes."""
    return unsupported_or_windowed(config) + size_faults(config, count_key(config), "moe_intermediate_size")


QWEN3_MOE = Family(
    "qwen3_moe",
    {
        **OUTER,
        "layer": ATTENTION + QK_NORMS + MLP,
        "moe": ATTENTION + QK_NORMS + router("mlp.gate.weight"),
        "experts": ROUTED,
    },
    check=limits,
    facts=facts,
    stacked=stacked(ROUTED),
)
