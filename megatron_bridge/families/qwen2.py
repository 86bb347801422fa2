"""Qwen2 and Qwen2.5: Llama's layer with a bias on q, k and v."""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.declare import Family
from megatron_bridge.families.llama import ATTENTION, MLP, OUTER, qkv, unsupported_or_windowed


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: those of Llama-like families, but for the biases that this one has."""
    return unsupported_or_windowed({**config, "attention_bias": False})


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The biases are part of the family, not of the config."""
    return {"qkv_bias": True}


QWEN2 = Family("qwen2", {**OUTER, "layer": ATTENTION + qkv("bias") + MLP}, check=unsupported, facts=facts)
