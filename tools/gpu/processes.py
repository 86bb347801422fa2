"""Programs that may take so long and no longer, with all that they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

FAREWELL_SECONDS = 5.0  # between asking a program to end and ending it


def run_within(
    command: Sequence[str], log: Path, seconds: float, *, folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> int | None:  # fmt: skip
    """Run a program, its output into a file; its status, or None where it was ended for the time it took."""
    with running(command, log, folder=folder, environment=environment) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def running(
    command: Sequence[str], log: Path, *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program at work, its output into a file; when the block ends so does it, with all that it started."""
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            started = descendants(process.pid)  # those in sessions of their own, too
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(FAREWELL_SECONDS)
            for descendant in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendant.kill()
        _signal(process.pid, signal.SIGKILL)  # whatever of its session is left
        process.wait()


def descendants(process: int) -> list[psutil.Process]:
    """What a process has started, and what that has; [] where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).children(recursive=True)
    return []


def _signal(session: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)
