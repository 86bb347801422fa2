"""The layers of a pipeline stage: megatron-core's layer specs with our attention, the local ones with our modules.

What a kind of layer is (dense, or with routed experts) comes from the architecture; what a family has in another way
than Llama comes from its `Variant`, which is looked up here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_bridge.compat import described, mlp_submodules
from megatron_bridge.families import Architecture
from rlflow.models.gemma import GEMMA3
from rlflow.models.glm import GLM4
from rlflow.models.latent import DEEPSEEK_V3
from rlflow.models.norm import leading
from rlflow.models.routing import ExpertRouter
from rlflow.models.self_attention import PackedSelfAttention
from rlflow.models.transformer_engine import TransformerEngineAttention
from rlflow.models.variant import Variant

VARIANTS: Mapping[str, Variant] = {  # by family; whoever is not named is like Llama
    "deepseek_v3": DEEPSEEK_V3,
    "gemma3_text": GEMMA3,
    "glm4": GLM4,
}


def variant_of(arch: Architecture) -> Variant:
    """What this architecture has in another way than Llama."""
    return VARIANTS.get(arch.family, Variant())


def layer_spec(arch: Architecture, transformer_engine: bool) -> Literal["local", "te"]:
    """Whose layers a model has, by megatron-core's names for its specs, where Transformer Engine is used or not.

    With experts they are its own, which multiply in groups. Dense layers take nothing of it but its attention: its
    products are torch's, too, and its norms and SwiGLU pass over memory more often than ours.
    """
    return "te" if transformer_engine and arch.experts is not None else "local"


def block_spec(
    arch: Architecture, config: TransformerConfig, *, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this rank's stage (or of one of its virtual stages) and the final norm; call inside `active`.

    Where the config says so they use Transformer Engine, as `layer_spec` decides.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    layers = [_layer(arch, config, number) for number in range(first, first + count)]
    norm = TENorm if _spec(arch, config) == "te" else variant_of(arch).norm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer(arch: Architecture, config: TransformerConfig, number: int) -> ModuleSpec:
    common: dict[str, Any] = {
        "num_experts": config.num_moe_experts if arch.has_experts(number) else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    variant = variant_of(arch)
    if _spec(arch, config) == "te":
        spec = get_gpt_layer_with_transformer_engine_spec(**common, use_te_activation_func=True)
    else:
        spec = get_gpt_layer_local_spec(**common, normalization="RMSNorm")
        _put_in(spec.submodules, variant, config.qk_layernorm)
    attention = spec.submodules.self_attention
    attention.module = PackedSelfAttention
    uses_kernels = config.transformer_impl == "transformer_engine"
    attention.submodules.core_attention = TransformerEngineAttention if uses_kernels else variant.attention
    if arch.has_experts(number):
        described(spec.submodules.mlp).router = ExpertRouter
    variant.change(spec, arch, config, number)
    return spec


def _spec(arch: Architecture, config: TransformerConfig) -> Literal["local", "te"]:
    return layer_spec(arch, config.transformer_impl == "transformer_engine")


def _put_in(layer: Any, variant: Variant, qk_norm: bool) -> None:
    """Our norms and activation in a layer of the local spec."""
    layer.input_layernorm = layer.pre_mlp_layernorm = leading(variant.norm)  # type: ignore[arg-type]
    if qk_norm:
        attention = layer.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = variant.norm
    for mlp in mlp_submodules(layer.mlp):
        mlp.activation_func = variant.activation
