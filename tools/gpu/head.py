"""The head on one GPU: time and memory against plain cross entropy, its kernels against the memory, its accuracy.

    python -m tools.gpu.head [--hidden 896 1536 3584] [--rows 16384] [--skip-sweep]

Forward and backward of hidden states [rows, hidden] against a vocabulary of 151,936 in bfloat16. Ours adds the weight's
gradient to a float32 matrix that is there, as in the trainer; others make one in bfloat16. Memory is what is allocated
beyond that and the inputs at the most. Takes about a minute.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from rlflow.models import VocabShard, softmax_kernel, token_log_probs
from rlflow.models.products import add_product, exact_product
from rlflow.models.softmax import Slopes
from tools.gpu.machine import require_gpu
from tools.gpu.report import GIB, emit
from tools.gpu.shapes import VOCAB
from tools.gpu.timing import copy_rate, seconds_each, seconds_of

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
CHUNKS = (1024, 2048, 2816)  # the last: six for 16,384 tokens, with .8 GiB of logits each
CHUNK = 2048  # the trainer's own
ENTROPY_COEF = 0.01
MOST_TIME, MOST_MEMORY = 1.1, 1.0  # of plain cross entropy, in GiB
ACCURACY_ROWS = 512

READ_WITH = (
    *((block, warps, 1) for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16_384, 16))),
    *((block, warps, stages) for block, warps in ((2048, 4), (4096, 4), (8192, 8)) for stages in (2, 3)),
)
"""Blocks, warps and stages of loads ahead."""

TURN_WITH = ((2048, 4), (4096, 4), (2048, 8), (4096, 8), (8192, 8), (8192, 16), (16_384, 16))

Scored = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass
class Inputs:
    """Of a head: hidden states, weight and targets, with the float32 gradient that a trainer keeps."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor

    @staticmethod
    def draw(rows: int, hidden: int) -> Inputs:
        """Logits with a standard deviation of 2, as random models do not have them and trained ones do."""
        draw = torch.Generator("cuda").manual_seed(0)
        states = torch.randn(rows, hidden, device="cuda", generator=draw).bfloat16()
        weight = (2 * hidden**-0.5 * torch.randn(VOCAB, hidden, device="cuda", generator=draw)).bfloat16()
        targets = torch.randint(0, VOCAB, (rows,), device="cuda", generator=draw)
        return Inputs(states.requires_grad_(), weight.requires_grad_(), targets)

    @contextmanager
    def with_main_grad(self) -> Iterator[None]:
        self.weight.main_grad = torch.zeros_like(self.weight, dtype=torch.float32)  # type: ignore[attr-defined]
        self.weight.adds_to_main_grad = True  # type: ignore[attr-defined]
        yield
        del self.weight.main_grad, self.weight.adds_to_main_grad  # type: ignore[attr-defined]


