"""Calls that have processes and all of their GPUs to themselves, so that a failure takes no other along."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from tests.workers import RankFailure, World

Found = TypeVar("Found")


def attempt(
    world: World, what: str, call: Callable[..., Found], *given: object, ranks: int = 1, until: float,
    seconds: float = math.inf,
) -> list[Found] | None:  # fmt: skip
    """What a module-level function returns on each of the first ranks; None, and why, where it failed or took too long.

    It may take so many seconds, and none behind `until`, a time of `time.monotonic`.
    """
    left = min(seconds, until - time.monotonic())
    try:
        if left > 0:
            return world(ranks, call, *given, timeout=left)
        why: object = "no time was left"
    except RankFailure as failure:
        why = failure
    print(f"FAILED: {what}\n{why}", flush=True)
    return None


def alone(what: str, call: Callable[..., Found], *given: object, until: float) -> Found | None:
    """The same of one rank in a process of its own."""
    with contextlib.closing(World("nccl")) as world:
        found = attempt(world, what, call, *given, until=until)
    return None if found is None else found[0]


class Attempts:
    """So many `calls` in GPU processes of their own, which start while the call before computes; counts failures.

    Each call may take so many seconds, and none longer than `until`, a time of `time.monotonic`. It gets `processes`,
    one a GPU, with `environment` over this process's own. Those of the next call import, and leave the GPUs alone.
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
        self._started: list[World] = []
        self._start()

    def __call__(self, what: str, call: Callable[[], Found], ranks: int = 1) -> list[Found] | None:
        """What the call returns on each of the first `ranks` processes; None where it failed or took too long."""
        with contextlib.closing(self._started.pop()) as world:
            self._start()
            found = attempt(world, what, call, ranks=ranks, until=self._until, seconds=self._seconds)
        self.failed += found is None
        return found

    def _start(self) -> None:
        """Start the processes of the next call, if there is one."""
        if self._calls > 0:
            self._calls -= 1
            self._started.append(World("nccl", self._environment))
            self._started[-1].start(self._processes)

    def close(self) -> None:
        """End the processes of calls that were not made."""
        for world in self._started:
            world.close()
