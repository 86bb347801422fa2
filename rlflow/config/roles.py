"""Which roles a run has, and what those that follow the actor take from it.

A role is a model on a grid of its own; what grids must be like is in `check_grid`, what roles do in `rlflow.roles`.
"""

from dataclasses import fields
from typing import Any

from rlflow.config.schema import Config, Critic, CriticOptimizer, Reference, RewardModel, Role

TRAINED = ("actor", "critic")
FOLLOWERS = ("critic", "reference", "reward_model")
"""Sections whose shared keys take the actor's values where they are absent."""
SHARED = tuple(item.name for item in fields(Role))


def role_sections(config: Config) -> dict[str, Role]:
    """The sections of the models that training needs, by name, the actor first."""
    exists = {
        "actor": True,
        "critic": config.algorithm.advantage == "gae",
        "reference": config.algorithm.kl_coef > 0,
        "reward_model": config.reward_model.path is not None,
    }
    return {name: getattr(config, name) for name, needed in exists.items() if needed}


def changing_roles(config: Config) -> list[str]:
    """The roles whose models a run changes, which is what a checkpoint must hold."""
    follows = config.reference.update_every > 0
    return [name for name in role_sections(config) if name in TRAINED or (name == "reference" and follows)]


def needs_old_log_probs(config: Config, *, learns: bool = True) -> bool:
    """Whether a step asks for the actor's log-probs first: for several optimizer steps, or for KL in the reward.

    With one optimizer step per rollout they are those of the update itself, and no pass is needed. `learns`: whether
    the actor has an update in the step.
    """
    algorithm = config.algorithm
    several = algorithm.epochs * algorithm.mini_batches > 1
    return (learns and several) or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward")


def role_path(config: Config, name: str) -> str:
    """The folder of a role's weights."""
    return (None if name == "actor" else getattr(config, name).path) or config.model.path


def replica_size(role: Role) -> int:
    """Ranks of one replica of a role."""
    return role.tensor_parallel_size * role.context_parallel_size * role.pipeline_parallel_size


def data_parallel_size(role: Role, ranks: int | None) -> int | None:
    """Replicas of a role on so many ranks; None where that is unknown or no multiple of one replica."""
    size = replica_size(role)
    return ranks // size if ranks is not None and size > 0 and ranks % size == 0 else None


def follow(tree: dict[str, Any]) -> dict[str, Any]:
    """The sections of a file with the actor's values where a follower does not give a shared key itself."""
    shared = {name: value for name, value in (_keys(tree, "actor") or {}).items() if name in SHARED}
    given = {name: keys for name in FOLLOWERS if (keys := _keys(tree, name)) is not None}
    return {**tree, **{name: _followed(shared, keys) for name, keys in given.items()}} if shared else tree


def _followed(shared: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """A follower's keys over the actor's, of which one that only serves tensor parallelism goes with it."""
    if str(keys.get("tensor_parallel_size")) == "1":
        shared = {name: value for name, value in shared.items() if name != "sequence_parallel"}
    return {**shared, **keys}


def without_idle_sections(config: Config, tree: dict[str, Any]) -> dict[str, Any]:
    """`tree`, which is `config` as a mapping, without the sections of absent roles that say nothing of their own."""
    shared = {name: getattr(config.actor, name) for name in SHARED}
    roles = {"critic": Critic, "reference": Reference, "reward_model": RewardModel}
    silent = {name: role(**shared) for name, role in roles.items() if name not in role_sections(config)}
    if "critic" in silent:
        silent["critic_optimizer"] = CriticOptimizer()
    return {name: keys for name, keys in tree.items() if name not in silent or getattr(config, name) != silent[name]}


def is_followed(path: str, tree: dict[str, Any]) -> bool:
    """Whether the key at `path` is a follower's that has its value from the actor."""
    section, _, name = path.partition(".")
    return section in FOLLOWERS and name in SHARED and name not in (_keys(tree, section) or {})


def _keys(tree: dict[str, Any], section: str) -> dict[str, Any] | None:
    """The keys given in a section; None where it is no mapping."""
    keys = tree.get(section)
    return {} if keys is None else keys if isinstance(keys, dict) else None
