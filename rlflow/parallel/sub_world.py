"""A group of some of the job's ranks, shown to a library as if it were everything.

vLLM and megatron-core's checkpoints take the default process group for the ranks that work together. Inside `sub_world`
it is another one; torch then numbers the ranks of groups that were made before wrongly, so nobody may ask for them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from rlflow.parallel.process import device


@contextlib.contextmanager
def sub_world(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Inside, the default process group is `group`, by whose ranks the environment counts too; only members enter."""
    assert group is not None, "this rank is outside the group"
    size, numbers = dist.get_world_size(group), c10d._world.pg_group_ranks
    world, ranks = c10d.GroupMember.WORLD, numbers[group]
    with _environment(RANK=dist.get_rank(group), WORLD_SIZE=size):
        c10d.GroupMember.WORLD, numbers[group] = group, {rank: rank for rank in range(size)}
        try:
            yield
        finally:
            c10d.GroupMember.WORLD, numbers[group] = world, ranks


def agree_on_group_names() -> None:
    """After some ranks made groups among themselves: let all name the next one alike. Collective over the job.

    torch names groups by a counter; it becomes the largest one, since setting it back would give a name twice.
    """
    named = torch.tensor([c10d._world.group_count], device=device())
    dist.all_reduce(named, op=dist.ReduceOp.MAX)
    c10d._world.group_count = int(named.item())


@contextlib.contextmanager
def _environment(**values: object) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        restore_environment(before)


def restore_environment(before: dict[str, str | None]) -> None:
    """Give environment variables the values they had, None meaning unset."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
