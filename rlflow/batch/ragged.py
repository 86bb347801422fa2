"""Rows of unequal length as one flat tensor and their lengths: no padding, and no Python loop over tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TYPE_CODES = {torch.int64: "q", torch.float32: "f"}
"""Of Python's arrays."""


def spans(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the ranges [start, start + length) of every row: int64 [sum lengths]."""
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    flat = torch.arange(total, dtype=torch.int64, device=lengths.device)
    return flat + torch.repeat_interleave(starts - (ends - lengths), lengths, output_size=total)


@dataclass(frozen=True)
class Ragged:
    """n rows: `values` [sum of lengths], `lengths` int64 [n]."""

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.lengths.dim() != 1 or int(self.lengths.sum()) != len(self.values):
            raise ValueError(f"{len(self.values)} values for rows of {int(self.lengths.sum())} in all")

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int] | Sequence[float]], dtype: torch.dtype = torch.int64) -> Ragged:
        flat: array[Any] = array(TYPE_CODES[dtype])
        for row in rows:
            flat.fromlist(list(row))  # a third of the time that torch takes to read numbers one by one
        values = torch.frombuffer(flat, dtype=dtype) if flat else torch.empty(0, dtype=dtype)
        return cls(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def offsets(self) -> Tensor:
        """Where each row starts in `values`, and the total at the end: int64 [n + 1]."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def row(self, number: int) -> Tensor:
        """A view of one row."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        start = int(self.lengths[:number].sum())
        return self.values[start : start + int(self.lengths[number])]

    def row_ids(self) -> Tensor:
        """The row of each value: int64 [sum lengths]."""
        rows = torch.arange(len(self), device=self.lengths.device)
        return torch.repeat_interleave(rows, self.lengths, output_size=len(self.values))

    def value_index(self, rows: Tensor) -> Tensor:
        """Where the values of the given rows lie in `values`, row after row: int64 [sum of their lengths]."""
        return spans(self.offsets[:-1][rows], self.lengths[rows])

    def select(self, rows: Tensor) -> Ragged:
        """The given rows, in the given order; a row may be asked for more than once."""
        return Ragged(self.values[self.value_index(rows)], self.lengths[rows])

    def exclusive_cumsum(self) -> Tensor:
        """For each value the sum of those before it in its row: float64 [sum lengths]."""
        sums = torch.nn.functional.pad(self.values.double().cumsum(0), (1, 0))
        at_row_start = torch.repeat_interleave(sums[self.offsets[:-1]], self.lengths, output_size=len(self.values))
        return sums[:-1] - at_row_start

    def padded(self, fill: float = 0) -> Tensor:
        """[n, longest row], `fill` behind the end of shorter rows; for display and for reference computations."""
        width = int(self.lengths.max()) if len(self) else 0
        out = self.values.new_full((len(self), width), fill)
        out[torch.arange(width, device=self.lengths.device) < self.lengths[:, None]] = self.values
        return out

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(self.values.to(device), self.lengths.to(device))

    @staticmethod
    def concat(parts: Sequence[Ragged]) -> Ragged:
        return Ragged(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))
