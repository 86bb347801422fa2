"""Where the time of a step goes: named phases, their parts, and the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def wait_for_device() -> None:
    """Let queued GPU work count for the phase that queued it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class StepClock:
    """Times the phases of one step after another; what passes between two steps counts for the second, as `track`.

    `entered` is told what `current` becomes.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, entered: Callable[[str], None] = lambda phase: None
    ) -> None:
        self._now = now
        self._entered = entered
        self._start: float | None = None
        self._last_end: float | None = None
        self._seconds: dict[str, float] = {}
        self._covered = 0.0  # seconds in phases, those in parts of them counted once
        self._running: list[str] = []  # the phase at work and its parts
        self.current = "start"  # what is being done, or was when an exception left the phase

    def begin(self) -> None:
        now = self._now()
        self._start = now if self._last_end is None else self._last_end
        self._covered = now - self._start
        self._seconds = {} if self._last_end is None else {"track": self._covered}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside for `name`; a phase that comes twice in a step adds up.

        A part of a phase has its name before a slash, `update/critic` of `update`. RuntimeError for any other nesting.
        """
        if self._running and name.rpartition("/")[0] != self._running[-1]:
            raise RuntimeError(f"phase {name} begins inside phase {self.current}: its time would count twice")
        self._running.append(name)
        self._enter(name)
        start = self._now()
        try:
            yield
            wait_for_device()
            self._enter(self._running[-2] if len(self._running) > 1 else f"after {name}")
        finally:
            self._running.pop()
            seconds = self._now() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            self._covered += 0.0 if self._running else seconds

    def _enter(self, phase: str) -> None:
        self.current = phase
        self._entered(phase)

    def end(self) -> dict[str, float]:
        """Seconds as `time/step`, each `time/<phase>`, and `time/other` for what no phase covers."""
        if self._start is None:
            raise RuntimeError("a step ends that has not begun")
        self._last_end = self._now()
        total = self._last_end - self._start
        self._start = None
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {"time/step": total, **times, "time/other": total - self._covered}
