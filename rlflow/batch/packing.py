"""Lay samples out as packed sequences: the rows of a forward, and where each response token is predicted.

Which samples go together is left to `planning`, which rank gets them to `balance`, how context-parallel ranks divide
the rows to `zigzag`. A prompt with several responses in one micro-batch may be computed once: the responses follow it
and attend to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.batch.batch import Batch
from rlflow.batch.ragged import spans
from rlflow.batch.sizes import whole_multiple
from rlflow.batch.zigzag import Segment, context_rows


@dataclass
class MicroBatch:
    """What one forward sees: T packed rows, R response tokens to be scored, S samples.

    The last token of a response predicts nothing: it is a row only where values at it were asked for. Padding has the
    token 0; it ends each sequence under context parallelism, and is the last segment where the rows are too few.
    """

    token_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in every sequence; a response continues behind its prompt
    source: Tensor  # int64 [T], where the token lies among the batch's prompts and then responses; −1: padding
    samples_of_row: Tensor  # float32 [T], how many samples have the row in common; 0: padding
    # (prefix_start, prefix_end, start, end): rows [start, end) attend causally to themselves and fully to the prefix,
    # which is the empty range (start, start) unless a prompt is shared
    segments: list[Segment]
    cu_seqlens: Tensor  # int32 [segments + 1], their bounds
    max_seqlen: int
    predict_at: Tensor  # int64 [R], row in [0, T) whose hidden state predicts the response token
    targets: Tensor  # int64 [R], response token ids
    token_index: Tensor  # int64 [R], where the response token lies in the batch's `tokens` fields
    sample_index: Tensor  # int64 [R], which response of the micro-batch has the token, empty ones not counted: below R
    padding: int  # rows of padding in T
    # Where prompts are shared: the rows that each segment attends to, its prefix and then its own, one after the other;
    # None where segments see themselves alone.
    seen_rows: Tensor | None = None  # int64 [K]
    cu_seen: Tensor | None = None  # int32 [segments + 1], their bounds
    max_seen: int = 0
    last_rows: Tensor | None = None  # int64 [S], row of the last response token, or of the prompt's if there is none
    last_samples: Tensor | None = None  # int64 [S], the batch's samples; both None unless last rows were asked for
    # The part of one context-parallel rank: its T / size rows; `segments`, their bounds, `padding`, `token_index`,
    # `sample_index` and `last_samples` stay those of the whole.
    context_rank: int = 0
    context_size: int = 1
    scored: Tensor | None = None  # int64 [r], which of the R tokens the rows here predict; None: all
    last_scored: Tensor | None = None  # int64 [s], which of the S last rows are here; None: all

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return MicroBatch(**{**vars(self), **moved})

    def for_context_rank(self, rank: int, size: int) -> MicroBatch:
        """The rows that a context-parallel rank holds, and the predictions that are made from them.

        Raises ValueError where the micro-batch was not packed with `context=size`.
        """
        if size == 1:
            return self
        rows = context_rows(self.segments, rank, size).to(self.token_ids.device)
        place = torch.full_like(self.token_ids, -1).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
        predict_at, scored = _those_here(place[self.predict_at])
        last_rows, last_scored = (None, None) if self.last_rows is None else _those_here(place[self.last_rows])
        return replace(
            self,
            token_ids=self.token_ids[rows],
            position_ids=self.position_ids[rows],
            source=self.source[rows],
            samples_of_row=self.samples_of_row[rows],
            predict_at=predict_at,
            targets=self.targets[scored],
            last_rows=last_rows,
            context_rank=rank,
            context_size=size,
            scored=scored,
            last_scored=last_scored,
        )


def _those_here(places: Tensor) -> tuple[Tensor, Tensor]:
    """Of places on a rank, −1 for what is elsewhere: those here, and which of all they are."""
    here = places.ge(0).nonzero()[:, 0]
    return places[here], here


def pack(
    batch: Batch,
    bins: Sequence[Sequence[int]],
    *,
    share_prompts: bool,
    multiple: int = 1,
    context: int = 1,
    with_last: bool = False,
) -> list[MicroBatch]:
    """Pack the samples of each bin into one micro-batch, padded at the end to a multiple of `multiple` rows.

    With `share_prompts` a prompt with several responses in a bin is computed once. An empty bin becomes a micro-batch
    of padding alone, for ranks that must take part in a forward without having work for it.
    For `context` ranks each sequence is padded to a multiple of 2·context rows, and `multiple` holds for each rank's
    part. ValueError for prompts that would be shared then. `with_last` makes the last response token a row, too.
    """
    if context > 1 and share_prompts:
        raise ValueError("prompts cannot be shared under context parallelism")
    multiple = whole_multiple(multiple, context)
    parts = [batch.prompts.values, batch.responses.values]
    pool = torch.cat([*parts, parts[0].new_zeros(1)])  # the last one, that is −1, is the token of padding
    layout = _Layout(batch, 2 * context if context > 1 else 1, with_last)
    return [_micro_batch(pool, layout, layout.rows_of(members, share_prompts), multiple) for members in bins]


@dataclass
class _Rows:
    """The runs of rows of one micro-batch, and its samples, while they are laid out."""

    length: int = 0
    # a run's first row, where it starts in the pool, how many rows, the first one's position, samples that share it
    sources: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)  # sample, prompt's last row, response's first row

    def add(self, source: int, rows: int, position: int, samples: int) -> int:
        """Append rows; returns where they start."""
        start = self.length
        self.sources.append((start, source, rows, position, samples))
        self.length += rows
        return start


class _Layout:
    """Where prompts and responses of a batch lie, as plain numbers."""

    def __init__(self, batch: Batch, sequence_multiple: int, with_last: bool) -> None:
        self.prompt_of = batch.prompt_of.tolist()
        self.prompt_lengths = batch.prompts.lengths.tolist()
        self.prompt_starts = batch.prompts.offsets.tolist()
        self.response_lengths = batch.responses.lengths.tolist()
        self.response_starts = batch.responses.offsets.tolist()
        self.sequence_multiple, self.with_last = sequence_multiple, with_last

    def rows_of(self, members: Sequence[int], share_prompts: bool) -> _Rows:
        rows = _Rows()
        groups: dict[int, list[int]] = {}
        for sample in members:
            groups.setdefault(self.prompt_of[sample] if share_prompts else sample, []).append(sample)
        for group in groups.values():
            self._add_group(rows, group)
        return rows

    def _add_group(self, rows: _Rows, group: Sequence[int]) -> None:
        """A prompt and its responses: one segment if there is one response, else each response a segment of its own."""
        prompt = self.prompt_of[group[0]]
        prompt_length = self.prompt_lengths[prompt]
        prompt_start = rows.add(self.prompt_starts[prompt], prompt_length, 0, len(group))
        prompt_end = prompt_start + prompt_length
        alone = len(group) == 1
        if not alone:
            rows.segments.append((prompt_start, prompt_start, prompt_start, prompt_end))
        for sample in group:
            grown = max(self.response_lengths[sample] - (not self.with_last), 0)
            source = self.prompt_starts[-1] + self.response_starts[sample]
            start = rows.add(source, grown, prompt_length, 1)
            rows.samples.append((sample, prompt_end - 1, start))
            if alone:
                rows.length += (prompt_start - rows.length) % self.sequence_multiple
                rows.segments.append((prompt_start, prompt_start, prompt_start, rows.length))
            elif grown:
                rows.segments.append((prompt_start, prompt_end, start, start + grown))


def _micro_batch(pool: Tensor, layout: _Layout, rows: _Rows, multiple: int) -> MicroBatch:
    if filled := (-rows.length % multiple if rows.length else multiple):
        rows.segments.append((rows.length, rows.length, rows.length, rows.length + filled))
    places, starts, lengths, positions, shared = _columns(rows.sources, 5)
    real = spans(places, lengths)  # the rows that are not padding
    source = torch.full((rows.length + filled,), -1).index_copy_(0, real, spans(starts, lengths))
    bounds = [0] + [end for _, _, _, end in rows.segments]
    predict_at, token_index, sample_index, last_rows = _predictions(layout, rows)
    micro_batch = MicroBatch(
        token_ids=pool[source.to(pool.device)],
        position_ids=torch.zeros_like(source).index_copy_(0, real, spans(positions, lengths)),
        source=source,
        samples_of_row=torch.zeros(len(source)).index_copy_(0, real, shared.repeat_interleave(lengths).float()),
        segments=rows.segments,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(end - start for _, _, start, end in rows.segments),
        predict_at=predict_at,
        targets=pool[(token_index + layout.prompt_starts[-1]).to(pool.device)],
        token_index=token_index,
        sample_index=sample_index,
        padding=len(source) - len(real),
        **_seen_where_shared(rows.segments),
        last_rows=last_rows if layout.with_last else None,
        last_samples=_columns(rows.samples, 3)[0] if layout.with_last else None,
    )
    return micro_batch.to(pool.device)


def _predictions(layout: _Layout, rows: _Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each response token the row that predicts it, its place in the batch's token fields, its response's number.

    The prompt's last row predicts the first token of a response, each row of the response the token after it. And for
    each sample the row that its last token would have.
    """
    samples, prompt_ends, starts = _columns(rows.samples, 3)
    lengths = torch.tensor([layout.response_lengths[sample] for sample in samples.tolist()], dtype=torch.int64)
    places = torch.tensor([layout.response_starts[sample] for sample in samples.tolist()], dtype=torch.int64)
    predict_at = spans(starts - 1, lengths)
    firsts = (lengths.cumsum(0) - lengths)[lengths > 0]
    predict_at[firsts] = prompt_ends[lengths > 0]
    last_rows = torch.where(lengths > 0, starts + lengths - 1, prompt_ends)
    numbers = (lengths > 0).cumsum(0) - 1
    return predict_at, spans(places, lengths), numbers.repeat_interleave(lengths), last_rows


def _seen_where_shared(segments: Sequence[Segment]) -> dict[str, Any]:
    """The rows that segments see, unless all have none but their own."""
    if all(prefix_start == prefix_end for prefix_start, prefix_end, _, _ in segments):
        return {}
    rows, lengths = seen_by(segments)
    return {"seen_rows": rows, "cu_seen": bounds_of(lengths), "max_seen": int(lengths.max())}


def seen_by(segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
    """The rows that each segment attends to, its prefix and then its own: int64 [K], and how many: int64 [segments]."""
    prefix_start, prefix_end, start, end = _columns(segments, 4)
    starts, lengths = torch.stack([prefix_start, start], 1), torch.stack([prefix_end - prefix_start, end - start], 1)
    return spans(starts.flatten(), lengths.flatten()), lengths.sum(1)


def bounds_of(lengths: Tensor) -> Tensor:
    """Where runs of these lengths begin, one after the other, and the last one's end: int32 [n + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> Tensor:
    """int64 [width, len(rows)]."""
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, width).T
