"""The typed configuration of a run: `schema` declares it, `load` reads it, `check` says what is wrong with it."""

from rlflow.config.load import assemble, dump, load
from rlflow.config.schema import (
    Actor,
    Algorithm,
    Bridge,
    Config,
    Data,
    Evaluation,
    Model,
    Optimizer,
    Reward,
    Rollout,
    Tracking,
    Trainer,
)

__all__ = [
    "Actor", "Algorithm", "Bridge", "Config", "Data", "Evaluation", "Model", "Optimizer", "Reward", "Rollout",
    "Tracking", "Trainer", "assemble", "dump", "load",
]  # fmt: skip
