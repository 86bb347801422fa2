"""Some ranks see a group of theirs as if it were the whole job; afterwards all is as it was, and new groups agree."""

import os

import torch
import torch.distributed as dist

from tests.workers import World


def test_members_count_from_zero_and_come_back(world: World) -> None:
    first, second, third = world(3, _look_around)
    assert first is None
    assert second == {"inside": (0, 2, "0", "2", [0, 1], 5.0), "outside": (1, 3, "1", "3"), "together": 6.0}
    assert third == {"inside": (1, 2, "1", "2", [0, 1], 5.0), "outside": (2, 3, "2", "3"), "together": 6.0}


def _look_around() -> dict[str, object] | None:
    """What ranks 1 and 2 see: rank, size, environment, the group's ranks, and the sum of what its ranks hold."""
    from rlflow import parallel
    from rlflow.parallel.sub_world import agree_on_group_names, sub_world

    parallel.initialize(60, 0)
    rank = dist.get_rank()
    grid = parallel.Grid([1, 2], timeout_seconds=60)
    seen: dict[str, object] = {}
    if grid.is_member:
        with sub_world(grid.everyone):
            held = torch.tensor(float(rank + 1))
            dist.all_reduce(held)
            dist.barrier(dist.new_group([0, 1]))  # a group that rank 0 of the job has not
            seen["inside"] = (*_numbers(), dist.get_process_group_ranks(dist.group.WORLD), held.item())
        seen["outside"] = _numbers()
    agree_on_group_names()
    together = torch.tensor(float(rank + 1))
    dist.all_reduce(together, group=dist.new_group([0, 1, 2]))
    return seen | {"together": together.item()} if seen else None


def _numbers() -> tuple[int, int, str, str]:
    return dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.environ["WORLD_SIZE"]
