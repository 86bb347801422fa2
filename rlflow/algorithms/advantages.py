"""Advantages: from the rewards of all samples, and a critic's values, to one number for each response token.

Group statistics use the rewards of the whole step, which every rank knows; tokens are only the rank's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlflow.algorithms.aggregation import rows_count
from rlflow.algorithms.gae import estimate_advantages
from rlflow.algorithms.masked import Reduce, masked, on_one_rank, whiten
from rlflow.algorithms.registry import Registry
from rlflow.batch import Ragged

EPSILON = 1e-6  # keeps a tiny standard deviation from blowing rewards up


@dataclass(frozen=True)
class Advantages:
    """Advantages of a rank's response tokens."""

    values: Tensor  # float32 [R], 0 where excluded
    included: Tensor  # bool [R], tokens of samples that enter the loss
    returns: Tensor | None = None  # float32 [R], what the critic's values should have been; None without a critic

    @classmethod
    def where_known(cls, values: Tensor) -> Advantages:
        """From float32 [R] with nan for the tokens of excluded samples."""
        included = ~torch.isnan(values)
        return cls(torch.where(included, values, 0.0), included)


@dataclass(frozen=True)
class Scored:
    """One step's samples as a data-parallel rank sees them: N in all, n of its own with R response tokens."""

    rewards: Tensor  # float32 [N], per-token penalties already subtracted; nan: unscorable
    groups: Tensor  # int64 [N], number of the prompt
    lengths: Tensor  # int64 [N], response tokens
    own: Tensor  # int64 [n], the rank's samples among all
    penalties: Tensor | None = None  # float32 [R], what a KL penalty takes from each token's reward; 0 outside the mask
    mask: Tensor | None = None  # bool [R], tokens that the policy sampled; None: all
    normalize_std: bool = True  # for grpo
    values: Tensor | None = None  # float32 [R], the critic's before each token is chosen; this and below for gae
    last_values: Tensor | None = None  # float32 [n], the critic's after the last token
    truncated: Tensor | None = None  # bool [n], whether the length limit ended the response
    bootstrap_truncated: bool = False  # whether last_values follow truncated responses, or 0 as for the others
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    reduce: Reduce = on_one_rank

    @property
    def own_lengths(self) -> Tensor:
        """int64 [n]: the lengths of the rank's own responses."""
        return self.lengths[self.own]

    def learnable(self) -> Tensor:
        """bool [R]: the mask, also where none is given."""
        if self.mask is None:
            return torch.ones(int(self.own_lengths.sum()), dtype=torch.bool, device=self.own.device)
        return self.mask

    def per_token(self, values: Tensor) -> Tensor:
        """[N] of all samples → [R] of the rank's own response tokens."""
        return torch.repeat_interleave(values[self.own], self.own_lengths)

    def spread(self, values: Tensor) -> Advantages:
        """The same advantage for all tokens of a sample: from [N] of all samples, nan: excluded."""
        return Advantages.where_known(self.per_token(values))

    def rewards_to_go(self) -> Tensor:
        """float32 [R]: the reward from each token on, that is the sample's less the penalties of earlier tokens."""
        rewards = self.per_token(self.rewards)
        if self.penalties is None:
            return rewards
        return (rewards + Ragged(self.penalties, self.own_lengths).exclusive_cumsum()).float()

    def token_rewards(self) -> Tensor:
        """float64 [R]: less each token's penalty, and with the score on the last token inside the mask; 0 outside it.

        A sample without a token inside the mask has no reward; an unscorable one's is nan on its last token.
        """
        mask, score = self.learnable(), self.rewards[self.own].double()
        rewards = Ragged(torch.zeros(len(mask), dtype=torch.float64, device=mask.device), self.own_lengths)
        if self.penalties is not None:
            rewards.values.sub_(self.penalties)
            score = score.index_add(0, rewards.row_ids(), rewards.values, alpha=-1)
        kept = rows_count(mask, self.own_lengths)
        last = mask.nonzero().flatten()[kept.cumsum(0)[kept > 0] - 1]
        return masked(rewards.values.index_add(0, last, score[kept > 0]), mask)


