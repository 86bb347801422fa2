"""An engine's weights and optimizer as a megatron-core distributed checkpoint (torch_dist).

The optimizer's state is written in the shape of the parameters ("fully reshardable"): it loads on another layout.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from rlflow.roles.engine import Engine


def _metadata(engine: Engine) -> dict[str, Any]:
    return {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": engine.grid.groups.dp_cp}


def _optimizers(engine: Engine) -> list[torch.optim.Optimizer]:
    chained = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return [optimizer.optimizer for optimizer in chained if optimizer.optimizer is not None]


def save(engine: Engine, folder: Path) -> None:
    """Write the engine's shards; every rank of the job calls it with the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model = engine.model.sharded_state_dict(metadata=_metadata(engine))
    state = {"model": model, "optimizer": engine.optimizer.sharded_state_dict(model, metadata=_metadata(engine))}
    dist_checkpointing.save(state, str(folder))


def load(engine: Engine, folder: Path, updates: int) -> None:
    """Read the engine's shards, whatever layout wrote them. `updates`: optimizer steps taken so far."""
    _prepare_moments(engine)
    model = engine.model.sharded_state_dict(metadata=_metadata(engine))
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=True, metadata=_metadata(engine))
    state = dist_checkpointing.load({"model": model, "optimizer": optimizer}, str(folder))
    engine.model.load_state_dict(state["model"])
    engine.optimizer.load_state_dict(state["optimizer"])
    _restore_step_counts(engine, updates)


def _prepare_moments(engine: Engine) -> None:
    """torch's AdamW makes its state at the first step; loading needs it before. `step` is restored apart."""
    for optimizer in _optimizers(engine):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _restore_step_counts(engine: Engine, updates: int) -> None:
    """torch's AdamW counts steps in a tensor of each parameter: a shared one would advance many times a step."""
    for optimizer in _optimizers(engine):
        for group in optimizer.param_groups:
            if "step" in group:  # fused optimizers count per group
                group["step"] = updates
        if isinstance(optimizer, torch.optim.Adam):
            for state in optimizer.state.values():
                state["step"] = torch.tensor(float(updates))
