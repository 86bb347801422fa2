"""DeepSeek-V3 and models built like it: multi-head latent attention, shared experts, a router with a bias.

Queries may be compressed too; layers whose queries are not are kinds of their own. What predicts further tokens
(`model.layers.{L}` and up, as many as `num_nextn_predict_layers` says) is no part of the model here: checkpoints may
hold it, training and rollout leave it out.
"""

from collections.abc import Mapping
from typing import Any

from megatron_bridge.families.architecture import Experts, Latent, read_scaling
from megatron_bridge.families.declare import Block, Family, Parameter, Tensor
from megatron_bridge.families.experts import ROUTED, router, stacked
from megatron_bridge.families.llama import MLP, NORMS, OUTER, gated, plain, unsupported

DOWN = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
MEGATRON_DOWN = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")
UP_NORMS = {  # Transformer Engine's spec fuses them with the projections that follow
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
DENSE_NORM = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}

KEYS_AND_VALUES = (
    plain("self_attn.kv_a_layernorm.weight", "kv_rank", megatron="self_attention.kv_layernorm.weight")
    + plain("self_attn.kv_b_proj.weight", "heads nope_and_value", "kv_rank", "self_attention.linear_kv_up_proj.weight")
    + plain("self_attn.o_proj.weight", "hidden", "heads value", "self_attention.linear_proj.weight")
)
COMPRESSED = (
    NORMS
    + Block(
        (Tensor(DOWN[0], "query_latent", "hidden"), Tensor(DOWN[1], "kv_rank_and_rope", "hidden")),
        (Parameter(MEGATRON_DOWN[0], DOWN[:1]), Parameter(MEGATRON_DOWN[1], DOWN[1:])),
        (Parameter("self_attn.fused_qkv_a_proj.weight", DOWN),),
    )
    + plain("self_attn.q_a_layernorm.weight", "query_rank", megatron="self_attention.q_layernorm.weight")
    + plain("self_attn.q_b_proj.weight", "heads nope_and_rope", "query_rank", "self_attention.linear_q_up_proj.weight")
    + KEYS_AND_VALUES
)
FULL_QUERIES = (
    NORMS
    + plain("self_attn.q_proj.weight", "heads nope_and_rope", "hidden", "self_attention.linear_q_proj.weight")
    + plain(DOWN[1], "kv_rank_and_rope", "hidden", MEGATRON_DOWN[1])
    + KEYS_AND_VALUES
)
SPARSE = router("mlp.gate.weight") + gated("mlp.shared_experts.", "shared_ffn", "mlp.shared_experts.")


DEFAULTS = {  # transformers', of what a config may leave out
    "q_lora_rank": 1536, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4,
}  # fmt: skip


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Attention and expert sizes, and the kind of each layer: the first ones are dense."""
    config = DEFAULTS | dict(config)
    rank, rope = int(config["q_lora_rank"] or 0), int(config["qk_rope_head_dim"])
    kinds = ("layer", "moe") if rank else ("layer_full_queries", "moe_full_queries")
    layers, width = int(config["num_hidden_layers"]), int(config["moe_intermediate_size"])
    dense = min(int(config["first_k_dense_replace"]), layers)
    latent = Latent(rank, int(config["kv_lora_rank"]), int(config["qk_nope_head_dim"]), rope, int(config["v_head_dim"]))
    experts = Experts(
        count=int(config["n_routed_experts"]),
        per_token=int(config["num_experts_per_tok"]),
        ffn=width,
        shared_ffn=width * int(config["n_shared_experts"]),
        score="sigmoid",
        normalize=bool(config["norm_topk_prob"]),
        scale=float(config["routed_scaling_factor"]),
        score_bias=True,
        groups=int(config["n_group"]),
        groups_per_token=int(config["topk_group"]),
    )
    of_layers = (kinds[0],) * dense + (kinds[1],) * (layers - dense)
    sizes = {"head_dim": rope, "rotary_interleaved": True}  # of what is rotated in a head
    return sizes | {"layer_kinds": of_layers, "latent": latent, "experts": experts}


REQUIRED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True, "moe_layer_freq": 1}
SIZES = (
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts",
    "num_experts_per_tok", "moe_intermediate_size",
)  # fmt: skip


def limits(config: Mapping[str, Any]) -> list[str]:
    """Faults of a config: Llama's, absent sizes, and routers that choose in another way."""
    faults = [f"{key} is {config.get(key)!r}, not a positive integer" for key in SIZES if not config.get(key)]
    for key, value in REQUIRED.items():
        if config.get(key, value) != value:
            faults.append(f"{key} is {config[key]!r}, only {value!r} is supported")
    heads, rope = config.get("num_attention_heads"), config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("num_key_value_heads", heads) != heads:
        faults.append(f"num_key_value_heads is {config['num_key_value_heads']}, not that of the heads, {heads}")
    if (scaling := read_scaling(rope)) is not None and scaling["rope_type"] != "yarn":
        faults.append(f"rope_type is {scaling['rope_type']!r}, only 'yarn' is supported")
    return unsupported(config) + faults


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    {
        **OUTER,
        "layer": COMPRESSED + MLP,
        "moe": COMPRESSED + SPARSE,
        "layer_full_queries": FULL_QUERIES + MLP,
        "moe_full_queries": FULL_QUERIES + SPARSE,
        "experts": ROUTED,
        "router_bias": plain("e_score_correction_bias", "experts", megatron="expert_bias"),
    },
    check=limits,
    facts=facts,
    moe_parts={"experts": "mlp.experts.", "router_bias": "mlp.gate."},
    stacked=stacked(ROUTED),
    transformer_engine={
        "layer": UP_NORMS | DENSE_NORM,
        "moe": UP_NORMS,
        "layer_full_queries": UP_NORMS | DENSE_NORM,
        "moe_full_queries": UP_NORMS,
    },
    prediction=("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
    prediction_copies=("embed_tokens.weight", "shared_head.head.weight"),
)
