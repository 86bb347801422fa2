"""Scores every sample with every configured reward and mixes them into one number.

A score of None, NaN or ±inf makes a sample unscorable: its reward is None, which advantages leave out. What functions
compute is theirs; how scores become advantages is left to `algorithms`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlflow.config.schema import Reward
from rlflow.errors import UserError
from rlflow.rewards.resolve import RewardFunction, resolve

if TYPE_CHECKING:
    from rlflow.batch.sample import Sample

MAX_ERROR_FRACTION = 0.2
RECENT_SCORES = 512
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """One reward function with its arguments bound."""

    name: str
    function: RewardFunction
    weight: float


class Scorer:
    """The rewards of a run; counts the errors of its functions and stops the run where they are no exception."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.sources = [Source(reward.label, resolve(reward), reward.weight) for reward in rewards]
        self._failed: deque[bool] = deque(maxlen=RECENT_SCORES)

    def score(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Fill `reward` and `scores` of each sample; returns how many were unscorable, and how many calls failed.

        A function that raises loses its own sample only. Raises UserError where it returns something that is no score,
        or where more than a fifth of the recent calls, and more than one, raised.
        """
        errors = sum(self._score_one(sample) for sample in samples)
        unscorable = sum(sample.reward is None for sample in samples)
        return {"reward/errors": float(errors), "reward/unscorable": float(unscorable)}

    def _score_one(self, sample: Sample) -> int:
        total, errors = 0.0, 0
        for source in self.sources:
            try:
                result = source.function(sample.text, sample.prompt.answer, row=sample.prompt.row)
            except Exception as error:  # whatever a user's function raises must not lose the batch
                score, metrics, errors = None, dict[str, float](), errors + 1
                self._count(source, error, sample)
            else:
                score, metrics = _read(source.name, result)
                self._failed.append(False)
            sample.scores |= metrics if score is None else {source.name: score, **metrics}
            if source.weight:
                total = math.nan if score is None else total + source.weight * score
        sample.reward = None if math.isnan(total) else total
        return errors

    def _count(self, source: Source, error: Exception, sample: Sample) -> None:
        if not any(self._failed):
            log.warning("reward %s failed on %s", source.name, sample.prompt.id, exc_info=error)
        self._failed.append(True)
        if sum(self._failed) > max(1, MAX_ERROR_FRACTION * len(self._failed)):
            raise UserError(
                f"reward {source.name}",
                f"failed in {sum(self._failed)} of the last {len(self._failed)} calls, the last on "
                f"{sample.prompt.id} with {type(error).__name__}: {error}",
            ) from error


def _read(name: str, result: Any) -> tuple[float | None, dict[str, float]]:
    """Score and further metrics of what a function returned; raises UserError where it is of no such form."""
    if not isinstance(result, dict):
        return _finite(name, result), {}
    if "score" not in result:
        raise UserError(f"reward {name}", f'returned a dict without "score": {sorted(result)}')
    metrics = {f"{name}/{key}": _finite(f"{name}/{key}", value) for key, value in result.items() if key != "score"}
    present = {key: value for key, value in metrics.items() if value is not None}
    return _finite(name, result["score"]), present


def _finite(name: str, value: Any) -> float | None:
    """`value` as a float, None where it is None, NaN or infinite."""
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of numpy or torch
    if not isinstance(value, int | float):
        raise UserError(f"reward {name}", f"must be a number or None, not {type(value).__name__}: {value!r:.80}")
    return float(value) if math.isfinite(value) else None
