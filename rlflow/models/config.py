"""From the bridge's architecture record to megatron-core's TransformerConfig.

Only what shapes the computation is decided here; which ranks compute what is the grid's business, the layer spec's
modules are chosen in `layers`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_bridge.families import Architecture
from rlflow.errors import UserError
from rlflow.limits import check_limits
from rlflow.models.layers import layer_spec, variant_of
from rlflow.models.weight_gradient import add_weight_gradients
from rlflow.parallel import Grid

Recompute = Literal["none", "selective", "full"]

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

_ALWAYS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "variable_seq_lengths": True,  # packed micro-batches differ in length
    "moe_token_dispatcher_type": "alltoall",  # the only one that allows it, even where there are no experts
    "calculate_per_token_loss": True,  # losses come with global weights: gradients are summed, never averaged
    # Every weight is loaded; zeros rather than noise keep padding rows of the vocabulary clean.
    "init_method": torch.nn.init.zeros_,
    "output_layer_init_method": torch.nn.init.zeros_,
    "embedding_init_method": torch.nn.init.zeros_,
    "persist_layer_norm": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,  # self-attention rotates, by positions that packing decides
    "bias_activation_fusion": False,
    "use_te_activation_func": True,  # despite its name: take the activation from the layer spec
}

# megatron's default, one batch of sends and receives, pairs the wrong tensors where two stages have several chunks: the
# gradients come out wrong, without an error.
_INTERLEAVED: dict[str, Any] = {"overlap_p2p_comm": True, "batch_p2p_comm": False}


def transformer_config(
    arch: Architecture,
    grid: Grid,
    dtype: torch.dtype,
    *,
    stages: tuple[int, ...] | None = None,
    virtual_pipeline: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    deterministic: bool = False,
    transformer_engine: bool = False,
) -> TransformerConfig:
    """The config of a model on a grid; `stages` are the layers of each pipeline stage, by default even.

    With `virtual_pipeline` > 1 each rank holds so many chunks of equally many layers, and `stages` must be even.
    Raises UserError where heads or layers do not fit the grid, and for a model that is not computed here.
    """
    check_limits(arch)
    _check(arch, grid, stages, recompute)
    _check_virtual(arch, grid, virtual_pipeline)
    _check_experts(arch, grid, sequence_parallel)
    variant, spec = variant_of(arch), layer_spec(arch, transformer_engine)
    values: dict[str, Any] = {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "context_parallel_size": grid.cp,
        "sequence_parallel": sequence_parallel and grid.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "deterministic_mode": deterministic,
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "gradient_accumulation_fusion": spec == "local" and add_weight_gradients(dtype),
    }
    if virtual_pipeline > 1:
        values |= _INTERLEAVED | {"virtual_pipeline_model_parallel_size": virtual_pipeline}
    elif stages is not None and grid.pp > 1:
        values |= {"num_layers_in_first_pipeline_stage": stages[0], "num_layers_in_last_pipeline_stage": stages[-1]}
    values |= _ALWAYS | _RECOMPUTE[recompute] | _layer_values(arch) | _expert_values(arch, grid, grouped=spec == "te")
    return variant.config(**(values | variant.values(arch)))


def _layer_values(arch: Architecture) -> dict[str, Any]:
    return {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "num_attention_heads": arch.heads,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "ffn_hidden_size": arch.ffn,
        "layernorm_epsilon": arch.norm_eps,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm,
    }


def _expert_values(arch: Architecture, grid: Grid, *, grouped: bool) -> dict[str, Any]:
    """Routed and shared experts; every token reaches all that its router chose. `expert_load` evens them out."""
    if (experts := arch.experts) is None:
        return {}
    groups = {"moe_router_num_groups": experts.groups, "moe_router_group_topk": experts.groups_per_token}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_layer_freq": [int(arch.has_experts(layer)) for layer in range(arch.layers)],
        "moe_router_topk": experts.per_token,
        "moe_router_score_function": experts.score,
        # The chosen experts' softmax over all experts, divided by its sum, is their softmax among themselves.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalize,
        "moe_router_topk_scaling_factor": experts.scale if experts.scale != 1.0 else None,
        "moe_router_enable_expert_bias": experts.score_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp,
        **(groups if experts.groups > 1 else {}),
    }


def _check(arch: Architecture, grid: Grid, stages: tuple[int, ...] | None, recompute: str) -> None:
    if arch.heads % grid.tp:
        raise UserError("tensor_parallel_size", f"{grid.tp} does not divide the {arch.heads} attention heads")
    if arch.kv_heads % grid.tp and grid.tp % arch.kv_heads:
        message = f"{grid.tp} neither divides the {arch.kv_heads} key/value heads of the model nor is divided by them"
        raise UserError("tensor_parallel_size", message)
    if arch.has_dense_layers and arch.ffn % grid.tp:
        raise UserError("tensor_parallel_size", f"{grid.tp} does not divide the intermediate size {arch.ffn}")
    if stages is None and arch.layers % grid.pp:
        raise UserError(
            "pipeline_parallel_size", f"{arch.layers} layers do not split evenly over {grid.pp} pipeline stages"
        )
    if recompute not in _RECOMPUTE:
        raise UserError("recompute", f"{recompute!r} is none of {', '.join(_RECOMPUTE)}")


def _check_virtual(arch: Architecture, grid: Grid, virtual_pipeline: int) -> None:
    if virtual_pipeline == 1:
        return
    if grid.pp == 1:
        raise UserError("virtual_pipeline_parallel_size", f"{virtual_pipeline} chunks need pipeline_parallel_size > 1")
    if arch.layers % (grid.pp * virtual_pipeline):
        shape = f"{grid.pp} pipeline stages of {virtual_pipeline} chunks"
        raise UserError("virtual_pipeline_parallel_size", f"{arch.layers} layers do not split evenly over {shape}")


def _check_experts(arch: Architecture, grid: Grid, sequence_parallel: bool) -> None:
    if (experts := arch.experts) is None:
        return
    if experts.count % grid.ep:
        raise UserError("expert_parallel_size", f"{grid.ep} does not divide the {experts.count} experts of the model")
    if experts.ffn % grid.etp:
        raise UserError("expert_tensor_parallel_size", f"{grid.etp} does not divide the experts' width {experts.ffn}")
    if grid.tp > 1 and not sequence_parallel:
        raise UserError("sequence_parallel", "must be true: experts behind tensor parallel attention need it")
