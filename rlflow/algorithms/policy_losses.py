"""Policy losses for each response token, before weighting: from log-probs and advantages to a loss to be minimised.

How token losses become one number is left to `aggregation`, KL and entropy terms to `objective`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlflow.algorithms.registry import Registry


@dataclass(frozen=True)
class PolicyTerms:
    """R response tokens of whole sequences, finite everywhere; outside the mask log-probs and advantages are zero."""

    log_probs: Tensor  # float32 [R], with gradient
    old_log_probs: Tensor  # float32 [R]
    advantages: Tensor  # float32 [R]
    mask: Tensor  # bool [R]
    sample_index: Tensor  # int64 [R], which sequence a token belongs to: numbers below R
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    @property
    def ratio(self) -> Tensor:
        return bounded_exp(self.log_probs - self.old_log_probs)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """For each token the mean of `values` over the masked tokens of its sequence.

        A GPU adds in any order: only rounded from float64 is it equal on all ranks that have the tokens.
        """
        zeros = torch.zeros(len(values), dtype=torch.float64, device=values.device)  # a size that no GPU must tell
        counts = zeros.index_add(0, self.sample_index, self.mask.double())
        sums = zeros.index_add(0, self.sample_index, torch.where(self.mask, values, 0.0).double())
        return (sums / counts.clamp(min=1))[self.sample_index].to(values.dtype)


class PolicyLoss(NamedTuple):
    """Loss of each token, and the ratio that its clip looks at."""

    loss: Tensor  # [R]
    ratio: Tensor  # [R]


PolicyLossFunction = Callable[[PolicyTerms], PolicyLoss]
policy_loss: Registry[PolicyLossFunction] = Registry("policy loss")

PER_TOKEN = frozenset({"ppo", "cispo", "reinforce"})
"""Those in which no token's loss depends on another's log-prob."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, finite and with a finite gradient whatever the log-ratio."""
    return log_ratio.clamp(-20, 20).exp()


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the clip acts in the direction of the advantage, that is where PPO's gradient is cut: bool [R]."""
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


def _clipped_surrogate(terms: PolicyTerms, ratio: Tensor) -> Tensor:
    bounded = ratio.clamp(1 - terms.clip_low, 1 + terms.clip_high)
    loss = torch.maximum(-terms.advantages * ratio, -terms.advantages * bounded)
    if terms.dual_clip is None:
        return loss
    limited = torch.minimum(loss, -terms.dual_clip * terms.advantages)
    return torch.where(terms.advantages < 0, limited, loss)


@policy_loss("ppo")
def ppo(terms: PolicyTerms) -> PolicyLoss:
    """max(−Aρ, −A·clip(ρ, 1−ε_low, 1+ε_high)) (Schulman et al. 2017); where A < 0 at most −c·A with dual clip c
    (Ye et al. 2020).
    """
    return PolicyLoss(_clipped_surrogate(terms, terms.ratio), terms.ratio)


@policy_loss("gspo")
def gspo(terms: PolicyTerms) -> PolicyLoss:
    """PPO's clip on the sequence ratio s = exp(mean(lp − old)), with token gradient s·∇lp (Zheng et al. 2025)."""
    sequence = bounded_exp(terms.sequence_mean(terms.log_probs - terms.old_log_probs)).detach()
    ratio = sequence * (terms.log_probs - terms.log_probs.detach()).exp()
    return PolicyLoss(_clipped_surrogate(terms, ratio), ratio)


@policy_loss("cispo")
def cispo(terms: PolicyTerms) -> PolicyLoss:
    """−clip(ρ)·A·lp with the clipped ratio as a constant weight: no token loses its gradient (MiniMax 2025)."""
    weight = terms.ratio.clamp(1 - terms.clip_low, 1 + terms.clip_high).detach()
    return PolicyLoss(-weight * terms.advantages * terms.log_probs, terms.ratio)


@policy_loss("reinforce")
def reinforce(terms: PolicyTerms) -> PolicyLoss:
    """−A·lp (Williams 1992)."""
    return PolicyLoss(-terms.advantages * terms.log_probs, terms.ratio)


@policy_loss("gmpo")
def gmpo(terms: PolicyTerms) -> PolicyLoss:
    """−A·exp(mean(s·min(s·r, s·clip(r, −ε_low, ε_high)))), s = sign(A), r = lp − old: the geometric mean of the
    sequence's ratios (Zhao et al. 2025). Every token carries its sequence's loss.
    """
    log_ratio = terms.log_probs - terms.old_log_probs
    sign = terms.advantages.sign()
    cut = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-terms.clip_low, terms.clip_high))
    return PolicyLoss(-terms.advantages * bounded_exp(terms.sequence_mean(cut)), terms.ratio)
