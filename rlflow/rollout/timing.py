"""How long replicas sample, and how much of that time the others wait for the slowest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlflow.rollout.lengths import idle_share


@dataclass(frozen=True)
class Generation:
    """One replica's part of a call of `generate`, on its own clock: no rank waits for another to take it."""

    seconds: float
    tokens: int  # sampled


def generation_metrics(parts: Iterable[Generation | None]) -> dict[str, float]:
    """Metrics of one call from every replica's part; None is left out, {} without any.

    `rollout/idle_fraction` is 1 − mean/max of the replicas' seconds.
    """
    done = [part for part in parts if part is not None]
    if not done:
        return {}
    longest = max(part.seconds for part in done)
    return {
        "rollout/idle_fraction": idle_share([part.seconds for part in done]),
        "rollout/seconds_max": longest,
        "rollout/tokens_per_second": sum(part.tokens for part in done) / longest if longest else 0.0,
    }
