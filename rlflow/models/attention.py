"""Core attention over a packed micro-batch, where responses may share the rows of their prompt.

Rows are gathered into a few batches of segments of similar length and each batch is one fused attention call, so that
the cost in Python does not grow with the number of sequences. On CUDA the kernel for packed sequences computes all of
them, in anything but float32. Queries and keys come rotated already, by the table that is chosen here. A
context-parallel rank computes the queries of its own rows, over keys and values that it gathers from all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_bridge.compat import allow_grouped_queries
from rlflow.batch.zigzag import Segment
from rlflow.models.context import gather_rows
from rlflow.models.rope import RotationTable
from rlflow.models.seen_rows import seen
from rlflow.models.short_attention import attend_short

if TYPE_CHECKING:
    from rlflow.models.packed import PackedInput

SHORTEST_IN_BATCH = 0.7
"""Segments shorter than this part of a batch's longest start a new batch: padding is computed, calls cost time."""

SHORT_ON_CPU = 128
"""Most keys for which a CPU computes whole segments in bfloat16; what is kept for the backward pass grows with them."""

LONG_ON_CPU = 512
"""Keys from which a CPU's bfloat16 kernel is faster than its float32 one; for short segments it is ten times slower."""


@dataclass
class SegmentBatch:
    """B segments that one attention call computes, padded to L own rows and P rows of prefix.

    Padding repeats a segment's first row. Where there is no mask the call is causal and padding, being last, is seen by
    nobody; otherwise `mask` says what each row may see.
    """

    rows: Tensor  # int64 [B · L], of the queries
    is_own: Tensor  # bool [B · L], False for padding
    seen_rows: Tensor  # int64 [B · (P + L)], of keys and values: the prefix, then the segment itself
    size: int  # B
    mask: Tensor | None  # [B, 1, L, P + L]: 0 where visible, −inf elsewhere, in `dtype`
    dtype: torch.dtype  # of the computation, of a short one's softmax
    is_short: bool  # to be computed by `attend_short`; it has a mask then


@dataclass
class AttentionPlan:
    """How to compute the attention of one micro-batch; made once, used by every layer."""

    batches: list[SegmentBatch]
    place: Tensor  # int64 [rows], where the row lies in the concatenated outputs of all batches


class Gathered(NamedTuple):
    """Where the rows of a micro-batch are whose parts lie on several context-parallel ranks."""

    places: Tensor  # int64 [T], of each row in what is gathered: one rank's rows after the other's
    first: int  # place of the first row of this rank


class AttentionInput(NamedTuple):
    """What the attention of a layer needs to know of a micro-batch."""

    rotation: RotationTable
    plan: AttentionPlan | None  # None: by the kernel for packed sequences
    window: int = 0


def plan_attention(
    segments: Sequence[Segment],
    device: torch.device,
    dtype: torch.dtype,
    window: int = 0,
    gathered: Gathered | None = None,
) -> AttentionPlan:
    """Batch the segments of a micro-batch; they must cover the rows 0 … T − 1 once.

    With a `window` each row sees so many rows at most: itself and those before it, of its prefix too. With `gathered`
    the segments are those of one context-parallel rank, and cover its rows.
    """
    if window:
        segments = _cut_to_windows(segments, window)
    batches = [_make_batch(group, device, dtype, window) for group in _similar(segments)]
    if gathered is not None:
        batches = [_on_rank(batch, gathered) for batch in batches]
    rows = torch.cat([batch.rows for batch in batches])
    is_own = torch.cat([batch.is_own for batch in batches])
    place = torch.empty(sum(end - start for *_, start, end in segments), dtype=torch.int64, device=device)
    place[rows[is_own]] = torch.arange(len(rows), device=device)[is_own]
    return AttentionPlan(batches, place)


def _cut_to_windows(segments: Sequence[Segment], window: int) -> list[Segment]:
    """The same rows in segments no longer than a window, each with the rows before it that it may see as its prefix."""
    parts: list[Segment] = []
    for prefix_start, prefix_end, start, end in segments:
        parts.append((max(prefix_start, prefix_end - window + 1), prefix_end, start, min(end, start + window)))
        parts += [(at - window + 1, at, at, min(end, at + window)) for at in range(start + window, end, window)]
    return parts


def _similar(segments: Sequence[Segment]) -> Iterable[list[Segment]]:
    """Groups of segments of similar length, those with a prefix apart from those without."""
    for with_prefix in (False, True):
        chosen = [one for one in segments if (one[1] > one[0]) == with_prefix and one[3] > one[2]]
        chosen.sort(key=lambda one: (one[2] - one[3], one[0] - one[1]))
        group: list[Segment] = []
        for one in chosen:
            if group and one[3] - one[2] < SHORTEST_IN_BATCH * (group[0][3] - group[0][2]):
                yield group
                group = []
            group.append(one)
        if group:
            yield group


