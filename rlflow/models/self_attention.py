"""Self-attention of both layer specs: from hidden states to rotated queries and keys, by the positions of the rows.

megatron-core's module is kept with its parameters. What attends to what, and which rotation a layer has, is left to
`attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from rlflow.models.rope import HeadNorms, Heads, RotationTable, rotate, split_and_rotate

if TYPE_CHECKING:
    from rlflow.models.packed import PackedInput


class PackedSelfAttention(SelfAttention):
    """megatron-core's module, where queries and keys leave their projection rotated.

    On a CUDA device one kernel takes queries, keys and values apart, adds the projection's bias, where that has not
    done so, or norms queries and keys, and rotates them; not where key heads are fewer than the ranks.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        on_gpu = self.linear_qkv.weight.device.type == "cuda"
        self.fused = on_gpu and self.config.num_query_groups >= self.config.tensor_model_parallel_size
        self.linear_qkv.skip_bias_add = self.fused and not self.config.qk_layernorm

    def forward(
        self, hidden_states: Tensor, attention_mask: None, *, packed_seq_params: PackedInput, **how: Any
    ) -> tuple[Tensor, None]:
        """[T, 1, H] → [T, 1, H], or this rank's part of the rows each under sequence parallelism."""
        # Self-attention has no states for keys of their own: megatron hands what is given as such to the method below.
        how["key_value_states"] = packed_seq_params
        return super().forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params, **how)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: PackedInput, **how: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, 1, heads, d] and keys [T, 1, kv_heads, d], and values; all rows, heads of this rank."""
        table = self.core_attention.input_of(key_value_states).rotation
        if self.fused:
            return self._split_and_rotate(hidden_states, table)
        query, key, value = super().get_query_key_value_tensors(hidden_states, None, **how)
        return *(rotate(states.squeeze(1), table).unsqueeze(1) for states in (query, key)), value

    def _split_and_rotate(self, hidden_states: Tensor, table: RotationTable) -> tuple[Tensor, Tensor, Tensor]:
        joined, bias = self.linear_qkv(hidden_states)
        groups, channels = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = Heads(groups, self.num_attention_heads_per_partition // groups, channels)
        query, key, value = split_and_rotate(joined.squeeze(1), heads, table, bias=bias, norms=self._head_norms())
        return query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)

    def _head_norms(self) -> HeadNorms | None:
        if not self.config.qk_layernorm:
            return None
        center = float(self.config.layernorm_zero_centered_gamma)
        return HeadNorms(self.q_layernorm.weight, self.k_layernorm.weight, self.config.layernorm_epsilon, center)
