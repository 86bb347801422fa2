"""Calls that have a process and all of its GPU to themselves, so that a failure takes no other along."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
