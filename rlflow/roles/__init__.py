"""Roles: models on their grids, and what they are asked for."""

from rlflow.roles.build import Roles, build_roles
from rlflow.roles.engine import Engine, Values
from rlflow.roles.schedule import learning_rate

__all__ = ["Engine", "Roles", "Values", "build_roles", "learning_rate"]
