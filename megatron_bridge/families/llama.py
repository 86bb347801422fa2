"""Llama 1 to 3.x: grouped-query attention, SwiGLU, RMSNorm, rotary positions with optional scaling, no biases."""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.declare import Family, Parameter, Tensor

Q, K, V = (f"self_attn.{x}_proj.weight" for x in "qkv")
O = "self_attn.o_proj.weight"  # noqa: E741
GATE, UP, DOWN = (f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
NORM_1, NORM_2 = "input_layernorm.weight", "post_attention_layernorm.weight"


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config that no Llama-like family here can honour."""
    faults = [f"{key} is true, which is not supported" for key in ("attention_bias", "mlp_bias") if config.get(key)]
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        faults.append(f"hidden_act is {config['hidden_act']!r}, only 'silu' is supported")
    if config.get("quantization_config"):
        faults.append("quantization_config: quantized weights are not supported")
    return faults


VOCAB = (Parameter("weight", ("weight",)),)
NORM = (Parameter("weight", ("weight",)),)

LLAMA = Family(
    name="llama",
    tensors={
        "vocab": (Tensor("weight", "vocab", "hidden"),),
        "norm": (Tensor("weight", "hidden"),),
        "layer": (
            Tensor(NORM_1, "hidden"),
            Tensor(Q, "kv_heads queries head_dim", "hidden"),
            Tensor(K, "kv_heads one head_dim", "hidden"),
            Tensor(V, "kv_heads one head_dim", "hidden"),
            Tensor(O, "hidden", "kv_heads queries head_dim"),
            Tensor(NORM_2, "hidden"),
            Tensor(GATE, "ffn", "hidden"),
            Tensor(UP, "ffn", "hidden"),
            Tensor(DOWN, "hidden", "ffn"),
        ),
    },
    megatron={
        "vocab": VOCAB,
        "norm": NORM,
        "layer": (
            Parameter("input_layernorm.weight", (NORM_1,)),
            Parameter("self_attention.linear_proj.weight", (O,)),
            Parameter("self_attention.linear_qkv.weight", (Q, K, V), interleave="kv_heads"),
            Parameter("pre_mlp_layernorm.weight", (NORM_2,)),
            Parameter("mlp.linear_fc1.weight", (GATE, UP)),
            Parameter("mlp.linear_fc2.weight", (DOWN,)),
        ),
    },
    vllm={
        "vocab": VOCAB,
        "norm": NORM,
        "layer": (
            Parameter("self_attn.qkv_proj.weight", (Q, K, V)),
            Parameter("self_attn.o_proj.weight", (O,)),
            Parameter("mlp.gate_up_proj.weight", (GATE, UP)),
            Parameter("mlp.down_proj.weight", (DOWN,)),
            Parameter("input_layernorm.weight", (NORM_1,)),
            Parameter("post_attention_layernorm.weight", (NORM_2,)),
        ),
    },
    qkv_bias=False,
    check=unsupported,
)
