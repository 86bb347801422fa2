"""GLM-4: norms before and behind each part, gate and up projection in one tensor, half of each head rotated.

`glm4` are the models of 2025 (GLM-4-0414); `glm`, those of 2024, have no norms behind. The projections of queries, keys
and values have a bias where the config says so, which makes a kind of layer of its own. Megatron's names for the norms
behind are Gemma-3's. vLLM runs `glm` as one of its generic models, which cut the rows of the fused projection into
runs, and take gate and up apart when they have gathered what all ranks make of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_bridge.families.architecture import rotary_part
from megatron_bridge.families.declare import FUSED_NORMS, Block, Family, Parameter, Tensor
from megatron_bridge.families.gemma3 import BEHIND_ATTENTION, BEHIND_MLP
from megatron_bridge.families.llama import NORMS, OUTER, OUTPUT, plain, qkv, unsupported

GATE_UP, DOWN = "mlp.gate_up_proj.weight", "mlp.down_proj.weight"
MLP = Block(
    (Tensor(GATE_UP, "two ffn", "hidden"), Tensor(DOWN, "hidden", "ffn")),
    (Parameter("mlp.linear_fc1.weight", (GATE_UP,)), Parameter("mlp.linear_fc2.weight", (DOWN,))),
    (Parameter(GATE_UP, (GATE_UP,)), Parameter(DOWN, (DOWN,))),
)
GENERIC_MLP = replace(MLP, vllm=(Parameter(GATE_UP, (GATE_UP,), straight=True), Parameter(DOWN, (DOWN,))))
NORMS_BEHIND = plain("post_self_attn_layernorm.weight", "hidden", megatron=BEHIND_ATTENTION) + plain(
    "post_mlp_layernorm.weight", "hidden", megatron=BEHIND_MLP
)
ROTARY_PART, NORM_EPS = 0.5, 1.5625e-07  # what transformers takes where a config is silent


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotated part of the heads, and whether their projections have a bias."""
    biased = bool(config.get("attention_bias", True))
    return {
        "layer_kinds": ("layer_biased" if biased else "layer",) * int(config["num_hidden_layers"]),
        "qkv_bias": biased,
        "norm_eps": float(config.get("rms_norm_eps", NORM_EPS)),
        "rotary_dim": rotated(config),
        "rotary_interleaved": True,
    }


def rotated(config: Mapping[str, Any]) -> int:
    """How many of a head's channels are turned."""
    return int(int(config["head_dim"]) * rotary_part(config, ROTARY_PART))


def limits(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: Llama's, but for the bias and the part that is rotated."""
    rope = {**(config.get("rope_parameters") or {}), "partial_rotary_factor": 1.0}
    faults = unsupported({**config, "attention_bias": False, "partial_rotary_factor": 1.0, "rope_parameters": rope})
    if config.get("head_dim") is None:
        faults.append("head_dim is absent; transformers would take 128: say so")
    elif rotated(config) % 2:
        faults.append(f"partial_rotary_factor turns {rotated(config)} of {config['head_dim']} channels, which is odd")
    return faults


def _family(name: str, layer: Block) -> Family:
    biased = layer + qkv("bias")
    names = {"layer": FUSED_NORMS, "layer_biased": FUSED_NORMS}
    units = {**OUTER, "layer": layer, "layer_biased": biased}
    return Family(name, units, check=limits, facts=facts, transformer_engine=names)


GLM = _family("glm", NORMS + qkv("weight", "hidden") + OUTPUT + GENERIC_MLP)
GLM4 = _family("glm4", NORMS + NORMS_BEHIND + qkv("weight", "hidden") + OUTPUT + MLP)
