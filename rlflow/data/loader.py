"""The order in which prompts are trained on, and where in it a run stands.

Every rank holds a loader of its own and draws the same global batches; who computes what is decided later, so a run
continues on any number of ranks.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.batch.sample import Prompt
from rlflow.data.prompts import PromptSet
from rlflow.errors import UserError

NAMES = {
    "prompts": "{} prompts in data.train, this run has {}",
    "seed": "trainer.seed {}, this run has {}",
    "shuffle": "data.shuffle {}, this run has {}",
}
"""What a run that goes on must have as the run had it."""


class Loader:
    """Endless batches of `batch_size` different prompts; the rest of an epoch that fills no batch is left out."""

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, seed: int, shuffle: bool = True) -> None:
        """Raises UserError where there are fewer prompts than one batch needs."""
        if len(prompts) < batch_size:
            before = prompts.rows_read if isinstance(prompts, PromptSet) else len(prompts)
            raise UserError(
                "data.train",
                f"has {len(prompts)} usable prompts of {before} rows read, fewer than "
                f"trainer.prompts_per_step = {batch_size}",
            )
        self.prompts, self.batch_size, self.seed, self.shuffle = prompts, batch_size, seed, shuffle
        self.epoch = 0
        self.position = 0
        self._order = self._permutation()

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass over the data."""
        return len(self.prompts) // self.batch_size

    def next(self) -> list[Prompt]:
        """The next global batch, the same on every rank."""
        if self.position + self.batch_size > len(self.prompts):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._permutation()
        indices = self._order[self.position : self.position + self.batch_size]
        self.position += self.batch_size
        return [self.prompts[index] for index in indices]

    def state(self) -> dict[str, Any]:
        """Plain values from which `load_state` continues with the next batch."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state(self, state: dict[str, Any], source: Path) -> None:
        """Continue where `state` was taken, which `source` holds.

        Raises UserError where data, seed or shuffling are not the same.
        """
        for key, value in self._identity().items():
            if state[key] != value:
                raise UserError("trainer.resume", f"{source} was written with {NAMES[key].format(state[key], value)}")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._permutation()

    def _identity(self) -> dict[str, Any]:
        return {"prompts": len(self.prompts), "seed": self.seed, "shuffle": self.shuffle}

    def _permutation(self) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order
