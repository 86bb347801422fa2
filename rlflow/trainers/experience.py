"""From scored samples to mini-batches that a data-parallel replica learns from.

Who learns from which sample, its advantage and its weight in the loss are set here, in this order; the maths is in
`algorithms`, the transport in `batch`, the passes over the model in `roles`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from rlflow.batch import Batch, Catalogue, Sample, Sizes, assign, catalogue, exchange, gather_samples
from rlflow.batch.sample import Prompt
from rlflow.config.schema import Algorithm
from rlflow.parallel import Grid, device


@dataclass
class Experience:
    """One step's samples as a rank of the actor's grid holds them."""

    batch: Batch  # the samples of this rank's replica, mini-batch after mini-batch
    known: Catalogue  # all samples of the step, without their tokens
    numbers: list[int]  # place in `known` of each sample of `batch`
    mini_batches: list[list[int]]  # rows of `batch` of each optimizer step


def collect(
    samples: Sequence[Sample], prompts: Sequence[Prompt], grid: Grid, *, mini_batches: int, hidden: int, share: bool
) -> Experience:
    """Bring every sample to the replica that learns from it. Collective over the job.

    `samples` are those that this rank holds, `prompts` the step's on all ranks. A prompt's samples stay in one
    mini-batch; within it they are spread over the replicas by cost. `share`: whether prompts are computed once.
    """
    group_of = {prompt.id: number for number, prompt in enumerate(prompts)}
    local = Batch.from_samples(samples, group_of).to(device())
    known = catalogue(local)
    sizes = known.sizes()
    shares = [
        _spread(sizes, numbers, grid.dp, hidden, share) for numbers in _cut_by_group(known, len(prompts), mini_batches)
    ]
    wanted = [[number for step in shares for number in step[replica]] for replica in range(grid.dp)]
    destinations = [wanted[grid.replica(rank)] if rank in grid.ranks else [] for rank in range(dist.get_world_size())]
    own = destinations[dist.get_rank()]
    counts = [len(step[grid.replica(grid.rank)]) if grid.is_member else 0 for step in shares]
    rows = torch.arange(len(own)).split(counts)
    return Experience(exchange(local, known, destinations), known, own, [part.tolist() for part in rows])


def _cut_by_group(known: Catalogue, groups: int, parts: int) -> list[list[int]]:
    """Sample numbers of each mini-batch: runs of nearly equally many prompts."""
    part_of = (known.samples["group"] * parts // groups).tolist()
    return [[number for number, part in enumerate(part_of) if part == wanted] for wanted in range(parts)]


def _spread(sizes: Sizes, numbers: list[int], replicas: int, hidden: int, share: bool) -> list[list[int]]:
    parts = assign(sizes.select(numbers), replicas, hidden=hidden, share_prompts=share)
    return [[numbers[place] for place in part] for part in parts]


def over_replicas(grid: Grid, values: Tensor) -> Tensor:
    """Sum a tensor over the data-parallel replicas; ranks outside the grid are in none and keep theirs."""
    if grid.dp == 1 or not grid.is_member:
        return values
    summed = values.to(device())
    dist.all_reduce(summed, group=grid.groups.dp)
    return summed.to(values.device)


def add_advantages(experience: Experience, algorithm: Algorithm, grid: Grid) -> dict[str, float]:
    """Set the tokens' advantages, and leave samples without one out of the mask; returns what was left out."""
    batch, known = experience.batch, experience.known
    rewards = known.samples["rewards"]
    penalties = None
    if algorithm.kl_in == "reward" and algorithm.kl_coef:
        estimate = kl_estimator[algorithm.kl_estimator]
        penalties = algorithm.kl_coef * estimate(batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"])
        rewards = rewards - _of_samples(penalties, experience, grid)
    found = compute_advantages(
        algorithm.advantage,
        Scored(
            rewards=rewards.to(device()),
            groups=known.samples["group"].to(device()),
            lengths=known.response_lengths.to(device()),
            own=torch.tensor(experience.numbers, dtype=torch.int64, device=device()),
            penalties=penalties,
            normalize_std=algorithm.normalize_std,
            reduce=lambda values: over_replicas(grid, values),
        ),
    )
    batch.tokens["advantages"] = found.values
    batch.tokens["mask"] = batch.tokens["mask"] & found.included
    return group_metrics(known.samples["rewards"], known.samples["group"])


def _of_samples(tokens: Tensor, experience: Experience, grid: Grid) -> Tensor:
    """Sums of a token field over each sample, known on every rank of the grid: float32 [N] on the CPU."""
    batch = experience.batch
    if not grid.is_member:
        return torch.zeros(len(experience.known))
    sums = tokens.new_zeros(len(batch)).index_add(0, batch.responses.row_ids(), tokens)
    return gather_samples(sums, experience.numbers, len(experience.known), grid.groups.dp).cpu()


def mini_batch(
    experience: Experience, rows: Sequence[int], algorithm: Algorithm, objective: PolicyObjective, grid: Grid
) -> Batch:
    """The samples of one optimizer step with their weights in the loss, less those whose gradient is exactly zero.

    Weights are counted over the step's samples of all replicas before any are left out.
    """
    batch = experience.batch.select(rows)
    mask, lengths = batch.tokens["mask"], batch.responses.lengths
    totals = Totals.count(mask, lengths, lambda values: over_replicas(grid, values))
    batch.tokens["weights"] = aggregation_weights(
        algorithm.aggregation, mask, lengths, totals, length=algorithm.aggregation_length
    )
    if not algorithm.skip_zero_advantage:
        return batch
    learned = ~objective.has_zero_gradient(batch.tokens["advantages"], mask, lengths)
    return batch.select(learned.nonzero().flatten())
