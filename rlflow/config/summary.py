"""What a configuration would run, in a few lines for people."""

from collections.abc import Sequence
from itertools import combinations

from rlflow.config.nearest_grids import grid_words
from rlflow.config.ranks import in_short, rank_list
from rlflow.config.roles import needs_old_log_probs, role_path, role_sections
from rlflow.config.schema import Config, Ranks, Rollout

PREDICT, UPDATE = ("reward_model", "reference", "critic", "actor"), ("critic", "actor")
"""Roles that compute in a phase, in their order; those without a rank in common do so at the same time."""


def summarize(config: Config, world_size: int | None) -> str:
    """Model, roles and batch; the numbers that depend on the ranks are left out where `world_size` is None."""
    rollout, trainer = config.rollout, config.trainer
    ranks = rank_list(rollout.ranks, world_size)
    size = rollout.tensor_parallel_size * rollout.pipeline_parallel_size
    replicas = "" if ranks is None else f"{len(ranks) // size} replicas of "
    samples = trainer.prompts_per_step * rollout.n
    updates = config.algorithm.epochs * config.algorithm.mini_batches
    length = f"{trainer.steps} steps" if trainer.steps is not None else f"{trainer.epochs} epochs"
    lines = {
        "model": f"{config.model.path} in {config.model.dtype}",
        **role_words(config, world_size),
        "rollout": f"{replicas}{replica_words(rollout)}{_where(rollout.ranks, world_size)}, "
        f"{rollout.max_prompt_length} + {rollout.max_response_length} tokens",
        "at once": simultaneous_words(config, world_size),
        "idle": idle_words(config, world_size),
        "step": f"{trainer.prompts_per_step} prompts × {rollout.n} responses = {samples} samples, "
        f"{updates} optimizer steps of {samples // config.algorithm.mini_batches} samples",
        "run": f"{config.algorithm.advantage}, {config.algorithm.policy_loss}, {length}, to {trainer.output_dir}",
    }
    width = max(map(len, lines))
    return "\n".join(f"  {name:{width}} {words}" for name, words in lines.items() if words)


def role_words(config: Config, world_size: int | None) -> dict[str, str]:
    """The grid of each role, its ranks, and its model where that is not the actor's."""
    words = {}
    for name, role in role_sections(config).items():
        ranks = rank_list(role.ranks, world_size)
        path = role_path(config, name)
        grid = grid_words(role, None if ranks is None else len(ranks)) + _where(role.ranks, world_size)
        words[name.replace("_", " ")] = grid if path == config.model.path else f"{grid}, {path}"
    return words


def simultaneous_words(config: Config, world_size: int | None) -> str:
    """Which roles compute at the same time, as they have no rank in common; empty where each waits for the others."""
    roles = role_sections(config)
    ranks = {name: rank_list(role.ranks, world_size) for name, role in roles.items()}
    phases = []
    predicting = PREDICT if needs_old_log_probs(config) else PREDICT[:-1]
    for phase, order in (("predictions", predicting), ("updates", UPDATE)):
        pairs = combinations([name for name in order if name in roles], 2)
        beside = [
            f"{one} ∥ {other}".replace("_", " ") for one, other in pairs if _are_disjoint(ranks[one], ranks[other])
        ]
        phases += [f"{phase} of {', '.join(beside)}"] if beside else []
    return "; ".join(phases)


def idle_words(config: Config, world_size: int | None) -> str:
    """The ranks of the job that have no part in it; empty where there are none, or their number is unknown."""
    places = [config.rollout.ranks, *(role.ranks for role in role_sections(config).values())]
    used = {rank for ranks in places for rank in rank_list(ranks, world_size) or ()}
    idle = [rank for rank in range(world_size or 0) if rank not in used]
    return f"ranks {in_short(idle)}" if idle else ""


def replica_words(rollout: Rollout) -> str:
    """How one vLLM replica is cut, and into which number format if another than the run's."""
    pipeline = f" × PP{rollout.pipeline_parallel_size}" if rollout.pipeline_parallel_size > 1 else ""
    experts = " with whole experts" if rollout.expert_parallel else ""
    return f"TP{rollout.tensor_parallel_size}{pipeline}{experts}" + (f" in {q}" if (q := rollout.quantization) else "")


def _where(ranks: Ranks, world_size: int | None) -> str:
    """The ranks in words, unless they are all."""
    listed = rank_list(ranks, world_size)
    return "" if listed is None or len(listed) == world_size else f" on ranks {in_short(listed)}"


def _are_disjoint(one: Sequence[int] | None, other: Sequence[int] | None) -> bool:
    return one is not None and other is not None and not set(one) & set(other)
