"""Cut a batch into micro-batches of packed sequences under a token budget.

Which samples go together is decided here for one rank; which rank gets which samples is left to `balance`.
A prompt with several responses in one micro-batch may be computed once: the responses follow it and attend to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
