"""Calls that have processes and all of their GPUs to themselves, so that a failure takes no other along."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tests.workers import RankFailure, World

Found = TypeVar("Found")


def alone(what: str, call: Callable[..., Found], *given: object, until: float) -> Found | None:
    """What a module-level function returns; None, and why, where it failed or took until after `until`.

    `until` is a time of `time.monotonic`.
    """
    world = World("nccl")
    try:
        return world(1, call, *given, timeout=max(1.0, until - time.monotonic()))[0]
    except RankFailure as failure:
        print(f"FAILED: {what}\n{failure}", flush=True)
        return None
    finally:
        world.close()


class Attempts:
    """So many `calls` in GPU processes of their own, which start while the call before computes; counts failures.

    Each call may take so many seconds, and none longer than `until`, a time of `time.monotonic`. It gets `processes`,
    one a GPU, with `environment` over this process's own; they have imported the program's main module.
    """

    def __init__(
        self,
        calls: int,
        seconds: float,
        *,
        processes: int = 1,
        until: float = math.inf,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.failed = 0
        self._calls, self._seconds, self._until = calls, seconds, until
        self._processes, self._environment = processes, environment or {}
        self._starter = ThreadPoolExecutor(1)
        self._started: list[tuple[World, Future[Any]]] = []
        self._start()

    def __call__(self, what: str, call: Callable[[], Found], ranks: int = 1) -> list[Found] | None:
        """What the call returns on each of the first `ranks` processes; None where it failed or took too long."""
        if time.monotonic() >= self._until:
            self.failed += 1
            print(f"FAILED: {what}\nno time was left", flush=True)
            return None
        world, started = self._started.pop()
        self._start()
        try:
            started.result()
            return world(ranks, call, timeout=max(1.0, min(self._seconds, self._until - time.monotonic())))
        except RankFailure as failure:
            self.failed += 1
            print(f"FAILED: {what}\n{failure}", flush=True)
            return None
        finally:
            world.close()

    def _start(self) -> None:
        """Start the processes of the next call, if there is one."""
        if self._calls > 0:
            self._calls -= 1
            world = World("nccl", self._environment)
            self._started.append((world, self._starter.submit(world, self._processes, _begin)))

    def close(self) -> None:
        """End the processes of calls that were not made."""
        for world, started in self._started:
            wait([started])
            world.close()
        self._starter.shutdown()


def _begin() -> None:
    """Nothing: a process that can call this has imported the main module."""
