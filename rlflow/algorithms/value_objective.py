"""The critic's objective: the clipped value loss, weighted and summed, with its metrics.

Returns, old values and weights are given; who computes them, and over which micro-batches, is the trainer's matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.masked import masked


@dataclass(frozen=True)
class ValueObjective:
    """Σ weight · ½·max((V − R)², (clip(V, V_old ± value_clip) − R)²) over the tokens of a micro-batch.

    Every token inside the mask trains the critic, whatever its advantage.
    """

    value_clip: float | None = 0.5  # None: (V − R)² alone

    def __call__(
        self, values: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss, and metrics to be combined by `metrics.combine`.

        `values` are float32 [R] with gradient; `fields` holds [R] tensors "mask", "weights", "returns" and
        "old_values". `entropy`, which a critic has not, is there for the signature that all objectives share.
        """
        mask = fields["mask"]
        current, returns, old = (masked(given, mask) for given in (values, fields["returns"], fields["old_values"]))
        loss = (fields["weights"] * self._token_loss(current, returns, old)).sum()
        metrics = {"loss": loss, "tokens": mask.sum(), "clipped": self._clipped(current, old).sum()}
        metrics |= _moments(current.detach().double(), returns.double())
        return loss, {name: value.detach().double() for name, value in metrics.items()}

    def _token_loss(self, values: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
        squared = (values - returns).square()
        if self.value_clip is not None:
            near_old = values.clamp(old_values - self.value_clip, old_values + self.value_clip)
            squared = torch.maximum(squared, (near_old - returns).square())
        return squared / 2

    def _clipped(self, values: Tensor, old_values: Tensor) -> Tensor:
        """Where the value has moved by more than the clip, whether or not that cuts its gradient: bool [R]."""
        moved = (values - old_values).abs()
        return torch.zeros_like(moved, dtype=torch.bool) if self.value_clip is None else moved > self.value_clip


def _moments(values: Tensor, returns: Tensor) -> dict[str, Tensor]:
    """Sums over tokens from which `metrics.summarize` makes means and the explained variance."""
    errors = returns - values
    return {
        "values": values.sum(),
        "returns": returns.sum(),
        "returns_squared": returns.square().sum(),
        "value_errors": errors.sum(),
        "value_errors_squared": errors.square().sum(),
    }
