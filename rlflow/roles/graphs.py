"""CUDA graphs of micro-batches: what is computed of one is captured once for a shape, and then replayed.

A small model waits for the host, which launches thousands of kernels; a graph is one launch. Micro-batches come in few
lengths, everything else about them is padded here. The first of a shape are computed as they come, which also warms up
what chooses its kernels at first use. What a graph reads must stay where it was captured: the caller sees to that, and
to the padding of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlflow.batch import MicroBatch
from rlflow.parallel import Grid, active
from rlflow.roles.forward import Forward, Loss, Objective, Scored
from rlflow.roles.training import Training

Fields = Mapping[str, Tensor]
Compute = Callable[[MicroBatch, Fields], dict[str, Tensor]]

LENGTHS = 8
"""Lengths of micro-batches up to the budget: fewer make more padding, more make more graphs."""

WARM_UP = 2
"""Micro-batches of a shape that are computed before one is captured."""

ROWS = ("token_ids", "position_ids", "predict_at", "targets", "sample_index", "last_rows", "seen_rows")
BOUNDS = ("cu_seqlens", "cu_seen")
"""What of a micro-batch a graph reads."""

PER_SAMPLE = "last"
"""The result that has a value for each sample of a micro-batch; others have one for each response token, or one."""

MOST_GRAPHS = 32
"""Of which the longest unused goes first; all share one pool of memory, as large as the largest needs."""


class Shape(NamedTuple):
    """What a graph is captured for: sizes to which micro-batches are padded."""

    rows: int
    sequences: int
    longest: int  # rows of a sequence
    scored: int  # response tokens
    samples: int  # with values at their last tokens
    seen: int  # rows that sequences see, where they share prompts
    longest_seen: int

    @staticmethod
    def of(micro_batch: MicroBatch) -> Shape:
        """The next shape above a micro-batch, whose rows are padded already."""
        rows, scored = len(micro_batch.token_ids), len(micro_batch.predict_at)
        part = -(-rows // LENGTHS)
        last = micro_batch.last_rows
        return Shape(
            rows,
            _power_of_two(len(micro_batch.cu_seqlens) - 1, at_least=8),
            _power_of_two(micro_batch.max_seqlen, at_least=256),
            max(part, -(-scored // part) * part),
            0 if last is None else _power_of_two(len(last), at_least=8),
            0 if micro_batch.seen_rows is None else -(-len(micro_batch.seen_rows) // part) * part,
            0 if micro_batch.seen_rows is None else _power_of_two(micro_batch.max_seen, at_least=256),
        )


def _power_of_two(number: int, *, at_least: int) -> int:
    return max(at_least, 1 << max(number - 1, 0).bit_length())


def row_multiple(budget: int, multiple: int) -> int:
    """What the rows of micro-batches are padded to a multiple of: `LENGTHS` lengths up to a budget of tokens."""
    part = -(-budget // LENGTHS)
    return -(-part // multiple) * multiple


@dataclass
class Captured:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    micro_batch: MicroBatch
    fields: dict[str, Tensor]
    results: dict[str, Tensor]


class MicroBatchGraphs:
    """The graphs of one engine. `stream` is where everything runs, and where autograd's nodes must have been made."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: dict[Hashable, int] = {}
        self._captured: dict[Hashable, Captured] = {}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run what is inside on `stream`, after what was queued before and before what comes later."""
        outside = torch.cuda.current_stream()
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)

    def run(self, compute: Compute, what: Hashable, micro_batch: MicroBatch, fields: Fields) -> dict[str, Tensor]:
        """`compute(micro_batch, fields)`, replayed where that was captured.

        `what` names the computation: equal ones do the same to the same weights. `fields` are per response token. Their
        gradients, if it makes any, go where they went when it was captured. Call inside `on_stream`.
        """
        shape = Shape.of(micro_batch)
        key = (what, shape, tuple(fields))
        if (captured := self._captured.pop(key, None)) is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= WARM_UP:
                return compute(micro_batch, fields)
            captured = self._capture(compute, micro_batch, fields, shape)
        self._captured[key] = captured  # as the one used last
        if len(self._captured) > MOST_GRAPHS:
            del self._captured[next(iter(self._captured))]
        _fill(captured, micro_batch, fields)
        captured.graph.replay()
        return {name: _own(value, name, micro_batch) for name, value in captured.results.items()}

    def _capture(self, compute: Compute, micro_batch: MicroBatch, fields: Fields, shape: Shape) -> Captured:
        held = _padded(micro_batch, shape)
        held_fields = {name: values.new_zeros(shape.scored, *values.shape[1:]) for name, values in fields.items()}
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: what one of them asks of the GPU meanwhile is none of the graph's business.
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
            results = compute(held, held_fields)
        return Captured(graph, held, held_fields, results)


def _padded(micro_batch: MicroBatch, shape: Shape) -> MicroBatch:
    """Room for micro-batches of a shape, with zeros where the numbers of one come."""
    zeros = partial(torch.zeros, dtype=torch.int64, device=micro_batch.token_ids.device)
    shares = micro_batch.seen_rows is not None
    return replace(
        micro_batch,
        source=zeros(0),  # what no graph reads
        samples_of_row=zeros(0),
        token_index=zeros(0),
        last_samples=None,
        token_ids=zeros(shape.rows),
        position_ids=zeros(shape.rows),
        segments=[],  # the kernel for packed sequences knows them by their bounds
        cu_seqlens=zeros(shape.sequences + 1, dtype=torch.int32),
        max_seqlen=shape.longest,
        seen_rows=zeros(shape.seen) if shares else None,
        cu_seen=zeros(shape.sequences + 1, dtype=torch.int32) if shares else None,
        max_seen=shape.longest_seen,
        predict_at=zeros(shape.scored),
        targets=zeros(shape.scored),
        sample_index=zeros(shape.scored),
        last_rows=None if micro_batch.last_rows is None else zeros(shape.samples),
    )


def _fill(captured: Captured, micro_batch: MicroBatch, fields: Fields) -> None:
    """Write a micro-batch where the graph reads it.

    Sequences that it has not are empty ones at the end. Tokens that it has not are predicted by row 0, and all fields,
    weights and mask among them, are zero there.
    """
    held = captured.micro_batch
    for name in (*ROWS, *BOUNDS):
        if (values := getattr(micro_batch, name)) is not None:
            _write(getattr(held, name), values, values[-1] if name in BOUNDS else 0)
    for name, values in fields.items():
        _write(captured.fields[name], values, 0)


def _write(held: Tensor, values: Tensor, behind: Tensor | int) -> None:
    held[: len(values)] = values
    held[len(values) :] = behind


def _own(value: Tensor, name: str, micro_batch: MicroBatch) -> Tensor:
    """A result of a replay, before the next one overwrites it, without what was padding."""
    if not value.dim():
        return value.clone()
    per = micro_batch.last_rows if name == PER_SAMPLE else micro_batch.predict_at
    assert per is not None
    return value[: len(per)].clone()


class GraphedPasses:
    """The passes of an engine whose stage is the whole model, one micro-batch after the other."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._graphs = MicroBatchGraphs()
        self.on_stream = self._graphs.on_stream

    def look(self, model: Any, micro_batches: Sequence[MicroBatch], forward: Forward) -> list[Scored]:
        """What the model says of each micro-batch."""

        def compute(micro_batch: MicroBatch, fields: Fields) -> dict[str, Tensor]:
            _, scored = forward(micro_batch, model)
            return {name: value for name, value in _whole(scored)._asdict().items() if value is not None}

        with active(self._grid), torch.no_grad(), self.on_stream():
            return [Scored(**self._graphs.run(compute, forward, part, {})) for part in micro_batches]

    def learn(
        self,
        training: Training,
        micro_batches: Sequence[MicroBatch],
        forward: Forward,
        fields: Fields,
        objective: Objective,
    ) -> list[dict[str, Tensor]]:
        """Add up the gradients of all micro-batches, over replicas too; the objective's metrics of each."""
        (model,) = training.ddp

        def compute(micro_batch: MicroBatch, cut: Fields) -> dict[str, Tensor]:
            loss = Loss.of(objective, micro_batch, cut)
            _, scored = forward(micro_batch, model, loss)
            value, metrics = loss(_whole(scored))
            value.backward()
            return metrics

        with active(self._grid), self.on_stream():
            found = []
            for part in micro_batches:
                cut = {name: values[part.token_index] for name, values in fields.items()}
                found.append(self._graphs.run(compute, (forward, objective), part, cut))
            training.finish_gradients()
        return found


def _whole(scored: Scored | None) -> Scored:
    assert scored is not None, "a stage that is not the last has no graphs"
    return scored
