"""Which ranks of the job roll out, how they form replicas, and the world that vLLM sees.

vLLM builds its groups over the whole default process group, so on a subset of the job's ranks it would wait for the
others for ever. `vllm_world` shows it the subset as if it were everything; nothing else knows of this.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from rlflow.errors import UserError


@dataclass(frozen=True)
class Replicas:
    """The rollout ranks in order, cut into replicas of tensor × pipeline parallel neighbours, tensor fastest."""

    ranks: tuple[int, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        if len(self.ranks) % self.size:
            sizes = f"{self.tensor_parallel_size}"
            if self.pipeline_parallel_size > 1:
                sizes += f" × rollout.pipeline_parallel_size = {self.pipeline_parallel_size}"
            message = f"{sizes} does not divide the {len(self.ranks)} rollout ranks"
            raise UserError("rollout.tensor_parallel_size", message)

    @property
    def size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def count(self) -> int:
        return len(self.ranks) // self.size

    def replica_of(self, rank: int) -> int | None:
        """The replica that a rank of the job belongs to, None outside the rollout."""
        return self.ranks.index(rank) // self.size if rank in self.ranks else None

    def place_of(self, rank: int) -> int | None:
        """A rank's number in its replica, None outside the rollout."""
        return self.ranks.index(rank) % self.size if rank in self.ranks else None


def rollout_ranks(ranks: str | Sequence[int], world_size: int) -> tuple[int, ...]:
    """`rollout.ranks` as numbers: "all", or the job's ranks that roll out, each once and in order."""
    chosen = tuple(range(world_size)) if isinstance(ranks, str) else tuple(ranks)
    if list(chosen) != sorted(set(chosen)) or not chosen or not 0 <= chosen[0] <= chosen[-1] < world_size:
        raise UserError("rollout.ranks", f"{list(chosen)} are not ascending ranks of a job of {world_size}")
    return chosen


@contextlib.contextmanager
def vllm_world(ranks: tuple[int, ...], timeout_seconds: float) -> Iterator[bool]:
    """Inside, the default process group of a rollout rank holds `ranks` alone; yields whether this rank is one.

    Ranks that do not ascend are numbered as they are listed, which needs `compat.has_unsorted_groups()`. Every rank of
    the job must enter. Groups made inside exist on the members only. torch names groups by a counter, so
    the counters are set to the largest afterwards: setting them back would give a name twice.
    """
    if ranks == tuple(range(dist.get_world_size())):
        yield True
        return
    unsorted: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_seconds), **unsorted)
    rank = dist.get_rank()
    if rank in ranks:
        with _default_group(group), _environment(RANK=ranks.index(rank), WORLD_SIZE=len(ranks)):
            yield True
    else:
        yield False
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    named = torch.tensor([c10d._world.group_count], device=device)
    dist.all_reduce(named, op=dist.ReduceOp.MAX)
    c10d._world.group_count = int(named.item())


@contextlib.contextmanager
def _default_group(group: dist.ProcessGroup) -> Iterator[None]:
    world = c10d.GroupMember.WORLD
    c10d.GroupMember.WORLD = group
    try:
        yield
    finally:
        c10d.GroupMember.WORLD = world


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
