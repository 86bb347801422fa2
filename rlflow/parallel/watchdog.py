"""A thread on every rank that ends the job before a collective's timeout does, and says which rank kept the others.

It publishes where its rank is through the job's store, over a connection of its own: a connection serves one call at a
time, and the main thread's may wait in one for long. Who waits for whom is judged in `stalls`. What the main thread
pays is one assignment a phase.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from types import FrameType, TracebackType

import torch.distributed as dist

from rlflow.parallel.failure import FAILURE_KEY, end_process, is_first_failure
from rlflow.parallel.process import job_group
from rlflow.parallel.stalls import Sign, Stall, describe, find_stall

PREFIX = "rlflow/watchdog"
START = "start"  # the phase before the first that is entered
TICKS = 40  # looks within one timeout
SHORTEST_TICK, LONGEST_TICK = 0.1, 5.0  # seconds
MARGIN = 4  # ticks before the timeout at which the job ends
FAREWELL = 5.0  # seconds in which torchrun ends the processes of a node one of which has failed
OUR_PACKAGES = ("rlflow", "megatron_bridge")


class Watchdog:
    """Watches while it is entered as a context; every rank of the default group enters it at the same point.

    A rank that another rank waits for is named when half of `timeout_seconds` has passed, and again, once, shortly
    before the end of it; then the process leaves with code 1. So do all others, those of other machines too, when one
    rank has failed or the store is gone; a rank alone, too, when the launcher that serves its store has been killed.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._tick = min(max(timeout_seconds / TICKS, SHORTEST_TICK), LONGEST_TICK)
        group, store = job_group()
        self._rank, self._size = group.rank(), group.size()
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._started = time.monotonic()
        self._phase = (0, START, 0.0)  # one tuple, so that the thread never sees half a change
        self._moved: tuple[object, float] = (None, 0.0)
        self._groups: dict[tuple[int, str], str] = {}
        self._main = threading.main_thread().ident
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def enter(self, phase: str) -> None:
        """Note that the main thread is in another phase; `a/b` is a part of the phase `a`."""
        number, before, _ = self._phase
        further = phase.split("/")[0] != before.split("/")[0]
        self._phase = (number + further, phase, self._now())

    def __enter__(self) -> Watchdog:
        self._publish()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if error is None:
            self._thread.join()  # the store may go as soon as this rank has left

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(self._tick):
                self._look()
        except dist.DistError as error:
            self._leave_lost_store(error)

    def _look(self) -> None:
        sign = self._publish()
        if self._store.check([FAILURE_KEY]):
            time.sleep(FAREWELL)
            end_process(1)
        if sign.told - sign.still >= self._timeout / 2 and self._is_judge(sign.told):
            self._judge()

    def _publish(self) -> Sign:
        sign = self._sign()
        self._store.set(f"{PREFIX}/{self._rank}", sign.to_json())
        return sign

    def _sign(self) -> Sign:
        now = self._now()
        number, phase, since = self._phase
        stack = _stack(sys._current_frames().get(self._main or 0))
        collectives = _collectives(self._groups)
        state = (number, phase, [(id(frame.f_code), frame.f_lasti) for frame in stack], collectives)
        if state != self._moved[0]:
            self._moved = (state, now)
        return Sign(self._rank, now, number, phase, since, self._moved[1], _place(stack), collectives)

    def _is_judge(self, now: float) -> bool:
        """Whether this rank is the one of those waiting that reads what all have published, about once a tick."""
        return self._store.add(f"{PREFIX}/judges/{int(now / self._tick)}", 1) == 1

    def _judge(self) -> None:
        texts = self._store.multi_get([f"{PREFIX}/{rank}" for rank in range(self._size)])
        now = self._now()
        stall = find_stall(map(Sign.from_json, texts), now, self._timeout / 2)
        if stall is None:
            return
        if stall.seconds >= self._timeout - MARGIN * self._tick:
            self._end_job(stall, now)
        elif self._store.add(f"{PREFIX}/warned/{stall.key}", 1) == 1:
            what = f"the job ends when it is {self._timeout - MARGIN * self._tick:.0f} s"
            print(f"warning: {self._describe(stall, now)}\n{what}", file=sys.stderr, flush=True)

    def _end_job(self, stall: Stall, now: float) -> None:
        if is_first_failure(self._store):
            advice = "where a rank may work so long, a larger trainer.timeout_seconds lets the others wait"
            what = f"the job ends, for trainer.timeout_seconds is {self._timeout:g}; {advice}"
            print(f"{self._describe(stall, now)}\n{what}", file=sys.stderr, flush=True)
        end_process(1)

    def _describe(self, stall: Stall, now: float) -> str:
        return describe(stall, now, silence=5 * self._tick)

    def _leave_lost_store(self, error: dist.DistError) -> None:
        """The process that serves the store has ended, so the job has; a message for each machine that still runs."""
        if self._stopping.wait(FAREWELL):
            return
        if os.environ.get("LOCAL_RANK", "0") == "0":
            where = f"{os.environ.get('MASTER_ADDR', 'node 0')}:{os.environ.get('MASTER_PORT', '')}"
            what = f"the job's store, at {where}, is gone, and with it what started the job: {error}"
            print(f"rank {self._rank} ends in phase '{self._phase[1]}': {what}", file=sys.stderr, flush=True)
        end_process(1)

    def _now(self) -> float:
        return time.monotonic() - self._started


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _place(stack: list[FrameType]) -> str:
    """The innermost function of ours, and of all: `rlflow.rewards.scorer.score:58 > judge.ask:9`."""
    ours = next((frame for frame in stack if _module(frame).split(".")[0] in OUR_PACKAGES), None)
    shown = [frame for frame in (ours, stack[0] if stack else None) if frame is not None]
    words = [f"{_module(frame)}.{frame.f_code.co_name}:{frame.f_lineno}" for frame in shown]
    return " > ".join(dict.fromkeys(words))


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _collectives(names: dict[tuple[int, str], str]) -> dict[str, int]:
    """How many collectives this rank has begun in each group of more than one rank.

    `names` keeps what groups were called when they were first seen: inside `sub_world` their ranks have other numbers.
    """
    world = dist.distributed_c10d._world
    counted = {}
    for group in list(world.pg_map):
        members = world.pg_group_ranks.get(group, {})  # none where the main thread has just ended the group
        if len(members) > 1:
            given = world.pg_names.get(group, "")
            # Groups of different ranks may have been given one name.
            name = names.setdefault((id(group), given), f"{given}@{min(members)}")
            counted[name] = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return counted
