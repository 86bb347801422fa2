"""Persistent processes for distributed tests, on CPUs with gloo or one a GPU with NCCL.

A pool starts each process once and reuses it for every test and every world size, because importing torch and
megatron-core costs more than most tests. Every call gets a default process group of its own; a failing rank's traceback
reaches the test.
"""

import contextlib
import datetime
import gc
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

FAREWELL = 2.0  # seconds that other ranks have to tell of their failure too
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=180)  # a process that starts on a busy machine keeps the others waiting


def free_port() -> int:
    """A port of this machine that nobody listens at, below those that Linux gives to connections by itself."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankFailure(AssertionError):
    """A rank of a distributed test raised; the message is its traceback."""


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    """A worker: run the calls that arrive until the pipe closes."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            pipe.send(_call(*pipe.recv()))


def _call(
    backend: str, rank: int, size: int, store: str, function: Callable[..., Any], args: tuple
) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    try:
        device = torch.device("cuda", rank) if backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT,
            device_id=device,
        )  # fmt: skip
        result = function(*args)
        if dist.is_initialized():
            dist.barrier()  # a rank that left early would break the connections of one that is still joining
        return True, result
    except Exception:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if backend == "gloo" and "vllm" in sys.modules:
            # Every start of vLLM looks for garbage five times, each time among a million objects of libraries: a second
            # in all. Frozen they are passed over; the end of the next engine thaws and collects what is garbage.
            gc.freeze()


class World:
    """`world(n, function, *args)` runs a module-level function on n ranks and returns their results in rank order.

    With "nccl" each rank has the GPU of its number; results must not lie on it. Workers have `environment` over this
    process's own.
    """

    def __init__(self, backend: str = "gloo", environment: Mapping[str, str] | None = None) -> None:
        self._backend = backend
        self._environment = dict(environment or {})
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, size: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        self.start(size)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                call = (self._backend, rank, size, str(Path(folder) / "store"), function, args)
                with contextlib.suppress(BrokenPipeError):  # a process that died is met when its answer is waited for
                    self._workers[rank][1].send(call)
            return self._collect(size, timeout)

    def start(self, size: int) -> None:
        """Have so many processes, of which the missing ones begin to import the program's main module and torch.

        A call starts those that it lacks. Nothing is waited for, and no GPU is touched before a call.
        """
        while len(self._workers) < size:
            self._add_worker()

    def _add_worker(self) -> None:
        ours, theirs = self._context.Pipe()
        # Not a daemon: megatron-core saves checkpoints from child processes. A worker ends when its pipe closes.
        process = self._context.Process(target=_serve, args=(theirs, self._environment))
        process.start()
        theirs.close()
        self._workers.append((process, ours))

    def _collect(self, size: int, timeout: float) -> list[Any]:
        """Results by rank. After a failure the peers may wait in a collective for ever, so all workers are replaced."""
        ranks = {self._workers[rank][1]: rank for rank in range(size)}
        results: list[Any] = [None] * size
        failures: list[str] = []
        while ranks:
            ready = wait(list(ranks), timeout)
            if not ready and failures:
                break
            if not ready:
                self.close()
                raise RankFailure(f"ranks {sorted(ranks.values())} of {size} gave no answer within {timeout:.0f} s")
            for pipe in ready:
                rank = ranks.pop(pipe)  # type: ignore[call-overload]
                fine, results[rank] = self._receive(pipe, rank)  # type: ignore[arg-type]
                if not fine:
                    failures.append(f"rank {rank} of {size}:\n{results[rank]}")
            # A peer that lost its connection may answer before the rank whose failure it was: hear them all.
            timeout = FAREWELL if failures else timeout
        if failures:
            self.close()
            raise RankFailure("\n".join(failures))
        return results

    @staticmethod
    def _receive(pipe: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return False, f"the process of rank {rank} died"

    def close(self, patience: float = 0) -> None:
        """End the workers; those that are idle by themselves within `patience` seconds, with what they started."""
        for _, pipe in self._workers:
            pipe.close()
        for process, _ in self._workers:
            process.join(patience)
            process.kill()
            process.join()
        self._workers = []
