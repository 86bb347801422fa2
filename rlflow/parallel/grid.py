"""The process groups of one role: a tensor × context × pipeline × data grid on any ranks, in any order of dimensions.

A Grid only makes groups and answers questions about them. Whose groups megatron-core's globals show at a time is
decided by `active`.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from rlflow.errors import UserError

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")

_GROUPS: dict[str, tuple[str, ...]] = {
    # name in ProcessGroupCollection: the dimensions along which a group's ranks differ; experts are not sharded further
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "ep": ("ep",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("cp", "dp"),
    "intra_dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "expt_tp": ("tp",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "expt_dp": ("cp", "dp"),
    "intra_expt_dp": ("cp", "dp"),
    "intra_dist_opt": ("tp", "cp", "ep", "dp", "pp"),
}


class Grid:
    """Groups of a role. Making one is collective over the whole default world, members or not.

    `ranks` are taken in ascending order, which is also their order in every group; the first dimension of `order`
    varies fastest. Raises UserError where the ranks cannot be laid out.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        order: str = "tp-cp-ep-dp-pp",
        timeout_seconds: float = 600,
    ) -> None:
        self.ranks = tuple(sorted(range(dist.get_world_size()) if ranks is None else ranks))
        self.order = tuple(order.split("-"))
        if sorted(self.order) != sorted(DIMENSIONS):
            raise UserError("order", f"{order!r} must name each of {', '.join(DIMENSIONS)} once")
        data, rest = divmod(len(self.ranks), tensor * pipeline * context)
        if rest or not data:
            shape = f"tensor {tensor} × context {context} × pipeline {pipeline}"
            raise UserError("ranks", f"{len(self.ranks)} ranks cannot hold {shape}")
        self.sizes = {"tp": tensor, "cp": context, "ep": 1, "dp": data, "pp": pipeline}
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._layout = HyperCommGrid([self.sizes[name] for name in self.order], list(self.order))
        self.rank = dist.get_rank()
        self.is_member = self.rank in self.ranks
        # Kept by `active`: what megatron's globals hold while this role is active, and the states of its RNG tracker.
        self.parallel_state: dict[str, Any] | None = None
        self.rng_states: dict[str, Any] | None = None
        self.groups = self._make_groups()

    @property
    def tp(self) -> int:
        return self.sizes["tp"]

    @property
    def pp(self) -> int:
        return self.sizes["pp"]

    @property
    def dp(self) -> int:
        return self.sizes["dp"]

    @property
    def cp(self) -> int:
        return self.sizes["cp"]

    @property
    def ep(self) -> int:
        """Places to which the routed experts of a layer go whole."""
        return self.sizes["ep"]

    @property
    def etp(self) -> int:
        """Ranks that share a routed expert."""
        return self.sizes["tp"]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a global rank stands along each dimension. Raises ValueError for a rank outside the grid."""
        place = self.ranks.index(rank)
        found = {}
        for name in self.order:
            place, found[name] = divmod(place, self.sizes[name])
        return found

    def replica(self, rank: int) -> int:
        """The data-parallel replica of a rank: ranks of one replica see the same micro-batches."""
        return self.coordinates(rank)["dp"]

    @functools.cached_property
    def here(self) -> dict[str, int]:
        """This process's coordinates."""
        return self.coordinates(self.rank)

    @property
    def is_first_stage(self) -> bool:
        return self.here["pp"] == 0

    @property
    def is_last_stage(self) -> bool:
        return self.here["pp"] == self.pp - 1

    def members(self, *dimensions: str) -> list[list[int]]:
        """The global ranks of every group whose ranks differ along the given dimensions, each ascending."""
        places = self._layout.get_rank_enum(list(dimensions))
        return [sorted(self.ranks[place] for place in group) for group in places]

    def _make_groups(self) -> ProcessGroupCollection:
        enumerations = {name: self.members(*dimensions) for name, dimensions in _GROUPS.items()}
        stages = enumerations["pp"]
        ends = [[stage[0], stage[-1]] if len(stage) > 1 else stage for stage in stages]
        enumerations |= {"embd": ends, "pos_embd": [stage[:1] for stage in stages]}
        made: dict[str, dist.ProcessGroup | None] = {}
        groups = ProcessGroupCollection()
        for name, enumeration in enumerations.items():
            # Equal enumerations share a group: communicators cost memory and start-up time.
            key = repr(enumeration)
            if key not in made:
                made[key], _ = dist.new_subgroups_by_enumeration(enumeration, timeout=self._timeout)
            setattr(groups, name, made[key])
        return groups
