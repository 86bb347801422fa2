"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over packed rows, positions explicit.

megatron-core's module is kept with its parameters; what is done otherwise is how queries, keys and values come of them.
A part of each head, and one part of the keys that all heads share, is rotated; values have a size of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor, nn

from megatron_bridge.compat import mend_latent_attention
from megatron_bridge.families import Architecture
from rlflow.models.norm import RMSNorm
from rlflow.models.rope import rotate
from rlflow.models.variant import Variant

mend_latent_attention()

LATENT_EPS = 1e-6
"""Of the norms of latents in the published model and in transformers, whatever `rms_norm_eps` says of the others."""

CHOSEN = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")


class LatentNorm(RMSNorm):
    """RMSNorm of a latent."""

    def __init__(self, config: Any, hidden_size: int, eps: float = LATENT_EPS, **_: Any) -> None:
        super().__init__(config, hidden_size, LATENT_EPS)


class LatentSelfAttention(MLASelfAttention):
    """megatron-core's module for its local layer spec, whose projections to latents are cut over the TP group."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """megatron-core 0.19 would choose these anew, and norm what queries that are not compressed are made of."""
        return {name: getattr(submodules, name) for name in CHOSEN}

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: Any = None,
        inference_context: None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys [T, 1, heads, nope + rope], values [T, 1, heads, value], and the two latents.

        hidden_states: [T, 1, H], or this rank's part of the rows under sequence parallelism, as latents are then too.
        """
        table = packed_seq_params.rotation
        queries = hidden_states
        if self.config.q_lora_rank is not None:
            queries = self.q_layernorm(self._part(self._whole(self.linear_q_down_proj, hidden_states)))
        down = self._whole(self.linear_kv_down_proj, hidden_states)
        latent, shared = down.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], -1)
        latent = self.kv_layernorm(self._part(latent))
        # Each rank's heads see the shared part of the keys, so that its gradient is their sum over the ranks.
        shared = copy_to_tensor_model_parallel_region(shared, group=self.pg_collection.tp)

        project = self.linear_q_proj if self.config.q_lora_rank is None else self.linear_q_up_proj
        query = self._heads(project(queries)[0])
        nope, rope = query.split([self.config.qk_head_dim, self.config.qk_pos_emb_head_dim], -1)
        query = torch.cat([nope, rotate(rope, table)], -1)
        keys, value = self._heads(self.linear_kv_up_proj(latent)[0]).split(
            [self.config.qk_head_dim, self.config.v_head_dim], -1
        )
        key = torch.cat([keys, rotate(shared, table).expand(-1, keys.shape[1], -1)], -1)
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), queries, latent

    def _whole(self, projection: nn.Module, states: Tensor) -> Tensor:
        """All rows and channels of a projection to a latent: [T, 1, channels]."""
        return gather_from_tensor_model_parallel_region(projection(states)[0], group=self.pg_collection.tp)

    def _part(self, states: Tensor) -> Tensor:
        """This rank's rows under sequence parallelism, as the next projection gathers them."""
        if not self.config.sequence_parallel:
            return states
        return scatter_to_sequence_parallel_region(states, group=self.pg_collection.tp)

    def _heads(self, states: Tensor) -> Tensor:
        """[T, 1, heads · d] → [T, heads, d]."""
        return states.squeeze(1).unflatten(-1, (self.num_attention_heads_per_partition, -1))


def _values(arch: Architecture) -> dict[str, Any]:
    latent, scaling = arch.latent, arch.rope_scaling or {}
    assert latent is not None
    return {
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        "qk_layernorm": True,
        "rope_type": "rope",  # positions come with the micro-batch; these two make the scale of the softmax
        "rotary_scaling_factor": float(scaling.get("factor") or 1.0),
        "mscale_all_dim": float(scaling.get("mscale_all_dim") or 0.0),
    }


def _change(layer: ModuleSpec, arch: Architecture, config: TransformerConfig, number: int) -> None:
    attention = layer.submodules.self_attention
    attention.module = LatentSelfAttention
    attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm


DEEPSEEK_V3 = Variant(
    values=_values,
    config=MLATransformerConfig,
    change=_change,
    transformer_engine=False,
)
