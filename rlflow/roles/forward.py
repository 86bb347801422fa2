"""One forward over one micro-batch: what a model needs to see of it, what the last stage says of its tokens, the loss.

A rank of a context-parallel group computes its rows alone and then knows the outcome for all. Which micro-batches go
through which stages in which order is the engine's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlflow.batch import MicroBatch
from rlflow.models import PackedInput, Scoring, pack_input
from rlflow.models.context import gather_predictions
from rlflow.models.routing import expert_rows
from rlflow.parallel import Grid


class Scored(NamedTuple):
    """What the last stage says of a micro-batch of R response tokens and, where asked for, of its S samples."""

    tokens: Tensor  # float32 [R], log-probs or values
    entropy: Tensor | None = None  # float32 [R]
    last: Tensor | None = None  # float32 [S], values at the last response tokens


Objective = Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Loss:
    """An objective on the response tokens of one micro-batch."""

    objective: Objective
    fields: Mapping[str, Tensor]  # [R, …] each

    @classmethod
    def of(cls, objective: Objective, micro_batch: MicroBatch, fields: Mapping[str, Tensor]) -> Loss:
        """`fields` are those of the micro-batch's tokens."""
        return cls(objective, {**fields, "sample_index": micro_batch.sample_index})

    def __call__(self, scored: Scored) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss and its metrics."""
        return self.objective(scored.tokens, scored.entropy, self.fields)

    @property
    def is_per_token(self) -> bool:
        return getattr(self.objective, "is_per_token", False)

    def slopes_of(self, rows: slice, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The loss's gradient by some tokens' log-probs and entropies; for a loss per token."""
        with torch.enable_grad():
            tokens = log_probs.detach().requires_grad_()
            spread = None if entropy is None else entropy.detach().requires_grad_()
            loss, _ = self.objective(tokens, spread, {name: values[rows] for name, values in self.fields.items()})
            inputs = [tokens] if spread is None else [tokens, spread]
            found = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
        return found[0], None if spread is None else found[1]


@dataclass(frozen=True)
class Forward:
    """How the micro-batches of one pass go through a stage's chunk."""

    grid: Grid
    dtype: torch.dtype
    temperature: float = 1.0
    with_entropy: bool = False
    routing: Tensor | None = None  # the experts of the batch's tokens, as `expert_rows` wants them

    def __call__(self, micro_batch: MicroBatch, chunk: Any, loss: Loss | None = None) -> tuple[Tensor, Scored | None]:
        """Run a chunk, wrapped or not; returns what it passes on, and on the last stage what it says.

        `loss` is what its backward pass will be of.
        """
        local = micro_batch.for_context_rank(self.grid.here["cp"], self.grid.cp) if self.grid.cp > 1 else micro_batch
        model = _unwrapped(chunk)
        packed = self._pack(local, model, loss)
        output = chunk(local.token_ids[None], local.position_ids[None], None, packed_seq_params=packed)
        if not model.post_process:
            return output, None
        scored = self._score(output, micro_batch, local)
        return scored.tokens, scored

    def _pack(self, local: MicroBatch, model: Any, loss: Loss | None) -> PackedInput:
        slopes_of = None
        if loss is not None and loss.is_per_token and self.grid.cp == 1:  # else each rank scores some of its tokens
            slopes_of = loss.slopes_of
        scoring = Scoring(local.predict_at, local.targets, self.temperature, self.with_entropy, slopes_of)
        packed = pack_input(local, model.ropes, self.dtype, scoring)
        packed.experts = expert_rows(local, self.routing)
        return packed

    def _score(self, output: Any, whole: MicroBatch, local: MicroBatch) -> Scored:
        if isinstance(output, tuple):
            log_probs, entropy = output
            entropy = entropy if entropy is None else self._everywhere(entropy, local.scored, len(whole.token_index))
            return Scored(self._everywhere(log_probs, local.scored, len(whole.token_index)), entropy)
        tokens = self._everywhere(output[local.predict_at], local.scored, len(whole.token_index))
        if whole.last_rows is None:
            return Scored(tokens)
        last = self._everywhere(output[local.last_rows], local.last_scored, len(whole.last_rows))
        return Scored(tokens, last=last)

    def _everywhere(self, values: Tensor, places: Tensor | None, total: int) -> Tensor:
        """What this rank's rows say, beside what the other context-parallel ranks' say."""
        if places is None:
            return values
        return gather_predictions(values, places, total, self.grid.groups.cp)


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
