"""From scored samples to mini-batches that the data-parallel replicas of each role learn from.

Which ranks get which sample, its advantage and its weight in the loss are set here, in this order; the maths is in
`algorithms`, the transport in `batch`, the passes over the models in `passes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.algorithms import (
    PolicyObjective,
    Scored,
    Totals,
    aggregation_weights,
    compute_advantages,
    group_metrics,
    kl_estimator,
)
from rlflow.batch import (
    Batch,
    Catalogue,
    Placement,
    Sample,
    Sizes,
    assign,
    catalogue,
    exchange,
    gather_samples,
    move_samples,
    move_tokens,
    place,
)
from rlflow.batch.routing import add_routing, without_routing
from rlflow.batch.sample import Prompt
from rlflow.config.schema import Algorithm
from rlflow.parallel import Grid, device, ranks_per_node
from rlflow.roles import Engine


@dataclass
class Share:
    """One step's samples as they are spread over a grid: what every rank holds, and this rank's part of it."""

    placement: Placement
    batch: Batch  # the samples of this rank's replica, mini-batch after mini-batch; none outside the grid
    mini_batches: list[list[int]]  # rows of `batch` of each optimizer step

    @property
    def numbers(self) -> Sequence[int]:
        """Place in the catalogue of each sample of `batch`."""
        return self.placement[dist.get_rank()]


@dataclass
class Experience:
    """One step's samples: known everywhere without their tokens, and with them where a role computes on them."""

    known: Catalogue
    shares: dict[str, Share]  # by role; roles whose ranks need the same samples have one in common

    def move(self, source: str, target: str, *, tokens: Sequence[str] = (), samples: Sequence[str] = ()) -> None:
        """Bring fields that one role's ranks have set to another's. Collective over the job where they differ."""
        here, there = self.shares[source], self.shares[target]
        if here is there:
            return
        ways = (here.placement, there.placement)
        if tokens:
            fields = {name: here.batch.tokens[name] for name in tokens}
            there.batch.tokens |= move_tokens(fields, self.known, *ways)
        if samples:
            fields = {name: here.batch.samples[name] for name in samples}
            there.batch.samples |= move_samples(fields, self.known, *ways)


def collect(
    samples: Sequence[Sample], prompts: Sequence[Prompt], roles: Mapping[str, Engine], *, mini_batches: int
) -> Experience:
    """Bring every sample to the replicas that compute on it. Collective over the job.

    `samples` are those that this rank holds, `prompts` the step's on all ranks. A prompt's samples stay in one
    mini-batch, which is the same for all roles; within it they are spread over a role's replicas by cost.
    """
    group_of = {prompt.id: number for number, prompt in enumerate(prompts)}
    local = Batch.from_samples(samples, group_of)
    if (routing := roles["actor"].routing) is not None:
        add_routing(local, samples, routing)
    local = local.to(device())
    known = catalogue(local, ranks_per_node=ranks_per_node())
    parts = _cut_by_group(known, len(prompts), mini_batches)
    ways = {name: (role.grid.dp, role.architecture.hidden, role.share_prompts) for name, role in roles.items()}
    spread_in = {way: _spread(known.sizes(), parts, *way) for way in dict.fromkeys(ways.values())}
    spread = {name: spread_in[way] for name, way in ways.items()}
    placements = {name: _placement(steps, roles[name].grid) for name, steps in spread.items()}
    routed = {placements[name] for name, engine in roles.items() if engine.routing is not None}
    shares: dict[Placement, Share] = {}
    for name, placement in placements.items():
        if placement not in shares:
            sent = local if placement in routed else without_routing(local)
            rows = _rows(spread[name], roles[name].grid)
            shares[placement] = Share(placement, exchange(sent, known, placement), rows)
    return Experience(known, {name: shares[placement] for name, placement in placements.items()})


