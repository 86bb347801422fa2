"""The fixture that starts distributed tests."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from tests.workers import RankFailure, World


def _sum_of_ranks(add: int) -> int:
    total = torch.tensor(dist.get_rank() + add)
    dist.all_reduce(total)
    return int(total)


def _fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def test_worlds_of_several_sizes_share_processes(world: World) -> None:
    assert world(2, _sum_of_ranks, 10) == [21, 21]
    assert world(1, _sum_of_ranks, 10) == [10]
    assert world(2, _sum_of_ranks, 0) == [1, 1]


def test_a_failing_rank_fails_the_test_with_its_traceback() -> None:
    pool = World()
    with pytest.raises(RankFailure, match="rank one is unwell"):
        pool(2, _fail_on_one)
    assert pool(2, _sum_of_ranks, 0) == [1, 1]
    pool.close()


def test_a_process_that_died_before_its_call_is_a_failing_rank() -> None:
    before, pool = set(multiprocessing.active_children()), World()
    pool.start(1)
    (worker,) = set(multiprocessing.active_children()) - before
    worker.kill()
    worker.join()
    with pytest.raises(RankFailure, match="the process of rank 0 died"):
        pool(1, _sum_of_ranks, 0)
