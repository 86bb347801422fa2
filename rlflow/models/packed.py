"""What travels with a packed micro-batch through megatron's layers: rotation, attention plan, what the head scores.

megatron hands its `packed_seq_params` unchanged to every layer, so that a subclass of it carries all without a patch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlflow.batch import MicroBatch
from rlflow.batch.packing import bounds_of, seen_by
from rlflow.batch.zigzag import Segment, context_segments, gathered_places
from rlflow.models.attention import AttentionInput, AttentionPlan, Gathered, plan_attention
from rlflow.models.log_probs import SlopesOf
from rlflow.models.rope import Rope, Ropes, RotationTable, rotation_table
from rlflow.models.routing import ExpertRows


@dataclass
class Scoring:
    """Which rows the head scores, and how."""

    rows: Tensor  # int64 [R], the row whose hidden state predicts
    targets: Tensor  # int64 [R], the token ids that are scored
    temperature: float = 1.0
    with_entropy: bool = False
    slopes_of: SlopesOf | None = None  # what the loss makes of rows, where that is known as soon as they are scored


@dataclass
class PackedInput(PackedSeqParams):
    """megatron's packing parameters and ours.

    `qkv_format` is "sbhd", so that megatron leaves the rows as one sequence of a batch of one, and does by itself what
    differs between sequences. The kernel for packed sequences knows them by their bounds, if it is what computes them.
    """

    rotation: RotationTable = field(default=None)  # type: ignore[assignment]
    plan: AttentionPlan | None = None
    windowed: AttentionInput | None = None  # for layers that have a window
    seen_rows: Tensor | None = None  # int64, for the kernel: the keys of each segment, one after the other; None: all
    scoring: Scoring = field(default=None)  # type: ignore[assignment]
    experts: ExpertRows | None = None  # for routers


def pack_input(micro_batch: MicroBatch, ropes: Ropes, dtype: torch.dtype, scoring: Scoring) -> PackedInput:
    """Rotations and attention plans of a micro-batch that lies on its device already, or of a rank's part of one."""
    device = micro_batch.token_ids.device
    segments, gathered = own_part(micro_batch)
    fused = device.type == "cuda" and dtype != torch.float32

    def attention(rope: Rope, window: int) -> AttentionInput:
        plan = None if fused else plan_attention(segments, device, dtype, window, gathered)
        return AttentionInput(rotation_table(micro_batch.position_ids, rope, dtype), plan, window)

    everywhere = attention(ropes.plain, 0)
    return PackedInput(
        qkv_format="sbhd",
        rotation=everywhere.rotation,
        plan=everywhere.plan,
        windowed=None if ropes.windowed is None else attention(ropes.windowed, ropes.window),
        scoring=scoring,
        **(kernel_bounds(micro_batch, segments, gathered) if fused else {}),
    )


def own_part(micro_batch: MicroBatch) -> tuple[list[Segment], Gathered | None]:
    """The segments whose rows are queries here, and where their keys are when they come from several ranks."""
    rank, size = micro_batch.context_rank, micro_batch.context_size
    if size == 1:
        return micro_batch.segments, None
    places = gathered_places(micro_batch.segments, size).to(micro_batch.token_ids.device)
    return context_segments(micro_batch.segments, rank, size), Gathered(places, rank * len(micro_batch.token_ids))


def kernel_bounds(micro_batch: MicroBatch, segments: list[Segment], gathered: Gathered | None) -> dict[str, Any]:
    """What the kernel for packed sequences must know of queries and keys."""
    if gathered is None:
        return _own_bounds(micro_batch)
    queries = torch.tensor([end - start for *_, start, end in segments])
    rows, keys = seen_by(segments)
    device = gathered.places.device
    return {
        "cu_seqlens_q": bounds_of(queries).to(device),
        "cu_seqlens_kv": bounds_of(keys).to(device),
        "max_seqlen_q": int(queries.max()),
        "max_seqlen_kv": int(keys.max()),
        "seen_rows": gathered.places[rows.to(device)],
    }


def _own_bounds(micro_batch: MicroBatch) -> dict[str, Any]:
    """Sequences that lie whole on a rank, with their prompts or behind them."""
    shares = micro_batch.seen_rows is not None
    return {
        "cu_seqlens_q": micro_batch.cu_seqlens,
        "cu_seqlens_kv": micro_batch.cu_seen if shares else micro_batch.cu_seqlens,
        "max_seqlen_q": micro_batch.max_seqlen,
        "max_seqlen_kv": micro_batch.max_seen if shares else micro_batch.max_seqlen,
        "seen_rows": micro_batch.seen_rows,
    }
