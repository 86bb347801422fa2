"""What travels with a packed micro-batch through megatron's layers: rotation, attention plan, what the head scores.

megatron hands its `packed_seq_params` unchanged to every layer, so that a subclass of it carries all without a patch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlflow.batch import MicroBatch
from rlflow.models.attention import AttentionInput, AttentionPlan, plan_attention
from rlflow.models.rope import Rope, Ropes, RotationTable, rotation_table


@dataclass
class Scoring:
    """Which rows the head scores, and how."""

    rows: Tensor  # int64 [R], the row whose hidden state predicts
    targets: Tensor  # int64 [R], the token ids that are scored
    temperature: float = 1.0
    with_entropy: bool = False


@dataclass
class PackedInput(PackedSeqParams):
    """megatron's packing parameters and ours.

    `qkv_format` is "thd" for Transformer Engine. The local spec says "sbhd", so that megatron leaves the rows as one
    sequence of a batch of one, and does by itself what differs between sequences.
    """

    rotation: RotationTable = field(default=None)  # type: ignore[assignment]
    plan: AttentionPlan | None = None
    windowed: AttentionInput | None = None  # for layers that have a window
    scoring: Scoring = field(default=None)  # type: ignore[assignment]


def pack_for_local_spec(micro_batch: MicroBatch, ropes: Ropes, dtype: torch.dtype, scoring: Scoring) -> PackedInput:
    """Rotations and attention plans of a micro-batch that lies on its device already."""
    device = micro_batch.token_ids.device
    shares = any(prefix_end > prefix_start for prefix_start, prefix_end, _, _ in micro_batch.segments)
    fused = device.type == "cuda" and dtype != torch.float32 and not shares

    def attention(rope: Rope, window: int) -> AttentionInput:
        plan = None if fused else plan_attention(micro_batch.segments, device, dtype, window)
        return AttentionInput(rotation_table(micro_batch.position_ids, rope, dtype), plan, window)

    everywhere = attention(ropes.plain, 0)
    return PackedInput(
        qkv_format="sbhd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        rotation=everywhere.rotation,
        plan=everywhere.plan,
        windowed=None if ropes.windowed is None else attention(ropes.windowed, ropes.window),
        scoring=scoring,
    )


def pack_for_te_spec(micro_batch: MicroBatch, scoring: Scoring) -> PackedInput:
    """Transformer Engine knows sequences by their bounds and rotates by them; it cannot share prompts."""
    return PackedInput(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
        scoring=scoring,
    )
