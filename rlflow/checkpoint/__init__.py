"""Checkpoints of a run, visible only when complete, loadable on another layout."""

from rlflow.checkpoint.store import Checkpoints, State

__all__ = ["Checkpoints", "State"]
