"""The fence around megatron-core's global state: `active(grid)` shows it one role's groups and random generators.

Some of megatron-core reads `parallel_state` and the RNG tracker whatever groups it is given. Every call into it happens
inside `active`; outside, the globals are as if megatron had never been initialised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from rlflow.parallel.grid import Grid

# parallel_state's name for every group of a collection; a version that lacks one of the names has no use for it
_GLOBAL_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "intra_dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "intra_expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}
_GLOBAL_RANKS = {
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_PIPELINE_GLOBAL_RANKS": "pp",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp",
    "_EMBEDDING_GLOBAL_RANKS": "embd",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "pos_embd",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
}
TRACKER_SEED = 2026  # dropout is never used and weights are loaded, so that what is drawn does not matter


@contextlib.contextmanager
def active(grid: Grid) -> Iterator[None]:
    """Show megatron-core the grid's groups and the role's RNG tracker states; put back what was there before."""
    globals_before = {name: getattr(parallel_state, name) for name in _globals(grid)}
    states_before = get_cuda_rng_tracker().get_states()
    try:
        _install(_globals(grid))
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()
        if grid.rng_states is None:
            _seed_tracker()
        else:
            get_cuda_rng_tracker().set_states(grid.rng_states)
        yield
    finally:
        grid.rng_states = get_cuda_rng_tracker().get_states()
        get_cuda_rng_tracker().set_states(states_before)
        _install(globals_before)


def _globals(grid: Grid) -> dict[str, Any]:
    if grid.parallel_state is None:
        values: dict[str, Any] = {name: getattr(grid.groups, group) for name, group in _GLOBAL_GROUPS.items()}
        for name, group in _GLOBAL_RANKS.items():
            members = getattr(grid.groups, group)
            values[name] = None if members is None else dist.get_process_group_ranks(members)
        grid.parallel_state = {name: value for name, value in values.items() if hasattr(parallel_state, name)}
    return grid.parallel_state


def _install(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(parallel_state, name, value)


def _seed_tracker() -> None:
    """Give the tracker the role's states without moving the process's own generator."""
    own = torch.cuda.get_rng_state()
    model_parallel_cuda_manual_seed(TRACKER_SEED, force_reset_rng=True)
    torch.cuda.set_rng_state(own)
