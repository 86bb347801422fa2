"""The kernels of the local layer spec on one GPU: bytes a second against a plain copy and against torch, and accuracy.

    python -m tools.gpu.kernels [--shapes 0.5b 1.5b 7b8] [--rows 16384] [--sweep]

Each operation of a layer is computed forwards, and forwards and backwards, from bfloat16 inputs that rotate so that no
cache holds them, in a CUDA graph, where the host's launches do not count. Bytes are those of reading each input and
writing each output once. Errors are ‖x − exact‖ / ‖exact‖ against float64. With --sweep other block sizes are timed.
Takes about a minute, the sweep another.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.batch import MicroBatch, pack
from rlflow.models import Scoring, activation, has_transformer_engine, norm, norm_kernel, pack_input, rope, rope_kernel
from rlflow.models.attention import PackedAttention
from rlflow.models.products import add_product
from rlflow.models.transformer_engine import TransformerEngineAttention
from tools.gpu.batches import random_batch
from tools.gpu.machine import require_gpu
from tools.gpu.report import emit
from tools.gpu.shapes import SHAPES, TIMED, Shape
from tools.gpu.timing import copy_rate

EPS = 1e-6
COLD_BYTES = 512 << 20  # of all sets of inputs together, several times what an H200's cache holds
OF_A_COPY = 0.85  # wanted: of the bytes a second of a plain copy
MOST_ERROR = 4e-3  # of bfloat16 results that are rounded once or twice
ACCURACY_ROWS = 1021

Compute = Callable[..., tuple[Tensor, ...]]
Tables = dict[int, rope.RotationTable]
"""By the number of rows."""


@dataclass(frozen=True)
class Operation:
    """What a layer computes of rows, by kernels of ours and by torch's; `sizes` are those of the inputs without rows.

    The first input has rows, the others are parameters. `widths` counts the elements of a row that are read and
    written, at the least, forwards and backwards.
    """

    name: str
    sizes: tuple[int, ...]
    ours: Compute
    torchs: Compute
    widths: tuple[int, int]

    def draw(self, rows: int) -> tuple[Tensor, ...]:
        states = torch.randn(rows, self.sizes[0], device="cuda")
        parameters = [1 + 0.1 * torch.randn(size, device="cuda") for size in self.sizes[1:]]
        return tuple(each.bfloat16().requires_grad_() for each in (states, *parameters))


def operations(shape: Shape, rows: int) -> list[Operation]:
    hidden, ffn, channels = shape.hidden_size, shape.intermediate_size, shape.hidden_size // shape.num_attention_heads
    groups = shape.num_key_value_heads
    heads = rope.Heads(groups, shape.num_attention_heads // groups, channels)
    width = heads.total * channels
    tables = {count: rotation(count, channels) for count in (rows, ACCURACY_ROWS)}
    return [
        Operation("norm", (hidden, hidden), norm_by_us, norm_by_torch, (2 * hidden, 4 * hidden)),
        Operation("swiglu", (2 * ffn,), swiglu_by_us, swiglu_by_torch, (3 * ffn, 5 * ffn)),
        Operation(
            "rotation", (width, width), partial(split_by_us, heads, tables), partial(split_by_torch, heads, tables),
            (2 * width, 2 * width),
        ),
        Operation(
            "normed rotation", (width, channels, channels), partial(norm_and_split_by_us, heads, tables),
            partial(norm_and_split_by_torch, heads, tables), (2 * width, 3 * width),
        ),
    ]  # fmt: skip


def norm_by_us(states: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The normed states, and the states again, as they go around a part of a layer."""
    return norm._RMSNormOnGPU.apply(states, weight, EPS, 0.0)