def _make_batch(group: list[Segment], device: torch.device, dtype: torch.dtype, window: int) -> SegmentBatch:
    """A batch of segments that are no longer than the window, where there is one."""
    prefix_start, prefix_end, start, end = torch.tensor(group, device=device).unbind(1)
    prefix_length, length = prefix_end - prefix_start, end - start
    own, prefix = torch.arange(int(length.max()), device=device), torch.arange(int(prefix_length.max()), device=device)
    is_own = own < length[:, None]
    rows = torch.where(is_own, start[:, None] + own, start[:, None])
    keys = len(prefix) + len(own)
    is_short = device.type == "cpu" and dtype == torch.bfloat16 and keys <= SHORT_ON_CPU
    if device.type == "cpu" and keys < LONG_ON_CPU:
        dtype = torch.float32
    if not len(prefix) and not is_short:
        return SegmentBatch(rows.flatten(), is_own.flatten(), rows.flatten(), len(group), None, dtype, False)
    has_prefix = prefix < prefix_length[:, None]
    prefix_rows = torch.where(has_prefix, prefix_start[:, None] + prefix, prefix_start[:, None])
    sees_prefix = has_prefix[:, None].expand(-1, len(own), -1)
    if window:
        sees_prefix = sees_prefix & (prefix_length[:, None, None] + own[:, None] - prefix < window)
    visible = torch.cat([sees_prefix, (own[:, None] >= own).expand(len(group), -1, -1)], -1)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    seen_rows = torch.cat([prefix_rows, rows], 1)
    return SegmentBatch(
        rows.flatten(), is_own.flatten(), seen_rows.flatten(), len(group), mask[:, None], dtype, is_short
    )


def _on_rank(batch: SegmentBatch, gathered: Gathered) -> SegmentBatch:
    """The same segments, where queries are rows of one rank and keys are gathered."""
    rows, seen_rows = gathered.places[batch.rows], gathered.places[batch.seen_rows]
    return replace(batch, rows=rows - gathered.first, seen_rows=seen_rows)


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """softmax(q·kᵀ·scale)·v of packed rows: [T, heads, d], [T, kv_heads, d], [T, kv_heads, d] → [T, heads · d].

    There may be more keys than queries, those of other ranks.
    """
    outputs = []
    for batch in plan.batches:
        q, k, v = (
            states.index_select(0, rows).unflatten(0, (batch.size, -1))
            for states, rows in ((query, batch.rows), (key, batch.seen_rows), (value, batch.seen_rows))
        )
        if batch.is_short and batch.mask is not None:
            out = attend_short(q, k, v, batch.mask, scale)
        else:
            out = _attend_fused(q, k, v, batch, scale)
        outputs.append(out.flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.place)


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, batch: SegmentBatch, scale: float) -> Tensor:
    """By torch's kernel: [B, L, heads, d], [B, P + L, kv_heads, d] twice → [B, L, heads · d]."""
    q, k, v = (states.to(batch.dtype).transpose(1, 2) for states in (query, key, value))
    out = F.scaled_dot_product_attention(
        q, k, v, batch.mask, is_causal=batch.mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(2).to(query.dtype)


class PackedAttention(torch.nn.Module):
    """Core attention by torch's kernels, for input that comes with a `PackedInput`.

    `pg_collection.cp` are the ranks over which the rows of each micro-batch are divided.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.context_group = None if pg_collection is None or pg_collection.cp.size() == 1 else pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedInput,
        **_: Any,
    ) -> Tensor:
        """[T, 1, heads, d] rotated, [T, 1, kv_heads, d] rotated and [T, 1, kv_heads, v] → [T, 1, heads · v].

        The rows are this rank's alone, and are attended to by those of all ranks.
        """
        query, key, value = (states.squeeze(1) for states in (query, key, value))
        return self.attend(query, key, value, packed_seq_params).unsqueeze(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedInput) -> Tensor:
        """As `forward`, without the dimension of the batch: [T, heads, d] and so on → [T, heads · v]."""
        if self.context_group is not None:
            both = gather_rows(torch.cat([key, value], -1), self.context_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], -1)
        how = self.input_of(packed)
        if how.plan is not None:
            return attend(query, key, value, how.plan, self.scale)
        return attend_varlen(query, key, value, packed, self.scale, how.window)

    def input_of(self, packed: PackedInput) -> AttentionInput:
        """What of a micro-batch concerns this layer, its rotation among it."""
        return AttentionInput(packed.rotation, packed.plan)


class WindowAttention(PackedAttention):
    """Core attention of a layer whose rows see a window only."""

    def input_of(self, packed: PackedInput) -> AttentionInput:
        assert packed.windowed is not None, "the model's rotations know no window"
        return packed.windowed


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, packed: PackedInput, scale: float, window: int) -> Tensor:
    """The CUDA kernel for packed sequences; shapes as for `attend`.

    Where there are fewer queries than keys the kernel aligns their ends, so that a chunk's rows see all rows before it.
    """
    from torch.nn.attention.varlen import varlen_attn

    size, width = value.shape[-1], query.shape[-1]
    if size < width:  # the kernel has one size for all
        value = F.pad(value, (0, width - size))
    if packed.seen_rows is not None:
        key, value = seen(key, value, packed.seen_rows, packed.cu_seqlens_kv)
    grouped: Any = allow_grouped_queries(varlen_attn) if query.shape[1] != key.shape[1] else {}
    before = window - 1  # rows that a row sees besides itself; −1 is the kernel's word for all
    out: Any = varlen_attn(
        query, key, value, packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.max_seqlen_q, packed.max_seqlen_kv,
        scale=scale, window_size=(before, 0), **grouped,
    )  # fmt: skip
    return out[..., :size].flatten(1)
