"""Any part of a layout's parameter, made from a source that this process can read: conversion without communication.

Where a transfer fills whole parameters that are in memory, this fills a window of one, so that a converter needs memory
for a window however large the tensors are. What to copy is the plan's; files are left to `files` and `distcp_writer`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bridge.boxes import merged, within
from megatron_bridge.errors import UserError
from megatron_bridge.files import MappedTensors
from megatron_bridge.half import BEYOND, is_beyond_float16
from megatron_bridge.layouts import Layout
from megatron_bridge.plan import make_plan

WINDOW_BYTES = 768 * 2**10  # what stays in a processor's cache between reading and writing
MAPPED_BYTES = 128 * 2**20


class _Run(NamedTuple):
    """A strided region of a parameter, [begin, end) around it, and the strides of the same region at its source."""

    begin: int
    end: int
    dims: tuple[tuple[int, int], ...]
    source: str
    offset: int
    strides: tuple[int, ...]


class Filler:
    """Makes parameters of a target layout from source tensors of which this rank holds all that it needs.

    After about `mapped_bytes` of the source were read, a mapped source gives its memory back.
    """

    def __init__(
        self,
        source_layout: Layout,
        source: Mapping[str, Tensor],
        target_layout: Layout,
        *,
        rank: int,
        mapped_bytes: int = MAPPED_BYTES,
    ) -> None:
        plan = make_plan(source_layout, target_layout)
        if plan.sources(rank):
            raise ValueError(f"rank {rank} does not hold all of the source")
        self._source, self._mapped_bytes, self._read = source, mapped_bytes, 0
        self._sizes = {name: prod(param.shape) for name, param in target_layout.parameters(rank).items()}
        self._padding = target_layout.padding(rank)
        self._runs: dict[str, list[_Run]] = defaultdict(list)
        for shape, come, go in plan.into(rank, rank):
            lengths, there, here = zip(*merged(shape, go.strides, come.strides) or [(1, 1, 1)], strict=True)
            end = go.offset + 1 + sum((n - 1) * s for n, s in zip(lengths, there, strict=True))
            dims = tuple(zip(lengths, there, strict=True))
            self._runs[go.parameter].append(_Run(go.offset, end, dims, come.parameter, come.offset, here))
        for runs in self._runs.values():
            runs.sort()
        self._window = torch.empty(WINDOW_BYTES, dtype=torch.uint8)

    def values(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """The elements of a parameter in order, part by part in the same memory: each is to be used before the next.

        UserError where float16 would make an infinity of a value.
        """
        window = self._window.view(dtype)
        for begin in range(0, self._sizes[name], len(window)):
            part = window[: self._sizes[name] - begin]
            self.fill(name, begin, part)
            if dtype == torch.float16 and part.isinf().any() and self._is_beyond_float16(name):
                raise UserError(name, f"{BEYOND}: keep its dtype, or take bf16")
            yield part

    def fill(self, name: str, begin: int, out: Tensor) -> None:
        """Write the elements of a parameter from the one numbered `begin` into a flat tensor, cast to its dtype."""
        end = begin + len(out)
        if (unpadded := self._sizes[name] - self._padding.get(name, 0)) < end:
            out[max(0, unpadded - begin) :].zero_()
        for run in self._runs[name]:
            if run.begin >= end:
                break
            if run.end > begin:
                self._copy(run, begin, out)
        if self._read > self._mapped_bytes and isinstance(self._source, MappedTensors):
            self._source.release()
            self._read = 0

    def _is_beyond_float16(self, name: str) -> bool:
        held = ((self._source[run.source].detach(), run) for run in self._runs[name])
        return any(
            is_beyond_float16(source.as_strided([n for n, _ in dims], strides, source.storage_offset() + offset))
            for source, (_, _, dims, _, offset, strides) in held
        )

    def _copy(self, run: _Run, begin: int, out: Tensor) -> None:
        held = self._source[run.source].detach()
        steps = [step for _, step in run.dims]
        for start, box in within(run.dims, run.begin, begin, begin + len(out)):
            shape = [hi - lo for lo, hi in box]
            offset = run.offset + sum(lo * stride for (lo, _), stride in zip(box, run.strides, strict=True))
            values = held.as_strided(shape, run.strides, held.storage_offset() + offset)
            out.as_strided(shape, steps, out.storage_offset() + start - begin).copy_(values)
            self._read += held.itemsize * sum((n - 1) * stride for n, stride in zip(shape, run.strides, strict=True))