def ours(chunk_tokens: int, *, with_entropy: bool = False, exact_logits: bool = False, at_once: bool = True) -> Scored:
    """`at_once` as in a loss per token, whose gradient is known with the log-probs; else as in one of sequences."""

    def score(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        def slopes_of(rows: slice, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
            slopes = torch.full_like(log_probs, -1 / len(targets))  # of the mean
            return slopes, None if entropy is None else ENTROPY_COEF * slopes

        log_probs, entropy = token_log_probs(
            hidden, weight, targets, VocabShard(0, VOCAB), chunk_tokens=chunk_tokens, with_entropy=with_entropy,
            exact_logits=exact_logits, slopes_of=slopes_of if at_once else None,
        )  # fmt: skip
        return -log_probs if entropy is None else -log_probs - ENTROPY_COEF * entropy

    return score


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")


def plain_in_float32(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Transformer Engine's cross entropy on logits of its own."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return parallel_cross_entropy(F.linear(hidden, weight)[:, None], targets[:, None])[:, 0]


@dataclass(frozen=True)
class Cost:
    """Of a forward and backward, or of a forward alone."""

    seconds: float
    gib: float


def cost(score: Scored, inputs: Inputs, *, backward: bool = True) -> Cost:
    def run() -> None:
        inputs.hidden.grad = inputs.weight.grad = None
        with torch.set_grad_enabled(backward):
            loss = score(inputs.hidden, inputs.weight, inputs.targets).float().mean()
            if backward:
                loss.backward()

    run()
    inputs.hidden.grad = inputs.weight.grad = None
    gc.collect()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(run, warm_up=2, repeats=7)
    gib = (torch.cuda.max_memory_allocated() - held) / GIB
    inputs.hidden.grad = inputs.weight.grad = None
    return Cost(seconds, gib)


class Attempts:
    """Measurements of which one may fail without the others."""

    def __init__(self) -> None:
        self.failed = 0

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception:  # whatever it is, it is told, and the rest is still worth its time
            self.failed += 1
            print(f"FAILED: {what}", flush=True)
            traceback.print_exc(file=sys.stdout)
        gc.collect()
        torch.cuda.empty_cache()


def bench(rows: int, hidden: int, attempts: Attempts) -> None:
    """Costs of all ways to compute a head of one width."""
    inputs, at = Inputs.draw(rows, hidden), f"{hidden} wide"
    costs: dict[str, Cost] = {}

    def measure(name: str, score: Scored, **how: bool) -> None:
        with attempts(f"{name}, {at}"):
            costs[name] = cost(score, inputs, **how)
            print(f"{at}: {name}: {costs[name].seconds * 1e3:.2f} ms, {costs[name].gib:.2f} GiB", flush=True)

    measure("plain", plain)
    measure("plain, logits cast to float32", plain_in_float32)
    if HAS_TE:
        measure("Transformer Engine's", fused)
    measure("without main_grad", ours(CHUNK))
    with inputs.with_main_grad():
        for chunk in CHUNKS:
            measure(f"chunks of {chunk}", ours(chunk))
            measure(f"chunks of {chunk}, in the backward pass", ours(chunk, at_once=False))
        measure("whole, in the backward pass", ours(rows, at_once=False))
        measure(f"chunks of {CHUNK}, entropy", ours(CHUNK, with_entropy=True))
        measure("chunks of 1024, exact logits", ours(1024, exact_logits=True))
        measure("forward alone", ours(1024), backward=False)
        measure("plain again", plain)  # how far a measurement can be trusted
    flops = 2.0 * rows * hidden * VOCAB
    for name, found in costs.items():
        report(f"{name}, {at}", found, costs, flops * (1 if name == "forward alone" else 3))


def report(what: str, found: Cost, costs: dict[str, Cost], flops: float) -> None:
    """Time against plain cross entropy; targets for the trainer's chunks, and for one that has all tokens."""
    if (baseline := costs.get("plain")) is None:
        return
    chunked = what.startswith(f"chunks of {CHUNK}, {what.split(', ')[-1]}")
    target = MOST_TIME if chunked or what.startswith("whole") else None
    details = {
        "ms": round(found.seconds * 1e3, 2),
        "tflops": round(flops / found.seconds / 1e12),
        "gib": round(found.gib, 3),
    }
    ratio = found.seconds / baseline.seconds
    emit("head", f"time, {what}", ratio, "× plain", target=target, more_is_better=False, details=details)
    if chunked:
        emit("head", f"memory, {what}", found.gib, "GiB", target=MOST_MEMORY, more_is_better=False)


def products(rows: int, hidden: int) -> None:
    """The rates of the three matrix products, which are what a head costs, by the tokens of a chunk."""
    inputs = Inputs.draw(rows, hidden)
    states, weight = inputs.hidden.detach(), inputs.weight.detach()
    total = torch.zeros(VOCAB, hidden, device="cuda")
    for chunk in (*CHUNKS, rows):
        part, logits = states[:chunk], torch.randn(chunk, VOCAB, device="cuda", dtype=torch.bfloat16)
        grad = torch.empty_like(part)
        calls: dict[str, Callable[[], object]] = {
            "logits": partial(torch.mm, part, weight.t()),
            "gradient of hidden": partial(torch.mm, logits, weight, out=grad),
            "the same in four parts": partial(_product_in_parts, logits, weight, 4),
            "gradient of weight": partial(add_product, total, logits.t(), part),
            "gradient of weight in bfloat16": partial(torch.mm, logits.t(), part),
        }
        if chunk == CHUNKS[0]:
            calls["exact logits"] = partial(exact_product, part, weight.t())
        flops = 2.0 * chunk * hidden * VOCAB
        rates = {name: round(flops / seconds_each(call) / 1e12) for name, call in calls.items()}
        print(f"products of {chunk} tokens, {hidden} wide, TFLOP/s: {rates}", flush=True)


def _product_in_parts(left: Tensor, right: Tensor, parts: int) -> Tensor:
    """left · right as a sum of products over parts of the inner dimension, which keep more multiprocessors busy."""
    lefts, rights = left.unflatten(1, (parts, -1)).transpose(0, 1), right.unflatten(0, (parts, -1))
    return torch.bmm(lefts, rights, out_dtype=torch.float32).sum(0).to(left.dtype)


class Kernels:
    """The kernels of `softmax` on random logits of their own, and how fast these pass."""

    def __init__(self, rows: int) -> None:
        self.logits = torch.randn(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
        self.gradient = torch.empty_like(self.logits)
        self.targets = torch.randint(0, VOCAB, (rows,), device="cuda")
        self.sums = torch.empty(4, rows, device="cuda")

    def read(self, with_entropy: bool) -> float:
        """Terabytes a second of the kernel that sums logits up."""
        call = partial(
            softmax_kernel.sum_up, self.logits, self.targets, 0, 1.0, self.sums, with_entropy=with_entropy
        )  # fmt: skip
        return self.logits.nbytes / seconds_each(call) / 1e12

    def turn(self, with_entropy: bool) -> float:
        """Of the one that makes them gradients, here in another place, so that they stay what they are."""
        ones = torch.ones_like(self.sums[0])
        slopes = Slopes(ones, ones if with_entropy else None, 12 * ones, 11 * ones)
        call = partial(
            softmax_kernel.turn_into_gradient, self.logits, self.targets, 0, 1.0, slopes, self.gradient
        )  # fmt: skip
        return 2 * self.logits.nbytes / seconds_each(call) / 1e12


def kernels(rows: int, attempts: Attempts) -> None:
    """Both kernels against a plain copy."""
    bound, ours = copy_rate() / 1e12, Kernels(rows)
    for what, kernel in (("kernel that reads logits", ours.read), ("kernel that turns logits", ours.turn)):
        for with_entropy in (False, True):
            with attempts(what):
                limits = {"target": 0.8 * bound, "bound": bound, "against": "plain copy"}
                emit("head", what + ", entropy" * with_entropy, kernel(with_entropy), "TB/s", **limits)


def sweep(rows: int, attempts: Attempts) -> None:
    """The kernels with other blocks, warps and loads ahead than theirs."""
    ours = Kernels(rows)
    for block, warps, stages in READ_WITH:
        changes = patch.multiple(softmax_kernel, SUM_BLOCK=block, SUM_WARPS=warps, SUM_STAGES=stages)
        with attempts(f"read with {block}, {warps}, {stages}"), changes:
            print(f"read {block}, {warps} warps, {stages} stages: {ours.read(False):.2f} TB/s", flush=True)
    for block, warps in TURN_WITH:
        changes = patch.multiple(softmax_kernel, GRADIENT_BLOCK=block, GRADIENT_WARPS=warps)
        with attempts(f"turn with {block}, {warps}"), changes:
            print(f"turn {block}, {warps} warps: {ours.turn(False):.2f} TB/s", flush=True)


def accuracy(hidden: int, attempts: Attempts) -> None:
    """Relative distance to float64 of log-probs and both gradients: ‖found − exact‖ / ‖exact‖."""
    inputs = Inputs.draw(ACCURACY_ROWS, hidden)
    states, weight = (one.detach().double().requires_grad_() for one in (inputs.hidden, inputs.weight))
    expected = (plain(states, weight, inputs.targets), states, weight)
    expected[0].mean().backward()
    ways = {"ours": ours(128), "ours, exact logits": ours(128, exact_logits=True), "plain": plain}
    if HAS_TE:
        ways["Transformer Engine's"] = fused
    for name, score in ways.items():
        with attempts(f"accuracy of {name}"):
            inputs.hidden.grad = inputs.weight.grad = None
            scored = score(inputs.hidden, inputs.weight, inputs.targets)
            scored.float().mean().backward()
            gaps = {
                "hidden": _gap(inputs.hidden.grad, states.grad),
                "weight": _gap(inputs.weight.grad, weight.grad),
                "largest_log_prob": round((scored.double() - expected[0]).abs().max().item(), 6),
            }
            emit("head", f"distance to float64, {name}", _gap(scored, expected[0]), more_is_better=False, details=gaps)


def _gap(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float(f"{((found.double() - expected).norm() / expected.norm()).item():.2e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", nargs="+", type=int, default=[896, 1536, 3584])
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--skip-sweep", action="store_true", help="leave out blocks and warps that are not ours")
    arguments = parser.parse_args()
    require_gpu()
    attempts = Attempts()
    with attempts("accuracy"):
        accuracy(arguments.hidden[0], attempts)
    for hidden in arguments.hidden:
        with attempts(f"head {hidden} wide"):
            bench(arguments.rows, hidden, attempts)
        with attempts(f"products {hidden} wide"):
            products(arguments.rows, hidden)
    with attempts("kernels"):
        kernels(arguments.rows, attempts)
    if not arguments.skip_sweep:
        sweep(arguments.rows, attempts)
    return 1 if attempts.failed else 0


if __name__ == "__main__":
    sys.exit(main())