def norm_by_torch(states: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return F.rms_norm(states, states.shape[1:], weight, EPS), states.view_as(states)


def swiglu_by_us(joined: Tensor) -> tuple[Tensor, ...]:
    return (activation.SwiGLU()(joined),)


def swiglu_by_torch(joined: Tensor) -> tuple[Tensor, ...]:
    gate, up = joined.chunk(2, -1)
    return (F.silu(gate) * up,)


def rotation(rows: int, channels: int) -> rope.RotationTable:
    positions = torch.arange(rows, device="cuda") % 1024
    return rope.rotation_table(positions, rope.Rope(rope.inverse_frequencies(1e6, channels)), torch.bfloat16)


def split_by_us(heads: rope.Heads, tables: Tables, joined: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return rope.split_and_rotate(joined, heads, tables[len(joined)], bias=bias)


def split_by_torch(heads: rope.Heads, tables: Tables, joined: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """As megatron-core takes its projection apart."""
    query, key, value = heads_of(joined + bias, heads)
    return turned(query, tables[len(joined)]), turned(key, tables[len(joined)]), value


def norm_and_split_by_us(
    heads: rope.Heads, tables: Tables, joined: Tensor, query: Tensor, key: Tensor
) -> tuple[Tensor, ...]:
    return rope.split_and_rotate(joined, heads, tables[len(joined)], norms=rope.HeadNorms(query, key, EPS, 0.0))


def norm_and_split_by_torch(heads: rope.Heads, tables: Tables, joined: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    *parts, value = heads_of(joined, heads)
    normed = (F.rms_norm(part, part.shape[2:], weight, EPS) for part, weight in zip(parts, weights, strict=True))
    query, key = (turned(part, tables[len(joined)]) for part in normed)
    return query, key, value


def heads_of(joined: Tensor, heads: rope.Heads) -> tuple[Tensor, ...]:
    grouped = joined.unflatten(-1, (heads.groups, -1, heads.channels))
    return tuple(part.flatten(1, 2) for part in grouped.split([heads.queries, 1, 1], 2))


def turned(states: Tensor, table: rope.RotationTable) -> Tensor:
    cosines, sines = (part.to(states.dtype) for part in table[:2])
    return states * cosines + states.roll(states.shape[-1] // 2, -1) * sines


def learn(compute: Compute, upstream: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Outputs and gradients."""
    outputs = compute(*inputs)
    return *outputs, *torch.autograd.grad(outputs, inputs, upstream)


@cache
def side_stream() -> torch.cuda.Stream:
    """Where everything is captured: autograd computes gradients on the stream of the forward pass."""
    return torch.cuda.Stream()


def graph_seconds(call: Callable[[int], object], sets: int, repeats: int = 7) -> float:
    """Median seconds of a call, which is given the number of the inputs to take."""
    stream, graph = side_stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(sets):
            call(number)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for number in range(sets):
            call(number)
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / sets)
    return statistics.median(times)


class Timed:
    """The times of an operation, forwards alone and both ways."""

    def __init__(self, operation: Operation, rows: int) -> None:
        self.operation, self.rows = operation, rows
        inputs = operation.draw(rows)
        cold = max(1, COLD_BYTES // sum(each.nbytes for each in inputs))
        self.inputs = [inputs, *(operation.draw(rows) for _ in range(min(cold, 16)))]
        with torch.no_grad():
            self.upstream = [torch.randn_like(each) for each in operation.ours(*inputs)]

    def seconds(self, compute: Compute) -> tuple[float, float]:
        def forward(number: int) -> None:
            with torch.no_grad():
                compute(*self.inputs[number])

        def both(number: int) -> None:
            learn(compute, self.upstream, self.inputs[number])

        return graph_seconds(forward, len(self.inputs)), graph_seconds(both, len(self.inputs))

    def speeds(self, compute: Compute) -> tuple[float, float]:
        """Bytes a second."""
        forward, both = self.seconds(compute)
        widths = self.operation.widths
        return 2 * self.rows * widths[0] / forward, 2 * self.rows * sum(widths) / both


def measure_speed(operation: Operation, name: str, rows: int, copied: float) -> None:
    timed = Timed(operation, rows)
    ours, torchs = timed.speeds(operation.ours), timed.speeds(operation.torchs)
    for way, mine, theirs in zip(("forward", "both ways"), ours, torchs, strict=True):
        emit(
            "kernels", f"{operation.name} {way}, {name}", mine / 1e12, "TB/s", target=OF_A_COPY * copied / 1e12,
            bound=copied / 1e12, against="a plain copy", details={"torch": theirs / 1e12, "times torch": mine / theirs},
        )  # fmt: skip


def measure_error(operation: Operation, name: str) -> None:
    """The largest error of all results, on rows that fill no block; raises ValueError for one that is too large."""
    inputs = operation.draw(ACCURACY_ROWS)
    upstream = [torch.randn_like(each) for each in operation.ours(*inputs)]
    exact = learn(
        operation.torchs, [each.double() for each in upstream],
        [each.detach().double().requires_grad_() for each in inputs],
    )  # fmt: skip
    ours, torchs = (
        max(
            float((found.double() - right).norm() / right.norm())
            for found, right in zip(learn(compute, upstream, inputs), exact, strict=True)
        )
        for compute in (operation.ours, operation.torchs)
    )
    emit(
        "kernels", f"error of {operation.name}, {name}", ours, target=MOST_ERROR, bound=torchs, against="torch",
        more_is_better=False,
    )  # fmt: skip
    if not ours <= MOST_ERROR:
        raise ValueError(f"{operation.name}, {name}: the error is {ours}")


def measure_products(shape: Shape, name: str, rows: int) -> None:
    """Weight gradients of a layer, added to float32 buffers: by the product itself, or after it."""
    hidden, ffn, groups = shape.hidden_size, shape.intermediate_size, shape.num_key_value_heads
    joined = hidden + 2 * groups * hidden // shape.num_attention_heads
    sizes = ((joined, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn))
    matrices = [
        (torch.zeros(size, device="cuda"), *(torch.randn(rows, width, device="cuda").bfloat16() for width in size))
        for size in sizes
    ]
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
        "ours": lambda total, grad, states: add_product(total, grad.t(), states),
        "added after": lambda total, grad, states: total.add_(grad.t() @ states),
        "product alone": lambda total, grad, states: grad.t() @ states,
    }

    def seconds_of(call: Callable[[Tensor, Tensor, Tensor], object]) -> float:
        return graph_seconds(lambda number: call(*matrices[number]), len(sizes))

    seconds = {way: seconds_of(call) for way, call in ways.items()}
    flops = 2.0 * rows * sum(one * other for one, other in sizes) / len(sizes)
    rates = {way: flops / spent / 1e12 for way, spent in seconds.items()}
    emit(
        "kernels", f"weight gradients, {name}", rates["ours"], "TFLOP/s", target=rates["added after"],
        bound=rates["product alone"], against="the products alone", details=rates,
    )  # fmt: skip


def measure_attention(shape: Shape, name: str) -> None:
    """Of packed sequences by themselves, and of responses behind a prompt that they share, by each of our modules."""
    for what, batch in (
        ("alone", random_batch(shape.vocab_size, prompts=16, prompt=1, response=1024)),
        ("behind prompts", random_batch(shape.vocab_size, prompts=2, prompt=256, n=8, response=1025)),
    ):
        (micro_batch,) = pack(batch, [range(len(batch))], share_prompts=True)
        pairs = sum(
            (end - start) * (stop - begin + (end - start) / 2) for begin, stop, start, end in micro_batch.segments
        )
        flops = 4.0 * pairs * shape.hidden_size
        for kernels in (PackedAttention, *[TransformerEngineAttention] * has_transformer_engine(torch.bfloat16)):
            for backward, work in ((False, flops), (True, 3.5 * flops)):
                spent = graph_seconds(attending(kernels, shape, micro_batch, backward), 1)
                way = "both ways" if backward else "forward"
                emit(
                    "kernels", f"{kernels.__name__} {what} {way}, {name}", work / spent / 1e12, "TFLOP/s",
                    details={"ms": round(spent * 1e3, 3)},
                )  # fmt: skip


def attending(
    kernels: type[PackedAttention], shape: Shape, micro_batch: MicroBatch, backward: bool
) -> Callable[[int], None]:
    """What attends over a micro-batch with random queries, keys and values."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    channels = shape.hidden_size // heads
    module = kernels(SimpleNamespace(
        num_attention_heads=heads, num_query_groups=groups, kv_channels=channels, tensor_model_parallel_size=1,
        deterministic_mode=False,
    ))  # fmt: skip
    ropes = rope.Ropes(rope.Rope(rope.inverse_frequencies(1e6, channels))).to(torch.device("cuda"))
    scoring = Scoring(micro_batch.predict_at, micro_batch.targets)
    packed = pack_input(micro_batch, ropes, torch.bfloat16, scoring)
    rows = len(micro_batch.token_ids)
    query, key, value, upstream = (
        torch.randn(rows, count, channels, device="cuda").bfloat16() for count in (heads, groups, groups, heads)
    )
    inputs = [states.requires_grad_(backward) for states in (query, key, value)]

    def attend(_: int) -> None:
        out = module.attend(query, key, value, packed)
        if backward:
            torch.autograd.grad(out, inputs, upstream.flatten(1))

    return attend


NORM = ("BACKWARD_ELEMENTS", "PROGRAMS_PER_PROCESSOR", "STAGES_BACKWARD")
NORM_WITH = (
    (4096, 2, 1), (4096, 4, 1), (4096, 3, 2), (4096, 2, 3), (2048, 6, 1), (2048, 5, 2), (2048, 5, 3), (1024, 9, 1),
    (1024, 9, 2), (1024, 8, 3),
)  # fmt: skip
ROTATION = ("ELEMENTS", "WARPS", "STEPS_BACKWARD")
ROTATION_WITH = ((512, 2, 4), (512, 4, 8), (1024, 4, 2), (1024, 4, 8), (2048, 8, 4))

SWEEPS: dict[str, tuple[Any, list[dict[str, int]]]] = {
    "norm": (
        norm_kernel,
        [dict(zip(NORM, values, strict=True)) for values in NORM_WITH]
        + [{"FORWARD_ELEMENTS": size} for size in (1024, 4096)],
    ),
    "rotation": (
        rope_kernel,
        [dict(zip(ROTATION, values, strict=True)) for values in ROTATION_WITH],
    ),
}
"""Other values of constants of the kernels' modules; SwiGLU has none, which runs at the speed of a copy."""


def sweep(operation: Operation, name: str, rows: int) -> None:
    module, variants = SWEEPS[operation.name]
    timed = Timed(operation, rows)
    for changes in [{}, *variants]:
        with ExitStack() as changed:
            for constant, value in changes.items():
                changed.enter_context(patch.object(module, constant, value))
            forward, both = timed.speeds(operation.ours)
        print(f"sweep {operation.name}, {name}: {forward / 1e12:.2f} {both / 1e12:.2f} TB/s {changes}", flush=True)


def steps(names: Sequence[str], rows: int, *, sweeps: bool) -> Iterator[Callable[[], None]]:
    copied = copy_rate()
    for name in names:
        shape = SHAPES[name]
        for operation in operations(shape, rows):
            yield partial(measure_error, operation, name)
            yield partial(measure_speed, operation, name, rows, copied)
        yield partial(measure_products, shape, name, rows)
        yield partial(measure_attention, shape, name)
    for name in names if sweeps else ():
        for operation in operations(SHAPES[name], rows):
            if operation.name in SWEEPS:
                yield partial(sweep, operation, name, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=TIMED)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--sweep", action="store_true", help="time other block sizes too")
    arguments = parser.parse_args()
    require_gpu()
    failed = False
    for step in steps(arguments.shapes, arguments.rows, sweeps=arguments.sweep):
        try:
            step()
        except Exception:  # one that fails must not take the others along
            traceback.print_exc()
            failed = True
        torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
