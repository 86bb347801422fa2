"""The maths of reinforcement learning as pure tensor functions, found by the names that configurations use."""

from rlflow.algorithms.advantages import Advantages, Scored, advantage, compute_advantages, group_metrics
from rlflow.algorithms.aggregation import Totals, aggregation, aggregation_weights
from rlflow.algorithms.kl import kl_estimator
from rlflow.algorithms.metrics import combine, is_maximum, summarize
from rlflow.algorithms.objective import PolicyObjective
from rlflow.algorithms.policy_losses import policy_loss

__all__ = [
    "Advantages",
    "PolicyObjective",
    "Scored",
    "Totals",
    "advantage",
    "aggregation",
    "aggregation_weights",
    "combine",
    "compute_advantages",
    "group_metrics",
    "is_maximum",
    "kl_estimator",
    "policy_loss",
    "summarize",
]
