"""Sampling on one GPU: rlflow's rollout beside vLLM alone, on the same prompts with the same settings.

    python -m tools.gpu.rollout [--shapes 0.5b 1.5b] [--variants ours plain] [--limit-s 400]

1,024 sequences of 256 + 1,024 tokens and 256 of 64 + 256, eight to a prompt, temperature 1, log-probs of the sampled
tokens. Each variant starts in a process of its own, all of a shape's at the same time, and they sample one after
another. 0.5b takes about 150 s, 1.5b about 150 s.

The bound counts what decoding must read: the weights once a step, every sequence's keys and values, at .8 of the
memory's bandwidth.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.gpu.machine import require_gpu
from tools.gpu.report import emit
from tools.gpu.runs import MODELS
from tools.gpu.sampling import REPLY, Work, ask
from tools.gpu.shapes import SHAPES, Shape, save
from tools.gpu.whole_step import REACHED_BANDWIDTH

LARGE, SMALL = Work(1024, 256, 1024), Work(256, 64, 256)
WARM_UP = Work(1024, 256, 8)
PROFILE = Work(1024, 256, 1024, profile=True)
TARGET = 0.95
"""Of vLLM alone."""
VARIANTS = {"0.5b": ("ours", "plain", "triton", "defaults"), "1.5b": ("ours", "plain")}  # what fits on the GPU at once
START_SECONDS = 240.0


class Failed(RuntimeError):
    """A variant did not do what it was asked to; what it printed is shown already."""


class Variant:
    """An engine in a process of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        numbers = [str(number) for number in (LARGE.prompt, LARGE.response, LARGE.sequences)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.gpu.sampling", name, str(folder), *numbers], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                self._replies.put(json.loads(line.removeprefix(REPLY)))
            elif line.strip() and "it/s]" not in line and "Capturing" not in line:
                print(f"{self.name}: {line}", end="", flush=True)
        self._replies.put({"failed": True})

    def reply(self, seconds: float) -> dict[str, Any]:
        """The next reply, within so many seconds."""
        try:
            found = self._replies.get(timeout=max(1.0, seconds))
        except queue.Empty:
            raise Failed(f"{self.name} said nothing for {seconds:.0f} s") from None
        if found.get("failed"):
            raise Failed(f"{self.name} failed")
        return found

    def do(self, work: Work, seconds: float) -> dict[str, Any]:
        """Have it do some work."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(ask(work))
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(f"{self.name} is gone") from error
        return self.reply(seconds)

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Bench:
    """All variants of a shape, one after another."""

    def __init__(self, name: str, folder: Path, variants: Sequence[str], until: float) -> None:
        self.name, self._until = name, until
        self.failures: list[str] = []
        self.speeds: dict[tuple[str, Work], float] = {}
        self._variants = [Variant(variant, folder) for variant in variants]

    def run(self) -> None:
        """Start all, then time each."""
        started = [variant for variant in self._variants if self._tries(variant, self._start)]
        for variant in started:
            self._tries(variant, self._time)
        for variant in self._variants:
            variant.close()

    def _tries(self, variant: Variant, call: Any) -> bool:
        try:
            call(variant)
        except Failed as failure:
            self.failures.append(f"{self.name}: {failure}")
            print(f"FAILED: {self.name}: {failure}", flush=True)
            return False
        return True

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _start(self, variant: Variant) -> None:
        seconds = variant.reply(min(START_SECONDS, self._left()))["started"]
        emit("rollout", f"{self.name} {variant.name} start", round(seconds, 1), "s", more_is_better=False)

    def _time(self, variant: Variant) -> None:
        variant.do(WARM_UP, self._left())
        for work in (LARGE, SMALL):
            seen = variant.do(work, self._left())
            if seen["tokens"] != work.sequences * work.response:
                raise Failed(f"{variant.name} sampled {seen['tokens']} tokens")
            self.speeds[variant.name, work] = seen["tokens"] / seen["seconds"]
            self._report(variant.name, work, seen["seconds"])
        if variant.name in ("ours", "triton"):
            print(f"{self.name} {variant.name}: what the GPU does in a prefill and a few steps:", flush=True)
            print(*variant.do(PROFILE, self._left())["lines"], sep="\n", flush=True)

    def _report(self, variant: str, work: Work, seconds: float) -> None:
        bound = work.sequences * work.response / memory_seconds(SHAPES[self.name], work)
        emit(
            "rollout", f"{self.name} {variant} {words(work)}", round(self.speeds[variant, work]), "tokens/s",
            bound=round(bound), against="memory",
            details={"s": round(seconds, 2), "ms_per_step": round(1e3 * seconds / work.response, 2)},
        )  # fmt: skip

    def compare(self) -> None:
        """Ours over each other variant."""
        for (variant, work), speed in self.speeds.items():
            if variant != "ours" and ("ours", work) in self.speeds:
                target = TARGET if variant == "plain" else None
                ratio = self.speeds["ours", work] / speed
                emit("rollout", f"{self.name} {words(work)}, ours : {variant}", round(ratio, 3), target=target)


def words(work: Work) -> str:
    return f"{work.sequences:,} × {work.prompt}+{work.response:,}"


def memory_seconds(shape: Shape, work: Work) -> float:
    """The least time in which decoding reads weights, keys and values of all steps."""
    return shape.decoding_bytes(work.sequences, work.prompt, work.response) / REACHED_BANDWIDTH


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS["0.5b"], help="default: all that a shape has")
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--limit-s", type=float, default=400.0)
    arguments = parser.parse_args()
    require_gpu()
    until = time.monotonic() + arguments.limit_s
    failures = []
    for name in arguments.shapes:
        bench = Bench(name, save(arguments.models / name, name), arguments.variants or VARIANTS[name], until)
        bench.run()
        bench.compare()
        failures += bench.failures
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
