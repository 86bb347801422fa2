"""Which ranks of the job roll out, how they form replicas, and the world that vLLM sees.

vLLM builds its groups over the whole default process group, so on a subset of the job's ranks it would wait for the
others for ever. `vllm_world` shows it the subset as if it were everything; nothing else knows of this.
"""

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rlflow.errors import UserError
from rlflow.parallel.sub_world import agree_on_group_names, sub_world


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
    the job must enter. Groups made inside exist on the members only.
    """
    if ranks == tuple(range(dist.get_world_size())):
        yield True
        return
    unsorted: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_seconds), **unsorted)
    if dist.get_rank() in ranks:
        with sub_world(group):
            yield True
    else:
        yield False
    agree_on_group_names()
