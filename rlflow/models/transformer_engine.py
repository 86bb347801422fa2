"""Core attention of the Transformer Engine spec: its own kernels where each sequence sees itself alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from rlflow.models.attention import PackedAttention

if TYPE_CHECKING:
    from rlflow.models.packed import PackedInput


class TransformerEngineAttention(PackedAttention):
    """As the local spec's. Shared prompts, and keys of other context-parallel ranks, are left to torch's kernel."""

    def __init__(
        self, config: Any, *, softmax_scale: float | None = None, pg_collection: Any = None, **where: Any
    ) -> None:
        super().__init__(config, softmax_scale=softmax_scale, pg_collection=pg_collection)
        self.kernel = None
        if self.context_group is None:
            self.kernel = TEDotProductAttention(
                config, softmax_scale=softmax_scale, pg_collection=pg_collection, **where
            )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedInput) -> Tensor:
        if self.kernel is None or packed.seen_rows is not None:
            return super().attend(query, key, value, packed)
        sequences = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
        )
        found = self.kernel(query, key, value, None, AttnMaskType.padding_causal, packed_seq_params=sequences)
        return found.reshape(len(query), -1)
