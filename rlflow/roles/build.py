"""The models of a run, put on their grids: each role's groups, engine and first weights, from the configuration.

Roles of the same ranks and sizes share a grid, because communicators cost memory and start-up time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layouts import MegatronLayout
from megatron_bridge.score import with_score_head
from rlflow.config.ranks import rank_list
from rlflow.config.roles import role_path, role_sections
from rlflow.config.schema import Actor, Config, Optimizer, Role
from rlflow.parallel import Grid, derive_seed
from rlflow.roles.engine import Engine


@dataclass(frozen=True)
class Roles:
    """The engines of a run; None for a role that it has not."""

    actor: Engine
    critic: Engine | None = None
    reference: Engine | None = None
    reward_model: Engine | None = None

    def by_name(self) -> dict[str, Engine]:
        """The roles that exist, by name, the actor first."""
        return {name: engine for name, engine in vars(self).items() if engine is not None}


def build_roles(config: Config, architecture: Architecture, placed: MegatronLayout | None = None) -> Roles:
    """Every role that the configuration names, with its weights. Collective over the job.

    `placed` is the actor's layout with the order of ranks that the bridge chose for it.
    """
    grids = Grids(config)
    engines = {}
    for name, role in role_sections(config).items():
        grid = grids.of(role, placed if name == "actor" else None)
        engines[name] = build_engine(config, name, architecture, grid)
    return Roles(**engines)


class Grids:
    """The grids of a run's roles, each made once."""

    def __init__(self, config: Config) -> None:
        self._timeout = config.trainer.timeout_seconds
        self._made: dict[tuple, Grid] = {}

    def of(self, role: Role, placed: MegatronLayout | None = None) -> Grid:
        """The process groups of a role, its ranks and their order as in `placed` if that is given. Collective."""
        asked = _shape(role)
        if asked not in self._made:
            self._made[asked] = Grid(
                placed.ranks if placed else rank_list(role.ranks, dist.get_world_size()),
                tensor=role.tensor_parallel_size,
                pipeline=role.pipeline_parallel_size,
                context=role.context_parallel_size,
                expert=role.expert_parallel_size,
                expert_tensor=role.expert_tensor_parallel_size,
                order=placed.order if placed else role.order,
                timeout_seconds=self._timeout,
            )
        return self._made[asked]


def _shape(role: Role) -> tuple:
    return (
        rank_list(role.ranks, dist.get_world_size()), role.order, role.tensor_parallel_size,
        role.pipeline_parallel_size, role.context_parallel_size, role.expert_parallel_size,
        role.expert_tensor_parallel_size,
    )  # fmt: skip


def build_engine(config: Config, name: str, architecture: Architecture, grid: Grid, *, trained: bool = True) -> Engine:
    """One role's engine with the weights that it starts from; `architecture` is that of `model.path`. Collective.

    With `trained=False` actor and critic are frozen too.
    """
    role: Role = getattr(config, name)
    path = role_path(config, name)
    own = architecture if path == config.model.path else load_architecture(path)
    makes_head = name == "critic" and own.head != "score"
    engine = Engine(
        with_score_head(own) if makes_head else own, grid, dtype=getattr(torch, config.model.dtype),
        micro_batch_tokens=role.micro_batch_tokens, optimizer=_optimizer(config, name) if trained else None,
        virtual_pipeline=role.virtual_pipeline_parallel_size, share_prompts=role.share_prompts,
        sequence_parallel=role.sequence_parallel, recompute=role.recompute, overlap=role.overlap,
        logprob_chunk_tokens=role.logprob_chunk_tokens, exact_logits=config.rollout.match_trainer,
        deterministic=config.trainer.deterministic,
        offload=role.offload, transformer_engine=role.transformer_engine, cuda_graphs=role.cuda_graphs,
        **expert_options(config.actor, name, own, architecture),
    )  # fmt: skip
    if makes_head:
        seed = derive_seed(config.trainer.seed, "value head")
        engine.load_language_model(path, head=config.critic.head, seed=seed)
    else:
        engine.load_hf(path)
    engine.residency.offload()  # the next role is built where it was
    return engine


def expert_options(actor: Actor, name: str, own: Architecture, policy: Architecture) -> dict[str, Any]:
    """How a role's routers are trained, and whether they take the rollout's choice.

    A reference like the actor takes it, too: the divergence of equal weights is zero then, whatever rounding does.
    """
    alike = (own.experts, own.layer_kinds) == (policy.experts, policy.layer_kinds)
    replays = {"router_replay": actor.router_replay and name in ("actor", "reference") and alike}
    trained = {"moe_aux_loss_coef": actor.moe_aux_loss_coef, "moe_aux_loss": actor.moe_aux_loss}
    return replays | (trained if name == "actor" else {})


def _optimizer(config: Config, name: str) -> Optimizer | None:
    return {"actor": config.optimizer, "critic": config.critic_optimizer}.get(name)
