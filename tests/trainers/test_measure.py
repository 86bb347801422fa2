"""Means, counts and pass@k over samples that lie on several ranks."""

import math

import pytest
import torch.distributed as dist

from rlflow.trainers.measure import mean_over_ranks, pass_at, sum_over_ranks

NAN = math.nan
ACCURACY = [[0.5, NAN, NAN], [0.8, 0.6, 0.7]]  # by rank


def run_means() -> dict[str, float]:
    values = [("accuracy", value) for value in ACCURACY[dist.get_rank()]]
    return mean_over_ranks([*values, ("never measured", NAN), ("length", 4.0), ("length", 6.0)])


def test_means_skip_nan_and_weigh_every_value_alike(world):
    """cases.md E09: 2.6/4 = 0.65, where a mean of the ranks' means would be 0.6; what is nowhere measured is absent."""
    for means in world(2, run_means):
        assert means == pytest.approx({"accuracy": 0.65, "length": 5.0})


def run_sums() -> dict[str, float]:
    return sum_over_ranks({"reward/errors": 1.0 + dist.get_rank(), "reward/unscorable": 0.0})


def test_counts_are_added_up(world):
    assert world(2, run_sums) == [{"reward/errors": 3.0, "reward/unscorable": 0.0}] * 2


@pytest.mark.parametrize(("k", "chance"), [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)])
def test_pass_at_k_of_one_right_in_four(k: int, chance: float):
    """1 − C(3, k) / C(4, k); with n = k right or wrong is certain."""
    assert pass_at(k, [False, True, False, False]) == chance
    assert pass_at(k, [False] * 4) == 0.0
    assert pass_at(k, [True] * 4) == 1.0


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples, there are 2"):
        pass_at(3, [True, False])
