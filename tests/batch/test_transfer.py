"""Samples move between ranks: everybody knows the sizes, tokens go where they are needed and nowhere else."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlflow.batch import Batch, catalogue, exchange, gather_samples
from tests.batch.samples import make_sample

PROMPTS = {0: [1, 2, 3], 1: [4], 2: [5, 6]}
# (group, index, response) in the order of their numbers; ranks 0 and 2 hold samples, rank 1 none
SAMPLES = [(0, 0, [10, 11]), (0, 1, [12]), (1, 0, []), (0, 2, [13, 14, 15]), (1, 1, [16]), (2, 0, [17, 18])]
OWNERS = [0, 0, 0, 2, 2, 2]


def local_batch(rank: int) -> Batch:
    samples = [
        make_sample(PROMPTS[group], response, str(group), index)
        for (group, index, response), owner in zip(SAMPLES, OWNERS, strict=True)
        if owner == rank
    ]
    return Batch.from_samples(samples, {"0": 0, "1": 1, "2": 2})


def describe(batch: Batch) -> list[tuple]:
    return [
        (
            int(batch.samples["group"][row]),
            int(batch.samples["index"][row]),
            batch.prompts.row(int(batch.prompt_of[row])).tolist(),
            batch.responses.row(row).tolist(),
        )
        for row in range(len(batch))
    ]


def expected(numbers: list[int]) -> list[tuple]:
    return [(SAMPLES[n][0], SAMPLES[n][1], PROMPTS[SAMPLES[n][0]], SAMPLES[n][2]) for n in numbers]


def run_exchange(destinations: list[list[int]]) -> tuple[list[tuple], dict[str, Any]]:
    received = []
    collective = dist.all_to_all_single

    def counting(output: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        received.append(output.numel() * output.element_size())
        collective(output, values, *args, **kwargs)

    batch = local_batch(dist.get_rank())
    known = catalogue(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        moved = exchange(batch, known, destinations)
    facts = {
        "bytes": sum(received),
        "groups": known.samples["group"].tolist(),
        "rewards": known.samples["rewards"].tolist(),
        "lengths": known.response_lengths.tolist(),
        "log_probs": moved.tokens["rollout_log_probs"].tolist(),
        "dtypes": (moved.tokens["mask"].dtype, moved.samples["truncated"].dtype, moved.samples["rewards"].dtype),
        "prompts": len(moved.prompts),
    }
    return describe(moved), facts


def test_samples_arrive_where_they_are_wanted_in_the_wanted_order(world):
    """Ranks 0 and 1 are tensor-parallel peers and need the same samples; rank 2 needs the others and one of theirs."""
    destinations = [[3, 0, 1], [3, 0, 1], [5, 2, 4, 1]]
    results = world(3, run_exchange, destinations)
    for numbers, (samples, facts) in zip(destinations, results, strict=True):
        assert samples == expected(numbers)
        assert facts["log_probs"] == pytest.approx([-0.01 * token for n in numbers for token in SAMPLES[n][2]])
        assert facts["dtypes"] == (torch.bool, torch.bool, torch.float32)
    assert results[0][1]["prompts"] == 1  # the prompt of group 0 came from two owners and is kept once


def test_everybody_knows_the_sizes_and_scores(world):
    facts = [facts for _, facts in world(3, run_exchange, [[], [], []])]
    for known in facts:
        assert known["groups"] == [0, 0, 1, 0, 1, 2]
        assert known["lengths"] == [2, 1, 0, 3, 1, 2]
        assert known["rewards"][0] == 0.0
        assert known["rewards"][2] != known["rewards"][2]  # the empty response is unscorable
        assert known["bytes"] == 0


def test_a_rank_receives_only_the_bytes_of_its_samples(world):
    """int32 ids, float32 log-probs, one byte of mask: 4 a prompt token, 9 a response token; nothing of what it has.

    Rank 0 lacks only the 3 tokens of sample 3, whose prompt it has; rank 1 gets an empty response and its prompt.
    """
    results = world(3, run_exchange, [[3, 0, 1], [2], [4, 5]])
    expected_bytes = [3 * 9, 1 * 4, 0]
    assert [facts["bytes"] for _, facts in results] == expected_bytes


def run_gather() -> list[float]:
    rank = dist.get_rank()
    numbers = [[2, 0], [1]][rank]
    return gather_samples(torch.tensor([float(number) for number in numbers]), numbers, 3).tolist()


def test_per_sample_values_become_known_everywhere(world):
    assert world(2, run_gather) == [[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]
