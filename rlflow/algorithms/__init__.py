"""The maths of reinforcement learning as pure tensor functions, found by the names that configurations use."""

from rlflow.algorithms.advantages import Advantages, Scored, advantage, compute_advantages, group_metrics
from rlflow.algorithms.aggregation import Totals, aggregation, aggregation_weights
from rlflow.algorithms.gae import estimate_advantages
from rlflow.algorithms.kl import kl_controller, kl_estimator
from rlflow.algorithms.metrics import combine, is_maximum, summarize
from rlflow.algorithms.objective import PolicyObjective
from rlflow.algorithms.policy_losses import policy_loss
from rlflow.algorithms.value_objective import ValueObjective

__all__ = [
    "Advantages",
    "PolicyObjective",
    "Scored",
    "Totals",
    "ValueObjective",
    "advantage",
    "aggregation",
    "aggregation_weights",
    "combine",
    "compute_advantages",
    "estimate_advantages",
    "group_metrics",
    "is_maximum",
    "kl_controller",
    "kl_estimator",
    "policy_loss",
    "summarize",
]
