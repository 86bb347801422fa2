"""Which ranks roll out, and in which replicas."""

import pytest

from rlflow.errors import UserError
from rlflow.rollout.world import Replicas, rollout_ranks


def test_replicas_are_neighbours() -> None:
    replicas = Replicas((1, 2, 5, 6), 2)
    assert replicas.count == 2
    assert [replicas.replica_of(rank) for rank in range(7)] == [None, 0, 0, None, None, 1, 1]
    assert [replicas.place_of(rank) for rank in range(7)] == [None, 0, 1, None, None, 0, 1]


def test_a_replica_has_all_its_pipeline_stages() -> None:
    replicas = Replicas(tuple(range(8)), 2, 2)
    assert replicas.count == 2
    assert [replicas.replica_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(UserError, match=r"2 × rollout.pipeline_parallel_size = 2 does not divide the 6 rollout ranks"):
        Replicas(tuple(range(6)), 2, 2)


def test_the_tensor_parallel_size_must_divide_the_ranks() -> None:
    with pytest.raises(UserError, match=r"rollout.tensor_parallel_size: 2 does not divide the 3 rollout ranks"):
        Replicas((0, 1, 2), 2)


def test_all_means_every_rank() -> None:
    assert rollout_ranks("all", 3) == (0, 1, 2)
    assert rollout_ranks([1, 2], 3) == (1, 2)


@pytest.mark.parametrize("ranks", [[], [1, 0], [0, 0], [2, 3], [-1, 0]])
def test_other_lists_are_refused(ranks: list[int]) -> None:
    with pytest.raises(UserError, match=r"rollout\.ranks"):
        rollout_ranks(ranks, 3)
