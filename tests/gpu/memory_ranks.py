"""What a GPU runs in the tests of what lies where: offloading between phases, and the optimizer on the host."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlflow.algorithms import PolicyObjective
from rlflow.checkpoint import Checkpoints, State
from rlflow.config.schema import Optimizer
from rlflow.roles import Engine
from rlflow.roles.residency import PARTS, storages_of
from tests.gpu.ranks import TEMPERATURE, long_batch, make_engine


@dataclass
class Stay:
    """An engine's way to the host and back, and its next step beside that of one that stayed."""

    parameters: int = 0
    allocated: dict[str, int] = field(default_factory=dict)  # bytes of the GPU that torch has given out
    free: dict[str, int] = field(default_factory=dict)  # bytes of the GPU that other allocators can have
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_equal: bool = False
    next_steps: list[dict[str, float]] = field(default_factory=list)


def leave_and_come_back(folder: Path) -> Stay:
    seen = Stay()
    stayed, engine = (trained_engine(folder, offload=leaves) for leaves in (False, True))
    seen.parameters = sum(parameter.numel() for parameter in engine.chunks[0].parameters())
    held = [as_bytes(storage).cpu() for part in ("weights", "optimizer") for storage in storages_of(engine, part)]
    torch.cuda.empty_cache()
    note(seen, "there")
    for number in range(2):  # the first time takes the host's memory too
        seen.seconds[f"away {number}"] = timed(engine.residency.offload)
        note(seen, "away")
        seen.seconds[f"back {number}"] = timed(engine.residency.load)
    assert engine.residency.on_device == PARTS
    now = [as_bytes(storage) for part in ("weights", "optimizer") for storage in storages_of(engine, part)]
    seen.bytes_equal = all(torch.equal(before, after.cpu()) for before, after in zip(held, now, strict=True))
    seen.next_steps = [step(stayed), step(engine)]
    return seen


def trained_engine(folder: Path, **options: Any) -> Engine:
    """An engine after one step, so that it has moments."""
    engine = make_engine(folder, torch.bfloat16, optimizer=Optimizer(lr=1e-4), **options)
    step(engine)
    return engine


def step(engine: Engine) -> dict[str, float]:
    return engine.train_step(long_batch(), PolicyObjective(), temperature=TEMPERATURE, lr=1e-4)


def note(seen: Stay, moment: str) -> None:
    seen.allocated[moment], seen.free[moment] = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@dataclass
class HostLesson:
    """Steps with a share of the optimizer on the host."""

    metrics: list[dict[str, float]]
    allocated: int  # bytes of the GPU after the steps
    seconds: float  # of a step
    resumed: list[dict[str, float]]  # the next step, of the run itself and of one that read its checkpoint; or none


def learn_on_host(folder: Path, share: float, root: Path | None) -> HostLesson:
    """Three steps, and where there is a folder for a checkpoint a fourth, which is also made from it."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    settings = Optimizer(lr=1e-4, cpu_offload=share)
    engine = make_engine(folder, torch.bfloat16, optimizer=settings)
    metrics = [step(engine) for _ in range(2)]
    seconds = timed(lambda: metrics.append(step(engine)))
    allocated = torch.cuda.memory_allocated() - before
    resumed = []
    if root is not None:
        checkpoints = Checkpoints(root, keep=1)
        saved = checkpoints.save({"actor": engine}, State(step=3, updates={"actor": 3}))
        other = make_engine(folder, torch.bfloat16, optimizer=settings)
        checkpoints.load({"actor": other}, saved)
        resumed = [[step(each) for _ in range(2)][-1] for each in (engine, other)]  # the second sees the first's counts
    return HostLesson(metrics, allocated, seconds, resumed)
