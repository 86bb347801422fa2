"""Roles: models on their grids, and what they are asked for."""

from rlflow.roles.engine import Engine
from rlflow.roles.schedule import learning_rate

__all__ = ["Engine", "learning_rate"]
