"""Mixtral: Llama's attention, and routed experts in every layer."""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.architecture import Experts
from megatron_bridge.families.declare import Family
from megatron_bridge.families.experts import routed, router, size_faults, stacked
from megatron_bridge.families.llama import ATTENTION, OUTER, unsupported

ROUTED = routed("w1", "w3", "w2")
THETA, NORM_EPS = 1_000_000.0, 1e-5  # what transformers takes where a config is silent


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts as wide as the config's feed-forward part, in every layer."""
    rope = config.get("rope_parameters") or {}
    experts = Experts(
        count=int(config["num_local_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        ffn=int(config["intermediate_size"]),
    )
    return {
        "layer_kinds": ("moe",) * int(config["num_hidden_layers"]),
        "experts": experts,
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or THETA),
        "norm_eps": float(config.get("rms_norm_eps", NORM_EPS)),
    }


def limits(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: Llama's, window attention, and absent sizes."""
    window = config.get("sliding_window")
    faults = [f"sliding_window is {window}: it is not supported"] if window else []
    return unsupported(config) + faults + size_faults(config, "num_local_experts")


MIXTRAL = Family(
    "mixtral",
    {
        **OUTER,
        "moe": ATTENTION + router("block_sparse_moe.gate.weight"),
        "experts": ROUTED,
    },
    check=limits,
    facts=facts,
    moe_parts={"experts": "block_sparse_moe.experts."},
    stacked=stacked(ROUTED),
    stacked_prefix=("block_sparse_moe.", "mlp."),
)
