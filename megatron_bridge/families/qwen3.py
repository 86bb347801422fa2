"""Qwen3: Llama's layer with an RMSNorm over each head of q and k."""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.declare import Family
from megatron_bridge.families.llama import ATTENTION, MLP, OUTER, plain, unsupported_or_windowed

QK_NORMS = plain("self_attn.q_norm.weight", "head_dim", megatron="self_attention.q_layernorm.weight") + plain(
    "self_attn.k_norm.weight", "head_dim", megatron="self_attention.k_layernorm.weight"
)


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The norms are part of the family, not of the config."""
    return {"qk_norm": True}


QWEN3 = Family("qwen3", {**OUTER, "layer": ATTENTION + QK_NORMS + MLP}, check=unsupported_or_windowed, facts=facts)