AdvantageFunction = Callable[[Scored], Advantages]
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
def grpo(scored: Scored) -> Advantages:
    """(R − mean of the group) / (sample std of the group + 1e-6) (Shao et al. 2024).

    `normalize_std=False` leaves out the division (Dr. GRPO, Liu et al. 2025).
    """
    groups = Groups(scored.rewards, scored.groups)
    if not scored.normalize_std:
        return scored.spread(groups.finish(groups.centred))
    scale = (groups.variance.sqrt() + EPSILON)[groups.member_of]
    return scored.spread(groups.finish(groups.centred / scale))


@advantage("rloo")
def rloo(scored: Scored) -> Advantages:
    """R − mean of the other samples of the group = n/(n−1) · (R − mean) (Ahmadian et al. 2024)."""
    groups = Groups(scored.rewards, scored.groups)
    factor = (groups.count / (groups.count - 1).clamp(min=1))[groups.member_of]
    return scored.spread(groups.finish(factor * groups.centred))


@advantage("opo")
def opo(scored: Scored) -> Advantages:
    """R − Σ length·R / Σ length over the group, the baseline of least variance (Hao et al. 2025)."""
    groups = Groups(scored.rewards, scored.groups)
    lengths = scored.lengths.double()
    baseline = groups.total(lengths * groups.rewards) / groups.total(lengths).clamp(min=1)
    return scored.spread(groups.finish(groups.rewards - baseline[groups.member_of]))


@advantage("reinforce")
def reinforce(scored: Scored) -> Advantages:
    """The reward from each token on, without a baseline (Williams 1992)."""
    return Advantages.where_known(scored.rewards_to_go())


@advantage("reinforce_plus_plus")
def reinforce_plus_plus(scored: Scored) -> Advantages:
    """The reward from each token on, whitened over all tokens of the step (Hu 2025)."""
    return _whitened(Advantages.where_known(scored.rewards_to_go()), scored)


@advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(scored: Scored) -> Advantages:
    """R − mean of the group for every token, whitened over all tokens of the step (Hu 2025)."""
    groups = Groups(scored.rewards, scored.groups)
    return _whitened(scored.spread(groups.finish(groups.centred)), scored)


@advantage("gae")
def gae(scored: Scored) -> Advantages:
    """Generalised advantage estimation from a critic's values (Schulman et al. 2016), PPO's advantage.

    Returns are advantages plus values, before the advantages are whitened over all tokens of the step. Raises
    ValueError without values, FloatingPointError where one inside the mask is not finite.
    """
    if scored.values is None or scored.last_values is None or scored.truncated is None:
        raise ValueError("gae needs values, last_values and truncated")
    included = ~torch.isnan(scored.per_token(scored.rewards))
    mask = scored.learnable() & included
    values = masked(scored.values, mask)
    last_values = masked(scored.last_values, scored.truncated & scored.bootstrap_truncated)
    if not torch.isfinite(torch.cat([values, last_values])).all():
        raise FloatingPointError("the critic's values are not finite: no advantages can be made of them")
    raw = estimate_advantages(
        scored.token_rewards(), values, mask, scored.own_lengths, last_values, gamma=scored.gamma, lam=scored.lam
    )
    found = Advantages(raw.float(), included, returns=(raw + values).float())
    return _whitened(found, scored) if scored.whiten else found


def _whitened(found: Advantages, scored: Scored) -> Advantages:
    return replace(found, values=whiten(found.values, found.included & scored.learnable(), scored.reduce))


def compute_advantages(name: str, scored: Scored) -> Advantages:
    """Advantages by the named method; unscorable samples and groups too small for it are excluded."""
    return advantage[name](scored)


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
