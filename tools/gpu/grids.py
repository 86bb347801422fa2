"""Training on grids of several GPUs beside one of them: losses, MFU of each GPU, scaling efficiency, memory.

    python -m tools.gpu.grids [--gpus 2] [--shapes 1.5b] [--grids tp tp-sp pp pp-vp dp cp tp-dp tp-pp] [--limit-s 560]

Each grid has all of the GPUs, and processes of its own. With the weights and samples of one GPU it makes `STEPS` steps:
the loss before and after them and the norm of the first gradient may differ from one GPU's by what bfloat16 rounds
(`tools.gpu.rounding`). Then steps are timed, without the optimizer and with it, with the same samples as on one GPU on
each data-parallel replica: efficiency, a grid's tokens a second over those of as many single GPUs, is that of weak
scaling where there are several, else of strong scaling. Micro-batches are 16 sequences of 1,024 tokens on every grid,
four for each GPU and at most 16; all rows are scored, while stages of a pipeline are cut for half of them. Seconds and
memory are those of the rank that takes most. Two GPUs take about 6 minutes, four or eight 8.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import mean

import torch
import torch.distributed as dist

from megatron_bridge.families import Architecture, load_architecture
from rlflow import parallel
from rlflow.algorithms import PolicyObjective
from rlflow.batch import Batch
from rlflow.config.check_grid import divisors, grid_faults
from rlflow.config.roles import replica_size
from rlflow.config.schema import Optimizer, Role
from rlflow.roles import Engine
from tools.gpu.alone import Attempts
from tools.gpu.calibrate import architecture
from tools.gpu.machine import leave_multicast_off, require_gpu, visible_gpus
from tools.gpu.report import GIB, emit
from tools.gpu.rounding import bound_of_gradients, bound_of_loss
from tools.gpu.runs import MODELS, deadline
from tools.gpu.shapes import SHAPES, Shape, save
from tools.gpu.steps import LEARNING_RATE, STEPS, Work, loss_of, most_memory, speed_of, without_optimizer
from tools.gpu.timing import GpuWork, gpu_work, seconds_of

LEARNED = 4  # micro-batches that losses are of
MOST_MICRO_BATCHES = 16  # that are timed
GRID_SECONDS = 150.0  # at most, of a grid
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # as `rlflow train` sets it with tensor parallelism


@dataclass(frozen=True)
class Case:
    """A model's grid on all of so many GPUs."""

    role: Role
    gpus: int

    @property
    def replicas(self) -> int:
        return self.gpus // replica_size(self.role)

    @property
    def environment(self) -> dict[str, str]:
        """What its processes need to be started with."""
        return ONE_QUEUE if self.role.tensor_parallel_size > 1 else {}

    def without_waits(self, micro_batches: int) -> float | None:
        """Efficiency of a pipeline of equal stages whose messages take no time; None without a pipeline."""
        turns = micro_batches * self.role.virtual_pipeline_parallel_size
        waits = self.role.pipeline_parallel_size - 1
        return round(turns / (turns + waits), 3) if waits else None

    def __str__(self) -> str:
        role = self.role
        sizes = [f"TP{role.tensor_parallel_size}", "SP" if role.sequence_parallel else ""]
        sizes += [f"PP{role.pipeline_parallel_size}", f"VP{role.virtual_pipeline_parallel_size}"]
        sizes += [f"CP{role.context_parallel_size}", f"DP{self.replicas}"]
        return " × ".join(size for size in sizes if size and size[2:] != "1") or "one GPU"


ONE = Case(Role(), 1)

