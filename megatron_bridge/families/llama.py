"""Llama 1 to 3.x: grouped-query attention, SwiGLU, RMSNorm, rotary positions with optional scaling, no biases.

Most families share its blocks; they are written so that a family names what it changes.
"""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.architecture import rotary_part
from megatron_bridge.families.declare import Block, Family, Parameter, Tensor


def plain(name: str, rows: str, columns: str = "", megatron: str = "") -> Block:
    """A tensor that each system keeps as a parameter of its own, vLLM under the same name."""
    return Block((Tensor(name, rows, columns),), (Parameter(megatron or name, (name,)),), (Parameter(name, (name,)),))


def qkv(suffix: str, *columns: str) -> Block:
    """Projections of queries, keys and values: Megatron fuses them head by head, vLLM one after another."""
    q, k, v = names = tuple(f"self_attn.{x}_proj.{suffix}" for x in "qkv")
    return Block(
        (
            Tensor(q, "kv_heads queries head_dim", *columns),
            Tensor(k, "kv_heads one head_dim", *columns),
            Tensor(v, "kv_heads one head_dim", *columns),
        ),
        (Parameter(f"self_attention.linear_qkv.{suffix}", names, interleave="kv_heads"),),
        (Parameter(f"self_attn.qkv_proj.{suffix}", names),),
    )


def gated(prefix: str, width: str, megatron: str) -> Block:
    """A gated feed-forward part: gate and up are one parameter in both systems."""
    gate, up, down = (f"{prefix}{x}_proj.weight" for x in ("gate", "up", "down"))
    return Block(
        (Tensor(gate, width, "hidden"), Tensor(up, width, "hidden"), Tensor(down, "hidden", width)),
        (Parameter(f"{megatron}linear_fc1.weight", (gate, up)), Parameter(f"{megatron}linear_fc2.weight", (down,))),
        (Parameter(f"{prefix}gate_up_proj.weight", (gate, up)), Parameter(f"{prefix}down_proj.weight", (down,))),
    )


NORMS = plain("input_layernorm.weight", "hidden") + plain(
    "post_attention_layernorm.weight", "hidden", megatron="pre_mlp_layernorm.weight"
)
OUTPUT = plain(
    "self_attn.o_proj.weight", "hidden", "kv_heads queries head_dim", megatron="self_attention.linear_proj.weight"
)
ATTENTION = NORMS + qkv("weight", "hidden") + OUTPUT
MLP = gated("mlp.", "ffn", "mlp.")
OUTER = {  # what surrounds the layers is the same in all families
    "vocab": plain("weight", "vocab", "hidden"),
    "norm": plain("weight", "hidden"),
    "score": plain("weight", "one", "hidden"),
}


def unsupported(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config that no Llama-like family here can honour."""
    faults = [f"{key} is true, which is not supported" for key in ("attention_bias", "mlp_bias") if config.get(key)]
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        faults.append(f"hidden_act is {config['hidden_act']!r}, only 'silu' is supported")
    if rotary_part(config) != 1.0:
        faults.append(f"partial_rotary_factor is {rotary_part(config)}, only 1 is supported")
    return faults


def unsupported_or_windowed(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: Llama's, and window attention."""
    faults = unsupported(config)
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        faults.append("use_sliding_window is true: window attention is not supported")
    return faults


LLAMA = Family("llama", {**OUTER, "layer": ATTENTION + MLP}, check=unsupported)