def _cut_by_group(known: Catalogue, groups: int, parts: int) -> list[list[int]]:
    """Sample numbers of each mini-batch: runs of nearly equally many prompts."""
    part_of = (known.samples["group"] * parts // groups).tolist()
    return [[number for number, part in enumerate(part_of) if part == wanted] for wanted in range(parts)]


def _spread(
    sizes: Sizes, parts: Sequence[list[int]], replicas: int, hidden: int, share_prompts: bool
) -> list[list[list[int]]]:
    """For each mini-batch the samples of each replica of a role."""
    spread = []
    for numbers in parts:
        chosen = assign(sizes.select(numbers), replicas, hidden=hidden, share_prompts=share_prompts)
        spread.append([[numbers[place] for place in replica] for replica in chosen])
    return spread


def _placement(steps: Sequence[Sequence[list[int]]], grid: Grid) -> Placement:
    wanted = [[number for step in steps for number in step[replica]] for replica in range(grid.dp)]
    members = set(grid.ranks)
    ranks = range(dist.get_world_size())
    return place(wanted, [grid.replica(rank) if rank in members else None for rank in ranks])


def _rows(steps: Sequence[Sequence[list[int]]], grid: Grid) -> list[list[int]]:
    """Rows of each mini-batch in the batch of this rank, which has them one after the other."""
    counts = [len(step[grid.replica(grid.rank)]) if grid.is_member else 0 for step in steps]
    return [part.tolist() for part in torch.arange(sum(counts)).split(counts)]


def over_replicas(grid: Grid, values: Tensor) -> Tensor:
    """Sum a tensor over the data-parallel replicas; ranks outside the grid are in none and keep theirs."""
    if grid.dp == 1 or not grid.is_member:
        return values
    summed = values.to(device())
    dist.all_reduce(summed, group=grid.groups.dp)
    return summed.to(values.device)


def add_advantages(
    experience: Experience, algorithm: Algorithm, grid: Grid, *, kl_coef: float = 0.0
) -> dict[str, float]:
    """Set the advantages of the actor's tokens, and the returns where there is a critic; returns what was left out.

    Samples without an advantage leave the mask. `kl_coef` weighs the KL penalty where that is part of the reward.
    """
    share, known = experience.shares["actor"], experience.known
    tokens, samples = share.batch.tokens, share.batch.samples
    rewards = known.samples["rewards"]
    penalties = None
    if algorithm.kl_in == "reward" and kl_coef:
        estimate = kl_estimator[algorithm.kl_estimator](tokens["old_log_probs"], tokens["ref_log_probs"])
        penalties = torch.where(tokens["mask"], kl_coef * estimate, 0.0)
        rewards = rewards - _of_samples(penalties, share, len(known), grid)
    found = compute_advantages(
        algorithm.advantage,
        Scored(
            rewards=rewards.to(device()),
            groups=known.samples["group"].to(device()),
            lengths=known.response_lengths.to(device()),
            own=torch.tensor(share.numbers, dtype=torch.int64, device=device()),
            penalties=penalties,
            mask=tokens["mask"],
            normalize_std=algorithm.normalize_std,
            values=tokens.get("old_values"),
            last_values=samples.get("last_values"),
            truncated=samples["truncated"],
            bootstrap_truncated=algorithm.bootstrap_truncated,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            whiten=algorithm.whiten_advantages,
            reduce=lambda values: over_replicas(grid, values),
        ),
    )
    tokens["advantages"] = found.values
    tokens["mask"] = tokens["mask"] & found.included
    if found.returns is not None:
        tokens["returns"] = found.returns
    return group_metrics(known.samples["rewards"], known.samples["group"])


def _of_samples(tokens: Tensor, share: Share, total: int, grid: Grid) -> Tensor:
    """Sums of a token field over each sample, known on every rank of the grid: float32 [N] on the CPU.

    A GPU adds in any order: only rounded from float64 are they equal on all ranks of a replica.
    """
    if not grid.is_member:
        return torch.zeros(total)
    batch, exact = share.batch, tokens.double()
    sums = exact.new_zeros(len(batch)).index_add(0, batch.responses.row_ids(), exact)
    return gather_samples(sums, share.numbers, total, grid.groups.dp).float().cpu()


def mini_batch(share: Share, number: int, algorithm: Algorithm, grid: Grid) -> Batch:
    """The samples of one optimizer step of a role with their weights in the loss, counted over all its replicas."""
    batch = share.batch.select(share.mini_batches[number])
    mask, lengths = batch.tokens["mask"], batch.responses.lengths
    totals = Totals.count(mask, lengths, lambda values: over_replicas(grid, values))
    batch.tokens["weights"] = aggregation_weights(
        algorithm.aggregation, mask, lengths, totals, length=algorithm.aggregation_length
    )
    return batch


def without_zero_gradient(batch: Batch, objective: PolicyObjective) -> Batch:
    """The samples of a mini-batch less those whose gradient is exactly zero; weights were counted before."""
    idle = objective.has_zero_gradient(batch.tokens["advantages"], batch.tokens["mask"], batch.responses.lengths)
    return batch.select((~idle).nonzero().flatten())
