"""Advantages of methods without a critic: from the rewards of all samples to one number for each response token.

Group statistics use the rewards of the whole step, which every rank knows; tokens are only the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.algorithms.masked import Reduce, on_one_rank, whiten
from rlflow.algorithms.registry import Registry
from rlflow.batch import Ragged

EPSILON = 1e-6  # keeps a tiny standard deviation from blowing rewards up


@dataclass(frozen=True)
class Scored:
    """One step's samples as a data-parallel rank sees them: N in all, n of its own with R response tokens."""

    rewards: Tensor  # float32 [N], per-token penalties already subtracted; nan: unscorable
    groups: Tensor  # int64 [N], number of the prompt
    lengths: Tensor  # int64 [N], response tokens
    own: Tensor  # int64 [n], the rank's samples among all
    penalties: Tensor | None = None  # float32 [R], what a KL penalty takes from each token's reward
    normalize_std: bool = True  # for grpo
    reduce: Reduce = on_one_rank

    def per_token(self, values: Tensor) -> Tensor:
        """[N] of all samples → [R] of the rank's own response tokens."""
        return torch.repeat_interleave(values[self.own], self.lengths[self.own])

    def rewards_to_go(self) -> Tensor:
        """[R]: the reward from each token on, that is the sample's less the penalties of earlier tokens."""
        rewards = self.per_token(self.rewards)
        if self.penalties is None:
            return rewards
        return (rewards + Ragged(self.penalties, self.lengths[self.own]).exclusive_cumsum()).float()


AdvantageFunction = Callable[[Scored], Tensor]  # → float32 [R], nan for tokens of excluded samples
advantage: Registry[AdvantageFunction] = Registry("advantage")


class Groups:
    """Rewards by group: N samples in G groups; unscorable samples enter no statistic."""

    def __init__(self, rewards: Tensor, groups: Tensor) -> None:
        self.numbers, self.member_of = torch.unique(groups, return_inverse=True)  # [G], [N]
        self.scored = ~torch.isnan(rewards)
        self.rewards = torch.where(self.scored, rewards, 0.0).double()  # [N], 0 where unscorable
        self.count = self.total(torch.ones_like(self.rewards))  # [G]
        self.mean = self.total(self.rewards) / self.count.clamp(min=1)  # [G]
        self.centred = self.rewards - self.mean[self.member_of]  # [N]
        self.variance = self.total(self.centred.square()) / (self.count - 1).clamp(min=1)  # [G], of the sample
        # tested on the rewards themselves: seven times 0.7 in float32 has a variance
        self.uniform = self.extreme("amax") == self.extreme("amin")  # [G]

    def total(self, values: Tensor) -> Tensor:
        """Sums over each group's scored samples: [N] → [G]."""
        sums = values.new_zeros(len(self.numbers))
        return sums.index_add(0, self.member_of[self.scored], values[self.scored])

    def extreme(self, kind: str) -> Tensor:
        """The largest ("amax") or smallest ("amin") scored reward of each group, 0 where there is none: [G]."""
        start = self.rewards.new_zeros(len(self.numbers))
        members = self.member_of[self.scored]
        return start.scatter_reduce(0, members, self.rewards[self.scored], kind, include_self=False)

    def finish(self, values: Tensor) -> Tensor:
        """float32 [N]: exactly 0 in uniform groups; nan if unscorable or without a scored neighbour to compare with."""
        usable = self.scored & (self.count > 1)[self.member_of]
        values = torch.where(self.uniform[self.member_of], torch.zeros_like(values), values)
        return torch.where(usable, values, torch.nan).float()


@advantage("grpo")
def grpo(scored: Scored) -> Tensor:
    """(R − mean of the group) / (sample std of the group + 1e-6) (Shao et al. 2024).

    `normalize_std=False` leaves out the division (Dr. GRPO, Liu et al. 2025).
    """
    groups = Groups(scored.rewards, scored.groups)
    if not scored.normalize_std:
        return scored.per_token(groups.finish(groups.centred))
    scale = (groups.variance.sqrt() + EPSILON)[groups.member_of]
    return scored.per_token(groups.finish(groups.centred / scale))


@advantage("rloo")
def rloo(scored: Scored) -> Tensor:
    """R − mean of the other samples of the group = n/(n−1) · (R − mean) (Ahmadian et al. 2024)."""
    groups = Groups(scored.rewards, scored.groups)
    factor = (groups.count / (groups.count - 1).clamp(min=1))[groups.member_of]
    return scored.per_token(groups.finish(factor * groups.centred))


@advantage("opo")
def opo(scored: Scored) -> Tensor:
    """R − Σ length·R / Σ length over the group, the baseline of least variance (Hao et al. 2025)."""
    groups = Groups(scored.rewards, scored.groups)
    lengths = scored.lengths.double()
    baseline = groups.total(lengths * groups.rewards) / groups.total(lengths).clamp(min=1)
    return scored.per_token(groups.finish(groups.rewards - baseline[groups.member_of]))


@advantage("reinforce")
def reinforce(scored: Scored) -> Tensor:
    """The reward from each token on, without a baseline (Williams 1992)."""
    return scored.rewards_to_go()


@advantage("reinforce_plus_plus")
def reinforce_plus_plus(scored: Scored) -> Tensor:
    """The reward from each token on, whitened over all tokens of the step (Hu 2025)."""
    return _whiten(scored.rewards_to_go(), scored.reduce)


@advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(scored: Scored) -> Tensor:
    """R − mean of the group for every token, whitened over all tokens of the step (Hu 2025)."""
    groups = Groups(scored.rewards, scored.groups)
    return _whiten(scored.per_token(groups.finish(groups.centred)), scored.reduce)


def _whiten(values: Tensor, reduce: Reduce) -> Tensor:
    included = ~torch.isnan(values)
    return torch.where(included, whiten(values, included, reduce), torch.nan)


@dataclass(frozen=True)
class Advantages:
    """Advantages of a rank's response tokens."""

    values: Tensor  # float32 [R], 0 where excluded
    included: Tensor  # bool [R], tokens of samples that enter the loss


def compute_advantages(name: str, scored: Scored) -> Advantages:
    """Advantages by the named method; unscorable samples and groups too small for it are excluded."""
    values = advantage[name](scored)
    included = ~torch.isnan(values)
    return Advantages(torch.where(included, values, 0.0), included)


def group_metrics(rewards: Tensor, groups: Tensor) -> dict[str, float]:
    """Counts over a step: unscorable samples; groups with fewer than two scored samples, which group methods exclude;
    and the fraction of groups with equal rewards, from which group methods learn nothing.
    """
    statistics = Groups(rewards, groups)
    return {
        "group/unscorable_samples": float((~statistics.scored).sum()),
        "group/too_small": float((statistics.count < 2).sum()),
        "group/uniform_fraction": float((statistics.uniform & (statistics.count > 1)).double().mean()),
    }
