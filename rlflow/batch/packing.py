"""Lay samples out as packed sequences: the rows of a forward, and where each response token is predicted.

Which samples go together is left to `planning`, which rank gets them to `balance`.
A prompt with several responses in one micro-batch may be computed once: the responses follow it and attend to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlflow.batch.batch import Batch
from rlflow.batch.ragged import spans


@dataclass
class MicroBatch:
    """What one forward sees: T packed rows, R response tokens to be scored.

    The last token of a response predicts nothing and is no row. Padding, if any, is the last segment.
    """

    token_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], from 0 in every sequence; a response continues behind its prompt
    # (prefix_start, prefix_end, start, end): rows [start, end) attend causally to themselves and fully to the prefix,
    # which is the empty range (start, start) unless a prompt is shared
    segments: list[tuple[int, int, int, int]]
    cu_seqlens: Tensor  # int32 [S + 1], bounds of the segments
    max_seqlen: int
    predict_at: Tensor  # int64 [R], row in [0, T) whose hidden state predicts the response token
    targets: Tensor  # int64 [R], response token ids
    token_index: Tensor  # int64 [R], where the response token lies in the batch's `tokens` fields
    sample_index: Tensor  # int64 [R], the batch's sample of the response token
    padding: int  # rows of padding in T

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return MicroBatch(**{**vars(self), **moved})


def pack(batch: Batch, bins: Sequence[Sequence[int]], *, share_prompts: bool, multiple: int = 1) -> list[MicroBatch]:
    """Pack the samples of each bin into one micro-batch, padded at the end to a multiple of `multiple` rows.

    With `share_prompts` a prompt with several responses in a bin is computed once. An empty bin becomes a micro-batch
    of padding alone, for ranks that must take part in a forward without having work for it.
    """
    pool = torch.cat([batch.prompts.values, batch.responses.values])
    layout = _Layout(batch)
    return [_micro_batch(pool, layout, layout.rows_of(members, share_prompts), multiple) for members in bins]


@dataclass
class _Rows:
    """The runs of rows of one micro-batch, and its samples, while they are laid out."""

    length: int = 0
    sources: list[tuple[int, int, int]] = field(default_factory=list)  # start in the pool, rows, first position
    segments: list[tuple[int, int, int, int]] = field(default_factory=list)
    samples: list[tuple[int, int, int]] = field(default_factory=list)  # sample, prompt's last row, response's first row

    def add(self, source: int, rows: int, position: int) -> int:
        """Append rows; returns where they start."""
        start = self.length
        self.sources.append((source, rows, position))
        self.length += rows
        return start


class _Layout:
    """Where prompts and responses of a batch lie, as plain numbers."""

    def __init__(self, batch: Batch) -> None:
        self.prompt_of = batch.prompt_of.tolist()
        self.prompt_lengths = batch.prompts.lengths.tolist()
        self.prompt_starts = batch.prompts.offsets.tolist()
        self.response_lengths = batch.responses.lengths.tolist()
        self.response_starts = batch.responses.offsets.tolist()

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
        prompt_start = rows.add(self.prompt_starts[prompt], prompt_length, 0)
        prompt_end = prompt_start + prompt_length
        alone = len(group) == 1
        if not alone:
            rows.segments.append((prompt_start, prompt_start, prompt_start, prompt_end))
        for sample in group:
            grown = max(self.response_lengths[sample] - 1, 0)
            source = self.prompt_starts[-1] + self.response_starts[sample]
            start = rows.add(source, grown, prompt_length)
            rows.samples.append((sample, prompt_end - 1, start))
            if alone:
                rows.segments.append((prompt_start, prompt_start, prompt_start, start + grown))
            elif grown:
                rows.segments.append((prompt_start, prompt_end, start, start + grown))


def _micro_batch(pool: Tensor, layout: _Layout, rows: _Rows, multiple: int) -> MicroBatch:
    padding = -rows.length % multiple if rows.length else multiple
    if padding:
        rows.segments.append((rows.length, rows.length, rows.length, rows.length + padding))
    starts, lengths, positions = _columns(rows.sources)
    bounds = [0] + [end for _, _, _, end in rows.segments]
    predict_at, token_index, sample_index = _predictions(layout, rows)
    pad = torch.nn.functional.pad
    micro_batch = MicroBatch(
        token_ids=pad(pool[spans(starts, lengths).to(pool.device)], (0, padding)),
        position_ids=pad(spans(positions, lengths), (0, padding)),
        segments=rows.segments,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(end - start for _, _, start, end in rows.segments),
        predict_at=predict_at,
        targets=pool[(token_index + layout.prompt_starts[-1]).to(pool.device)],
        token_index=token_index,
        sample_index=sample_index,
        padding=padding,
    )
    return micro_batch.to(pool.device)


def _predictions(layout: _Layout, rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
    """For each response token the row that predicts it, its place in the batch's token fields, and its sample.

    The prompt's last row predicts the first token of a response, each row of the response the token after it.
    """
    samples, prompt_ends, starts = _columns(rows.samples)
    lengths = torch.tensor([layout.response_lengths[sample] for sample in samples.tolist()], dtype=torch.int64)
    places = torch.tensor([layout.response_starts[sample] for sample in samples.tolist()], dtype=torch.int64)
    predict_at = spans(starts - 1, lengths)
    firsts = (lengths.cumsum(0) - lengths)[lengths > 0]
    predict_at[firsts] = prompt_ends[lengths > 0]
    return predict_at, spans(places, lengths), torch.repeat_interleave(samples, lengths)


def _columns(rows: list[tuple[int, int, int]]) -> Tensor:
    """int64 [3, len(rows)]."""
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).T
