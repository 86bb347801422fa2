"""A reward function that has its rank killed, once, in the middle of a phase: for runs that are to lose a rank.

The rank kills itself from a thread; its peers cannot tell that from the kernel's doing where memory lacks. What becomes
of the job is left to `tools.gpu.faults`. Nothing heavy is imported: the command looks at reward functions first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORK = {"generate": "generate", "update": "train_step"}
"""Phase → the function of ours in which the main thread does its work."""
LOOK = 0.001  # seconds between looks at the main thread


def kill_rank(
    response: str, answer: Any, *, row: dict[str, Any], rank: int, phase: str, behind: str, seconds: float, note: str
) -> float:
    """0; where the folder `behind` exists and the file `note` does not, `rank` is killed in the next `phase`.

    It has then worked for `seconds` in the phase, or for half as long where that once was longer than the phase. In
    `note` are left the time of its end (`time.monotonic`) and where its main thread was.
    """
    if os.environ.get("RANK") == str(rank) and Path(behind).is_dir() and not Path(note).exists():
        Path(note).touch()
        threading.Thread(target=_kill, args=(phase, seconds, Path(note)), daemon=True).start()
    return 0.0


def _kill(phase: str, seconds: float, note: Path) -> None:
    while True:
        if _place(phase):
            time.sleep(seconds)
            if place := _place(phase):
                break
            seconds /= 2
        time.sleep(LOOK)
    note.write_text(json.dumps({"at": time.monotonic(), "place": place}))
    os.kill(os.getpid(), signal.SIGKILL)


def _place(phase: str) -> str:
    """The innermost function of ours on the main thread, as `module.function:line`; "" outside of the phase's work."""
    ours = list(_our_frames())
    return ours[0][1] if any(name == WORK[phase] for name, _ in ours) else ""


def _our_frames() -> Iterator[tuple[str, str]]:
    """Name and place of each function of ours on the main thread, innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module.split(".")[0] == "rlflow":
            yield name, f"{module}.{name}:{frame.f_lineno}"
        frame = frame.f_back
