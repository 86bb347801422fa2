"""The typed configuration of a run: `schema` declares it, `load` reads it, `check` says what is wrong with it."""

from rlflow.config.load import assemble, dump, load
from rlflow.config.roles import role_sections
from rlflow.config.schema import (
    Actor,
    Algorithm,
    Bridge,
    Config,
    Critic,
    CriticOptimizer,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Profile,
    Reference,
    Reward,
    RewardModel,
    Role,
    Rollout,
    Tracking,
    Trainer,
)

__all__ = [
    "Actor", "Algorithm", "Bridge", "Config", "Critic", "CriticOptimizer", "Data", "Evaluation", "Model", "Optimizer",
    "Profile", "Reference", "Reward", "RewardModel", "Role", "Rollout", "Tracking", "Trainer", "assemble", "dump",
    "load", "role_sections",
]  # fmt: skip
