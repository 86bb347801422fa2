"""What a steady decode knows of its requests, as arrays with a row for each: no Python runs for a single token.

Which steps are launched, and what a finished row means to vLLM, is left to `decoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]  # numbers of rows


@dataclass(frozen=True)
class Start:
    """Where a request stands when the steady decode begins: its next step computes its last token."""

    prompt: int  # tokens of its prompt
    sampled: int  # tokens of its response so far, at least one
    max_tokens: int  # of its response, at which it ends
    min_tokens: int  # of its response, before which no stop id ends it


class DecodeRows:
    """Requests that take a token a step: how many steps each was launched for, and what they gave.

    Args:
        starts: one of each request.
        stop_ids: token ids that end a response, the same for all.
        steps: most tokens that a row takes here.
    """

    def __init__(self, starts: Sequence[Start], stop_ids: Sequence[int], steps: int) -> None:
        prompts, self._sampled, limits, self._minimum = (
            np.array([getattr(start, name) for start in starts], dtype=np.int64)
            for name in ("prompt", "sampled", "max_tokens", "min_tokens")
        )
        self._stop_ids = np.array(stop_ids, dtype=np.int64)
        self._limit = limits - self._sampled
        self._most = np.minimum(self._limit, steps)
        self._computed = prompts + self._sampled - 1
        self._launched, self._taken = np.zeros_like(self._limit), np.zeros_like(self._limit)
        self._ended = np.zeros(len(starts), dtype=bool)
        self._stopped = np.zeros(len(starts), dtype=bool)
        width = int(self._most.max(initial=0))
        self._tokens = np.zeros((len(starts), width), dtype=np.int64)
        self._log_probs = np.zeros((len(starts), width), dtype=np.float32)

    def open(self) -> Rows:
        """The rows that can be launched for another token: not ended as far as is known, and with room for it."""
        return np.flatnonzero(~self._ended & (self._launched < self._most))

    def computed(self, rows: Rows) -> NDArray[np.int64]:
        """How many tokens of each row have keys and values when its next step begins."""
        return self._computed[rows] + self._launched[rows]

    def sampled(self, rows: Rows) -> NDArray[np.int64]:
        """How many tokens each row's response has when its next step begins, those under way included."""
        return self._sampled[rows] + self._launched[rows]

    def launch(self, rows: Rows) -> None:
        """Count a step of these rows, whose tokens `take` is given in the order of the launches."""
        self._launched[rows] += 1

    def take(self, rows: Rows, tokens: NDArray[np.int64], log_probs: NDArray[np.float32]) -> Rows:
        """Keep what the oldest launched step gave, except to rows that had ended by then; returns those it ends."""
        going = ~self._ended[rows]
        rows, tokens, log_probs = rows[going], tokens[going], log_probs[going]
        places = self._taken[rows]
        self._tokens[rows, places] = tokens
        self._log_probs[rows, places] = log_probs
        self._taken[rows] += 1
        may_stop = self._sampled[rows] + places + 1 >= self._minimum[rows]
        stopped = np.isin(tokens, self._stop_ids) & may_stop
        self._stopped[rows] = stopped
        ended = stopped | (self._taken[rows] >= self._limit[rows])
        self._ended[rows] = ended
        return rows[ended]

    def stopped(self, row: int) -> bool:
        """Whether a row ended by a stop id, which is its last token."""
        return bool(self._stopped[row])

    def tokens(self, row: int) -> list[int]:
        """The ids that a row was given here."""
        found: list[int] = self._tokens[row, : self._taken[row]].tolist()
        return found

    def log_probs(self, row: int) -> list[float]:
        """The log-probs of `tokens`."""
        found: list[float] = self._log_probs[row, : self._taken[row]].tolist()
        return found

    def going(self) -> Rows:
        """The rows that have not ended."""
        return np.flatnonzero(~self._ended)
