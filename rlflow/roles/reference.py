"""Lets a reference model follow the actor: as a copy of it, or as a moving average of its weights.

When that happens is the trainer's matter. Where both lie on one grid no byte moves between ranks; elsewhere the bridge
brings what a rank's shard needs, unit by unit for an average, so that no rank ever holds a second shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.execute import Transfer, connect
from megatron_bridge.layouts.layout import Layout, canonical_units
from megatron_bridge.layouts.loader import Portion
from rlflow.parallel import device, ranks_per_node
from rlflow.roles.engine import Engine


@torch.no_grad()
def update(reference: Engine, actor: Engine, ema: float | None) -> None:
    """reference ← ema · reference + (1 − ema) · actor, or the actor where `ema` is None. Collective over the job.

    The average is computed in float32 and kept in the reference's dtype: in bfloat16 a change by less than 1/512 of a
    weight may be rounded away each time, so update rarely there rather than with an `ema` near 1.
    """
    with actor.residency.using(weights=True), reference.residency.using(weights=True):
        _update(reference, actor, ema)


def _update(reference: Engine, actor: Engine, ema: float | None) -> None:
    source, target = actor.parameters_by_name(), reference.parameters_by_name()
    if actor.layout == reference.layout:
        for name, weight in target.items():
            _follow(weight, source[name], ema)
    elif ema is None:
        _connect(actor, actor.layout, source, reference.layout, target).run()
    else:
        for unit in canonical_units(actor.architecture):
            _average_unit(Portion(frozenset({unit.canonical})), reference, actor, source, target, ema)


def _follow(weight: Tensor, actor: Tensor, ema: float | None) -> None:
    weight.copy_(actor if ema is None else ema * weight.float() + (1 - ema) * actor.float())


def _average_unit(
    unit: Portion, reference: Engine, actor: Engine, source: Mapping[str, Tensor], target: Mapping[str, Tensor],
    ema: float,
) -> None:  # fmt: skip
    """Bring a unit of the actor to where the reference has it; layers alike are sent by the first one's plan."""
    rank, first = dist.get_rank(), unit.first_alike(actor.layout, reference.layout)
    held = [source[name] for name in unit.of(actor.layout).parameters(rank)]
    weights = [target[name] for name in unit.of(reference.layout).parameters(rank)]
    arriving = [torch.empty(weight.shape, dtype=torch.float32, device=device()) for weight in weights]
    sent, taken = first.of(actor.layout), first.of(reference.layout)
    _connect(
        actor, sent, dict(zip(sent.parameters(rank), held, strict=True)),
        taken, dict(zip(taken.parameters(rank), arriving, strict=True)),
    ).run()  # fmt: skip
    for weight, arrived in zip(weights, arriving, strict=True):
        _follow(weight, arrived, ema)


def _connect(
    actor: Engine, sent: Layout, source: Mapping[str, Tensor], taken: Layout, target: Mapping[str, Tensor]
) -> Transfer:
    """The planner keeps the last plans, so that those of an update need not be made anew for the next one."""
    return connect(
        sent, source, taken, target, rank=dist.get_rank(), dtype=actor.dtype, ranks_per_node=ranks_per_node()
    )
