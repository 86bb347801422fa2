"""Gemma-3, the text models: norms before and behind each part, windows in most layers, two bases of rotation.

Norms are stored as differences from one, everywhere: a model on Megatron must add the one itself, and nothing is
computed on the way. The norms behind attention and feed-forward part have no place in megatron-core's layer; they are
named as in NVIDIA's Megatron-Bridge, as part of the projection whose output they see.
"""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.architecture import read_scaling
from megatron_bridge.families.declare import Family
from megatron_bridge.families.llama import MLP, OUTER, OUTPUT, plain, qkv, unsupported
from megatron_bridge.families.qwen3 import QK_NORMS

BEHIND_ATTENTION = "self_attention.linear_proj.post_layernorm.weight"  # Megatron's names of both norms
BEHIND_MLP = "mlp.linear_fc2.post_layernorm.weight"
WINDOWED, EVERYWHERE = "sliding_attention", "full_attention"
PERIOD = 6  # where a config lists no layer types, each so many-th layer sees everything
THETA, WINDOW_THETA = 1_000_000.0, 10_000.0
WINDOW, HEAD_DIM, QUERY_SCALAR = 4096, 256, 256  # what transformers takes where a config is silent

NORMS = (
    plain("input_layernorm.weight", "hidden")
    + plain("post_attention_layernorm.weight", "hidden", megatron=BEHIND_ATTENTION)
    + plain("pre_feedforward_layernorm.weight", "hidden", megatron="pre_mlp_layernorm.weight")
    + plain("post_feedforward_layernorm.weight", "hidden", megatron=BEHIND_MLP)
)


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Windows and rotations, from the form with `rope_parameters` or the older one, and the constants of the family."""
    layers, period = int(config["num_hidden_layers"]), int(config.get("sliding_window_pattern") or PERIOD)
    types = config.get("layer_types") or [
        EVERYWHERE if (layer + 1) % period == 0 else WINDOWED for layer in range(layers)
    ]
    window = int(config.get("sliding_window") or WINDOW)
    rope, local = _rope(config)
    return {
        "tied": bool(config.get("tie_word_embeddings", True)),
        "qk_norm": True,
        "activation": "gelu_tanh",
        "attention_scale": float(config.get("query_pre_attn_scalar") or QUERY_SCALAR) ** -0.5,
        "windows": tuple(window if kind == WINDOWED else 0 for kind in types),
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or THETA),
        "rope_scaling": read_scaling(rope),
        "window_rope_theta": float(local.get("rope_theta") or config.get("rope_local_base_freq") or WINDOW_THETA),
    }


def _rope(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the rotation in layers without a window and in those with one."""
    both = config.get("rope_parameters") or {}
    return {**(both.get(EVERYWHERE) or {}), **(config.get("rope_scaling") or {})}, both.get(WINDOWED) or {}


def limits(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: Llama's, other activations, and what later or other Gemmas do."""
    faults = unsupported({**config, "hidden_act": "silu"})
    activation = config.get("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        faults.append(f"hidden_activation is {activation!r}, only 'gelu_pytorch_tanh' is supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            faults.append(f"{key} is {config[key]}, which is not supported")
    types = config.get("layer_types") or ()
    if types and (len(types) != config.get("num_hidden_layers") or not set(types) <= {WINDOWED, EVERYWHERE}):
        faults.append(f"layer_types does not say {WINDOWED!r} or {EVERYWHERE!r} for each of the layers")
    if read_scaling(_rope(config)[1]) is not None:
        faults.append(f"rope_parameters: scaling of {WINDOWED} is not supported")
    if config.get("head_dim") is None:
        faults.append(f"head_dim is absent; transformers would take {HEAD_DIM}: say so")
    return faults


GEMMA3 = Family(
    "gemma3_text",
    {**OUTER, "layer": NORMS + qkv("weight", "hidden") + QK_NORMS + OUTPUT + MLP},
    check=limits,
    facts=facts,
)