KINDS: dict[str, Callable[[int, int], Role]] = {  # of GPUs and the model's layers
    "tp": lambda gpus, layers: Role(tensor_parallel_size=gpus),
    "tp-sp": lambda gpus, layers: Role(tensor_parallel_size=gpus, sequence_parallel=True),
    "pp": lambda gpus, layers: Role(pipeline_parallel_size=gpus),
    "pp-vp": lambda gpus, layers: Role(
        pipeline_parallel_size=gpus, virtual_pipeline_parallel_size=_fewest_chunks(layers // gpus)
    ),
    "dp": lambda gpus, layers: Role(),
    "cp": lambda gpus, layers: Role(context_parallel_size=gpus),
    "tp-dp": lambda gpus, layers: Role(tensor_parallel_size=2, sequence_parallel=True),
    "tp-pp": lambda gpus, layers: Role(tensor_parallel_size=2, sequence_parallel=True, pipeline_parallel_size=2),
}


def _fewest_chunks(layers: int) -> int:
    """Into how many equal chunks the layers of a stage are cut; 2 where they cannot be."""
    return next((count for count in divisors(layers) if count > 1), 2)


def choose(kinds: Iterable[str], gpus: int, arch: Architecture) -> Iterator[Case]:
    """The grids of these kinds that the model can have, each once; tells of those that it cannot have."""
    seen = set()
    for kind in kinds:
        case = Case(KINDS[kind](gpus, arch.layers), gpus)
        fault = next(grid_faults("actor", case.role, arch, gpus), None)
        if fault is not None:
            print(f"{kind} on {gpus} GPUs left out: {fault}", flush=True)
        elif case not in seen:
            seen.add(case)
            yield case


@dataclass(frozen=True)
class Measured:
    """What a rank measured, or all of a grid's: seconds of medians, bytes, nats."""

    forward_backward: float  # of all micro-batches, with the collectives that complete gradients
    whole_step: float  # the same with clipping, AdamW and its collectives
    loss_before: float  # mean of −log-probs of a replica's samples
    loss_after: float  # after `STEPS` steps on them
    grad_norm: float  # of the first of these
    peak: int  # of tensors
    reserved: int  # the most that torch took of the GPU for them
    gpu: GpuWork | None  # of the forward and backward


def measure(folder: Path, shape: Shape, case: Case, work: Work) -> Measured:
    """What this rank of a grid finds with the random model in `folder`, which is written if need be. Collective."""
    parallel.initialize(120, 0)
    if dist.get_rank() == 0:
        save(folder, shape)
    dist.barrier()
    engine = _engine(folder, case.role, work)
    loss_before, loss_after, grad_norm = _learn(engine, work.batch(shape, LEARNED))
    train = partial(engine.train_step, work.batch(shape, work.micro_batches), PolicyObjective(), lr=LEARNING_RATE)
    with without_optimizer(engine):
        forward_backward = seconds_of(train, warm_up=1, repeats=3)
    whole_step = seconds_of(train, warm_up=0, repeats=3)
    peak, reserved = most_memory()
    with without_optimizer(engine):
        gpu = gpu_work(train)  # last: the profiler slows down what comes after it
    return Measured(forward_backward, whole_step, loss_before, loss_after, grad_norm, peak, reserved, gpu)


def _engine(folder: Path, role: Role, work: Work) -> Engine:
    """With the weights in `folder`; logits are kept for the backward pass."""
    grid = parallel.Grid(
        tensor=role.tensor_parallel_size, pipeline=role.pipeline_parallel_size, context=role.context_parallel_size
    )
    engine = Engine(
        load_architecture(folder), grid, dtype=torch.bfloat16, micro_batch_tokens=work.rows,
        optimizer=Optimizer(lr=LEARNING_RATE), virtual_pipeline=role.virtual_pipeline_parallel_size,
        share_prompts=False, sequence_parallel=role.sequence_parallel, logprob_chunk_tokens=work.rows,
    )  # fmt: skip
    engine.load_hf(folder)
    return engine


def _learn(engine: Engine, batch: Batch) -> tuple[float, float, float]:
    """Loss of this replica's samples before and after `STEPS` steps on all, and the first gradient's norm."""
    grid = engine.grid
    own = batch.select(torch.arange(len(batch)).tensor_split(grid.dp)[grid.replica(grid.rank)])
    before = loss_of(engine, own)
    steps = [engine.train_step(own, PolicyObjective(), lr=LEARNING_RATE) for _ in range(STEPS)]
    return before, loss_of(engine, own), engine.tell(steps)[0]["engine/grad_norm"]


def of_grid(ranks: Sequence[Measured]) -> Measured:
    """Seconds and memory of the rank that takes most, losses of all samples, the first rank's GPU."""
    most = ("forward_backward", "whole_step", "peak", "reserved")
    return replace(
        ranks[0],
        **{name: max(getattr(rank, name) for rank in ranks) for name in most},
        # Replicas have equally many samples, and ranks.
        **{name: mean(getattr(rank, name) for rank in ranks) for name in ("loss_before", "loss_after")},
    )


def report_speed(name: str, case: Case, found: Measured, work: Work) -> None:
    """MFU of each GPU, of forward and backward and of a whole step."""
    tokens = case.replicas * work.micro_batches * work.rows
    optimizer = {"optimizer_s": round(found.whole_step - found.forward_backward, 4)}
    for what, seconds, details in (
        ("", found.forward_backward, _details(found)),
        (" whole step", found.whole_step, optimizer),
    ):
        mfu, speed = speed_of(SHAPES[name], work.length, tokens, 3, seconds, case.gpus)
        emit("grids", f"MFU a GPU {name} {case}{what}", mfu, details=speed | details)
    if found.gpu is not None:
        print(f"costliest kernels of {name} {case}, rank 0:", *found.gpu.costliest, sep="\n", flush=True)


def _details(found: Measured) -> dict[str, float]:
    """What the first rank's GPU did in a forward and backward, and the memory of the rank that took most."""
    kernels: dict[str, float] = {}
    if found.gpu is not None:
        kernels = {"kernels": found.gpu.kernels, "busy": round(found.gpu.busy / found.forward_backward, 3)}
    return kernels | {"peak_gib": round(found.peak / GIB, 2), "reserved_gib": round(found.reserved / GIB, 2)}


def report_scaling(name: str, case: Case, found: Measured, one: Measured, work: Work) -> None:
    """A grid's tokens a second over those of as many single GPUs, beside what its pipeline allows at best."""
    steps, passes = (
        round(case.replicas * alone / (case.gpus * seconds), 4)
        for alone, seconds in (
            (one.whole_step, found.whole_step),
            (one.forward_backward, found.forward_backward),
        )
    )
    kind, bound = "weak" if case.replicas > 1 else "strong", case.without_waits(work.micro_batches)
    emit(
        "grids", f"scaling efficiency {name} {case}", steps, bound=bound, against="equal stages" if bound else "",
        details={"scaling": kind, "forward_and_backward": passes, "micro_batches": work.micro_batches},
    )  # fmt: skip


def report_losses(name: str, case: Case, found: Measured, one: Measured, work: Work) -> None:
    """How far a grid is from one GPU, against what bfloat16 explains."""
    before, turned = bound_of_loss(SHAPES[name], LEARNED * work.rows), bound_of_gradients(SHAPES[name])
    after = before + turned * abs(one.loss_before - one.loss_after)
    for what, value, expected, bound, unit in (
        ("loss before", found.loss_before, one.loss_before, before, "nats"),
        (f"loss after {STEPS} steps", found.loss_after, one.loss_after, after, "nats"),
        ("relative norm of the first gradient", found.grad_norm, one.grad_norm, turned, ""),
    ):
        distance = abs(value - expected) / (1.0 if unit else expected)
        emit(
            "grids", f"{what} {name} {case}, from one GPU's", distance, unit, target=bound, more_is_better=False,
            details={"grid": round(value, 6), "one_gpu": round(expected, 6)},
        )  # fmt: skip


def bench(name: str, folder: Path, cases: Sequence[Case], work: Work, until: float) -> int:
    """One GPU and these grids of a shape, each for itself; returns how many failed."""
    gpus, one, failed = max(case.gpus for case in cases), None, 0
    in_order = [ONE, *sorted(cases, key=lambda case: len(case.environment))]
    for environment, alike in groupby(in_order, lambda case: case.environment):
        some = list(alike)
        attempts = Attempts(len(some), GRID_SECONDS, processes=gpus, until=until, environment=environment)
        for case in some:
            ranks = attempts(f"{name} {case}", partial(measure, folder, SHAPES[name], case, work), case.gpus)
            if ranks is not None:
                found = of_grid(ranks)
                one = found if case == ONE else one
                report(name, case, found, one, work)
        attempts.close()
        failed += attempts.failed
    return failed


def report(name: str, case: Case, found: Measured, one: Measured | None, work: Work) -> None:
    """All that is known of a grid, beside what one GPU measured; None: that failed."""
    report_speed(name, case, found, work)
    if one is None:
        print(f"{name} {case}: one GPU failed, there is nothing to compare with", flush=True)
    elif case != ONE:
        report_scaling(name, case, found, one, work)
        report_losses(name, case, found, one, work)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's arguments, by default those that the program was started with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="of each grid, at least 2; default: all that are visible")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5b"])
    parser.add_argument("--grids", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--limit-s", type=float, default=560.0)
    arguments = parser.parse_args(words)
    if arguments.gpus is not None and arguments.gpus < 2:
        parser.error(f"argument --gpus: a grid needs at least 2, not {arguments.gpus}")
    return arguments


def main() -> int:
    arguments = parse()
    until = deadline(arguments.limit_s)
    require_gpu(arguments.gpus or 2)
    leave_multicast_off()
    failed, gpus = 0, arguments.gpus or visible_gpus()
    work = Work(micro_batches=min(4 * gpus, MOST_MICRO_BATCHES))
    for name in arguments.shapes:
        if cases := list(choose(arguments.grids, gpus, architecture(name))):
            failed += bench(name, arguments.models / name, cases, work, until)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
