"""An engine's weights and optimizer as a megatron-core distributed checkpoint (torch_dist).

The optimizer's state is written in the shape of the parameters ("fully reshardable"): it loads on another layout. Of a
frozen engine only the weights are written. megatron-core takes the default process group for the ranks that write and
read; what it is shown as such are the ranks of the engine's grid.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from megatron_bridge.compat import take_write_results_here
from rlflow.errors import UserError
from rlflow.parallel import active
from rlflow.parallel.sub_world import sub_world
from rlflow.roles import hybrid
from rlflow.roles.engine import Engine
from rlflow.roles.training import Training


def save(engine: Engine, folder: Path) -> None:
    """Write the engine's shards; every rank of the engine's grid calls it with the same folder, no other does."""
    folder.mkdir(parents=True, exist_ok=True)
    with engine.residency.using(weights=True, optimizer=True):
        if engine.training is not None:
            engine.training.gather_parameters()
            _prepare_state(engine.training)
        shards = _shards(engine, is_loading=False)
        take_write_results_here()
        with sub_world(engine.grid.everyone):
            dist_checkpointing.save(shards, str(folder))


def load(engine: Engine, folder: Path, updates: int) -> None:
    """Read the engine's shards, whatever layout wrote them. `updates`: optimizer steps that it has taken.

    Every rank of the engine's grid calls it, no other does.
    """
    with engine.residency.using(weights=True, optimizer=True):
        _load(engine, folder, updates)


def _load(engine: Engine, folder: Path, updates: int) -> None:
    training = engine.training
    if training is not None:
        _prepare_state(training)
    shards = _shards(engine, is_loading=True)
    with sub_world(engine.grid.everyone):
        try:
            state = dist_checkpointing.load(shards, str(folder))
        except (CheckpointingException, CheckpointException) as error:
            reason = str(error).strip().splitlines()[-1]
            message = f"{folder} does not fit the {folder.name} of this run: was it another model's? ({reason})"
            raise UserError("trainer.resume", message) from error
    with active(engine.grid):
        for name, chunk in _chunks(engine).items():
            chunk.load_state_dict(state[name])
        if training is not None:
            with _steps_kept(training):
                training.optimizer.load_state_dict(state["optimizer"])
    if training is not None:
        _restore_step_counts(training, updates)


def _chunks(engine: Engine) -> dict[str, Any]:
    """The rank's stage of the model, or its virtual stages, by their names in a state."""
    return {f"chunk {number}": chunk for number, chunk in enumerate(engine.chunks)}


def _shards(engine: Engine, *, is_loading: bool) -> dict[str, Any]:
    """What megatron writes, or is to fill: which part of which tensor each of this rank's tensors is."""
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "dp_cp_group": engine.grid.groups.dp_cp}
    with active(engine.grid):
        shards = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _chunks(engine).items()}
        if engine.training is not None:
            optimizer = engine.training.optimizer
            shards["optimizer"] = optimizer.sharded_state_dict(dict(shards), is_loading=is_loading, metadata=metadata)
    return shards


def _optimizers(training: Training) -> list[Any]:
    """megatron's distributed optimizers; one without parameters on this rank has nothing inside."""
    return [chained for chained in training.optimizer.chained_optimizers if chained.optimizer is not None]


def _torch_states(training: Training) -> list[tuple[torch.optim.Optimizer, torch.Tensor]]:
    """Every main parameter that torch's AdamW updates; fused implementations need none of what follows."""
    plain = [chained.optimizer for chained in _optimizers(training)]
    adams = [optimizer for optimizer in plain if isinstance(optimizer, torch.optim.Adam)]
    return [(adam, parameter) for adam in adams for group in adam.param_groups for parameter in group["params"]]


def _prepare_state(training: Training) -> None:
    """Optimizers make their state at the first step; loading needs it before, and saving if there was no step yet."""
    for adam, parameter in _torch_states(training):
        if not adam.state[parameter]:
            adam.state[parameter] = {
                # where the fused kernel, which we ask for, reads it
                "step": torch.tensor(0.0, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    for optimizer in _optimizers(training):
        if hybrid.is_hybrid(optimizer.optimizer):
            hybrid.make_state(optimizer.optimizer)
        elif not isinstance(optimizer.optimizer, torch.optim.Adam):
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
            for group in optimizer.optimizer.param_groups:
                group.setdefault("step", 0)  # Transformer Engine's and apex's count per group


@contextlib.contextmanager
def _steps_kept(training: Training) -> Iterator[None]:
    """megatron copies each entry of torch AdamW's state from the checkpoint, which holds no `step`: give it its own."""
    for optimizer in _optimizers(training):
        optimizer._set_main_param_and_optimizer_states = partial(_set_with_step, optimizer)
    try:
        yield
    finally:
        for optimizer in _optimizers(training):
            del optimizer._set_main_param_and_optimizer_states


def _set_with_step(optimizer: Any, model_parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    group, place = optimizer.model_param_group_index_map[model_parameter]
    state = optimizer.optimizer.state[optimizer.optimizer.param_groups[group]["params"][place]]
    step = {"step": state["step"]} if "step" in state else {}
    type(optimizer)._set_main_param_and_optimizer_states(optimizer, model_parameter, tensors | step)


def _restore_step_counts(training: Training, updates: int) -> None:
    """A tensor for each parameter: one that they share would advance many times a step."""
    for optimizer in _optimizers(training):
        if hybrid.is_hybrid(optimizer.optimizer):
            hybrid.finish_loading(optimizer.optimizer, updates)
        elif not isinstance(optimizer.optimizer, torch.optim.Adam):
            for group in optimizer.optimizer.param_groups:
                group["step"] = updates
    for adam, parameter in _torch_states(training):
        adam.state[parameter]["step"] = torch.tensor(float(updates), device=parameter.device)
