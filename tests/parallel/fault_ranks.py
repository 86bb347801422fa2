"""Ranks with faults: what each does, and a way to run them that costs little and shows exit code and output.

The ranks are forked from one server that has imported everything. Their store is served by this process, as a torchrun
agent does; unlike an agent it ends no rank when another has failed, so that what ranks do by themselves is seen.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlflow import parallel
from tests.workers import free_port

KILLED = -signal.SIGKILL


@dataclass
class Ended:
    """How the ranks of a job ended."""

    codes: list[int]
    errors: str
    "what all wrote to standard error"
    seconds: float
    "from the end of the first to that of the last"


def run(
    size: int, function: Callable[..., None], *args: Any, folder: Path, own_store: bool = False,
    stopped: int | None = None, store_until: Path | None = None,
) -> Ended:  # fmt: skip
    """Run `function(*args)` as a job of `size` ranks, each a machine to itself.

    With `own_store` rank 0 serves the store, not this process. The rank `stopped` never ends by itself: it is killed
    when the others have ended. The store is gone once there is a file `store_until`, as if its agent had been killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rlflow.checkpoint", "tests.parallel.fault_ranks"])
    port = free_port()
    store = None if own_store else dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    files = [folder / f"{function.__name__}-{rank}.err" for rank in range(size)]
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, own_store, file, function, args))
        for rank, file in enumerate(files)
    ]
    for process in ranks:
        process.start()
    while store_until is not None and not store_until.exists():
        time.sleep(0.05)
    if store_until is not None:
        store = None
    alone = {process.sentinel for rank, process in enumerate(ranks) if rank != stopped}
    alone -= set(wait(list(alone), 60)[:1])
    first = time.monotonic()
    while alone and (ended := wait(list(alone), 60)):
        alone -= set(ended)
    seconds = time.monotonic() - first
    for process in ranks:
        process.kill()
        process.join()
    del store
    codes = [process.exitcode or 0 for process in ranks]
    return Ended(codes, "".join(file.read_text() for file in files), seconds)


def _rank(
    rank: int, size: int, port: int, own_store: bool, errors: Path, function: Callable[..., None], args: tuple
) -> None:
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", TORCH_CPP_LOG_LEVEL="ERROR",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE=str(not own_store),
    )  # fmt: skip
    function(*args)


def meet() -> None:
    dist.all_reduce(torch.ones(1))


def slow_generate(timeout: float, seconds: float) -> None:
    """Rank 1 samples for `seconds`, the others wait for it in the next phase."""
    parallel.initialize(timeout, 0)
    with parallel.Watchdog(timeout) as watchdog, parallel.reporting(lambda: "exchange"):
        watchdog.enter("generate")
        time.sleep(seconds if dist.get_rank() == 1 else 0)
        watchdog.enter("exchange")
        meet()
    parallel.shutdown()


def hang_in_phase(timeout: float) -> None:
    """All enter the update; rank 0 never comes to its collective."""
    parallel.initialize(timeout, 0)
    group = dist.new_group([0, 1])
    with parallel.Watchdog(timeout) as watchdog, parallel.reporting(lambda: "update"):
        watchdog.enter("update")
        meet()
        watchdog.enter("update/critic")
        if dist.get_rank() == 0:
            time.sleep(3600)
        dist.all_reduce(torch.ones(1), group=group)


def work_long_together(timeout: float) -> None:
    """All evaluate for longer than the timeout, one a little longer."""
    parallel.initialize(timeout, 0)
    with parallel.Watchdog(timeout) as watchdog, parallel.reporting(lambda: "evaluate"):
        watchdog.enter("evaluate")
        time.sleep(timeout + 0.5 * (1 + dist.get_rank()))
        meet()
    parallel.shutdown()


def stop_rank_0(timeout: float) -> None:
    """Rank 0's process is stopped by a signal while it samples."""
    parallel.initialize(timeout, 0)
    with parallel.Watchdog(timeout) as watchdog, parallel.reporting(lambda: "update"):
        watchdog.enter("generate")
        if dist.get_rank() == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGSTOP)
        watchdog.enter("update")
        meet()


def lose(victim: int) -> None:
    """A rank is killed, as the kernel does where memory lacks; the others only compute."""
    parallel.initialize(60, 0)
    with parallel.Watchdog(4) as watchdog, parallel.reporting(lambda: "update"):
        watchdog.enter("update")
        meet()
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


def compute(begun: Path) -> None:
    """A rank that meets nobody, and says by a file that it is at work."""
    parallel.initialize(60, 0)
    with parallel.Watchdog(4) as watchdog, parallel.reporting(lambda: "update"):
        watchdog.enter("update")
        begun.touch()
        time.sleep(3600)


def raise_on_rank_1(error: BaseException) -> None:
    """Rank 1 raises, rank 0 is busy and meets nobody."""
    parallel.initialize(60, 0)
    with parallel.Watchdog(4) as watchdog, parallel.reporting(lambda: "update/actor"):
        watchdog.enter("update/actor")
        if dist.get_rank() == 1:
            raise error
        time.sleep(3600)


def fail_in(phase: str, model: Path, folder: Path) -> None:
    """Rank 1, the last stage of two, raises in its part of what both do in a phase, where rank 0 waits for it."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.checkpoint import Checkpoints, State, store
    from rlflow.config.schema import Optimizer
    from tests.roles.runs import Case, canonical, make_engine
    from tests.roles.samples import random_batch

    engine = make_engine(model, Case("", 2, {"pipeline": 2}), Optimizer())
    learn = partial(engine.train_step, random_batch(), PolicyObjective(), temperature=1.0, lr=1e-3)
    learn()  # an optimizer that has taken no step has no state to save
    with parallel.Watchdog(60) as watchdog, parallel.reporting(lambda: phase):
        watchdog.enter(phase)
        if dist.get_rank() == 1:
            engine.chunks[0].register_forward_pre_hook(_raise)
            engine.parameters_by_name = _raise
            store._random_states = _raise
        if phase == "update":
            learn()
        elif phase == "sync":
            canonical(engine)
        else:
            Checkpoints(folder, 0).save({"actor": engine}, State())


def _raise(*args: Any) -> None:
    raise RuntimeError("the last straw")
