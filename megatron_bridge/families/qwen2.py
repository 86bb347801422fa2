"""Qwen2 and Qwen2.5: Llama's layer with a bias on q, k and v."""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families import llama
from megatron_bridge.families.declare import Family, Parameter, Tensor

Q, K, V = (f"self_attn.{x}_proj.bias" for x in "qkv")


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: Llama's, and window attention."""
    faults = llama.unsupported({**config, "attention_bias": False})
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        faults.append("use_sliding_window is true: window attention is not supported")
    return faults


QWEN2 = Family(
    name="qwen2",
    tensors={
        **llama.LLAMA.tensors,
        "layer": (
            *llama.LLAMA.tensors["layer"],
            Tensor(Q, "kv_heads queries head_dim"),
            Tensor(K, "kv_heads one head_dim"),
            Tensor(V, "kv_heads one head_dim"),
        ),
    },
    megatron={
        **llama.LLAMA.megatron,
        "layer": (
            *llama.LLAMA.megatron["layer"],
            Parameter("self_attention.linear_qkv.bias", (Q, K, V), interleave="kv_heads"),
        ),
    },
    vllm={
        **llama.LLAMA.vllm,
        "layer": (*llama.LLAMA.vllm["layer"], Parameter("self_attn.qkv_proj.bias", (Q, K, V))),
    },
    qkv_bias=True,
    check=unsupported,
)
