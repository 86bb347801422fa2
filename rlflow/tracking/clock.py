"""Where the time of a step goes: named phases, and the rest."""

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
    """Times the phases of one step after another; what passes between two steps counts for the second, as `track`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start: float | None = None
        self._last_end: float | None = None
        self._seconds: dict[str, float] = {}
        self._running = False
        self.current = "start"  # what is being done, or was when an exception left the phase

    def begin(self) -> None:
        now = self._now()
        self._start = now if self._last_end is None else self._last_end
        self._seconds = {} if self._last_end is None else {"track": now - self._last_end}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds inside for `name`; a phase that comes twice in a step adds up. RuntimeError if nested."""
        if self._running:
            raise RuntimeError(f"phase {name} begins inside phase {self.current}: its time would count twice")
        self._running, self.current = True, name
        start = self._now()
        try:
            yield
            wait_for_device()
            self.current = f"after {name}"
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start
            self._running = False

    def end(self) -> dict[str, float]:
        """Seconds as `time/step`, each `time/<phase>`, and `time/other` for what no phase covers."""
        if self._start is None:
            raise RuntimeError("a step ends that has not begun")
        self._last_end = self._now()
        total = self._last_end - self._start
        self._start = None
        times = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return {"time/step": total, **times, "time/other": total - sum(self._seconds.values())}
