"""Core attention by Transformer Engine's kernels, which are faster than torch's for packed sequences.

They also compute responses behind prompts that they share. Keys of other context-parallel ranks are left to torch's
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rlflow.models.attention import PackedAttention
from rlflow.models.seen_rows import seen

if TYPE_CHECKING:
    from rlflow.models.packed import PackedInput


class TransformerEngineAttention(PackedAttention):
    """`PackedAttention` in half precision on a GPU, with other kernels where each rank has whole sequences.

    Not where it must be deterministic: to repeat its backward pass it wants fifty gigabytes for a few thousand tokens.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any) -> None:
        super().__init__(config, softmax_scale=softmax_scale, pg_collection=pg_collection)
        self.kernel: Callable[..., Tensor] | None = None
        if self.context_group is None and not config.deterministic_mode:
            from transformer_engine.pytorch import DotProductAttention

            ranks = config.tensor_model_parallel_size
            # No submodule: it has no weights, and its extra state would be asked of every checkpoint.
            self.kernel = DotProductAttention(
                config.num_attention_heads // ranks, config.kv_channels,
                num_gqa_groups=max(1, config.num_query_groups // ranks), attention_dropout=0.0, qkv_format="thd",
                softmax_scale=self.scale,
            ).__call__  # fmt: skip

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedInput) -> Tensor:
        if self.kernel is None:
            return super().attend(query, key, value, packed)
        mask = "padding_causal"
        if packed.seen_rows is not None:
            mask = "padding_causal_bottom_right"  # the ends of queries and keys are aligned
            key, value = seen(key, value, packed.seen_rows, packed.cu_seqlens_kv)
        return self.kernel(
            query, key, value, attn_mask_type=mask,
            cu_seqlens_q=packed.cu_seqlens_q, cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=_bound(packed.max_seqlen_q), max_seqlen_kv=_bound(packed.max_seqlen_kv),
        )  # fmt: skip


def _bound(length: int) -> int:
    """Of the sequences' lengths, which need not be tight: older versions of cuDNN want a multiple of 64."""
    return -(-length // 64) * 64
