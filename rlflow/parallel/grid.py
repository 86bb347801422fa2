"""The process groups of one role: a tensor × context × pipeline × data grid on any ranks, in any order of dimensions.

Routed experts lie on the same ranks in a grid of their own, tensor × expert × pipeline × data. A Grid only makes groups
and answers questions about them. Whose groups megatron-core's globals show at a time is decided by `active`.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_bridge.layouts.grid import expert_sizes, gathers_in_order, shares_stages
from rlflow.errors import UserError

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")

_GROUPS: dict[str, tuple[str, ...]] = {
    # name in ProcessGroupCollection: the dimensions along which a group's ranks differ
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "dp_cp": ("cp", "dp"),
    "intra_dp_cp": ("cp", "dp"),
    "tp_dp_cp": ("tp", "cp", "dp"),
    "intra_dist_opt": ("tp", "cp", "ep", "dp", "pp"),
}
_EXPERT_GROUPS: dict[str, tuple[str, ...]] = {  # the same, for dimensions of the experts' grid
    "ep": ("ep",),
    "expt_tp": ("tp",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "expt_dp": ("dp",),
    "intra_expt_dp": ("dp",),
}


class Grid:
    """Groups of a role. Making one is collective over the whole default world, members or not.

    `ranks` fill the grid as they are given, the first dimension of `order` varying fastest; in every group they must
    ascend, which is all that torch's groups can do everywhere. Of the ranks of a pipeline stage `expert` times
    `expert_tensor` (by default as many as `tensor`) hold a whole set of routed experts. Raises UserError where the
    ranks cannot be laid out.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        context: int = 1,
        expert: int = 1,
        expert_tensor: int | None = None,
        order: str = "tp-cp-ep-dp-pp",
        timeout_seconds: float = 600,
    ) -> None:
        self.ranks = tuple(range(dist.get_world_size()) if ranks is None else ranks)
        self.order = tuple(order.split("-"))
        if sorted(self.order) != sorted(DIMENSIONS):
            raise UserError("order", f"{order!r} must name each of {', '.join(DIMENSIONS)} once")
        data, rest = divmod(len(self.ranks), tensor * pipeline * context)
        if rest or not data:
            shape = f"tensor {tensor} × context {context} × pipeline {pipeline}"
            raise UserError("ranks", f"{len(self.ranks)} ranks cannot hold {shape}")
        self.sizes = {"tp": tensor, "cp": context, "ep": 1, "dp": data, "pp": pipeline}
        self.expert_sizes = self._expert_sizes(expert, tensor if expert_tensor is None else expert_tensor)
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._layout = HyperCommGrid([self.sizes[name] for name in self.order], list(self.order))
        self._expert_layout = HyperCommGrid([self.expert_sizes[name] for name in self.order], list(self.order))
        self._check_order(order)
        self.rank = dist.get_rank()
        self.is_member = self.rank in self.ranks
        # Kept by `active`: what megatron's globals hold while this role is active, and the states of its RNG tracker.
        self.parallel_state: dict[str, Any] | None = None
        self.rng_states: dict[str, Any] | None = None
        self.groups = self._make_groups()
        self.everyone = self._make_group_of_all()

    def _expert_sizes(self, expert: int, tensor: int) -> dict[str, int]:
        stage = len(self.ranks) // self.sizes["pp"]
        sizes = expert_sizes(self.sizes, expert, tensor)
        if sizes is None:
            shape = f"expert {expert} × expert tensor {tensor}"
            raise UserError("ranks", f"{stage} ranks of a pipeline stage cannot hold {shape}")
        return sizes

    def _check_order(self, order: str) -> None:
        if not shares_stages(self.order, self.sizes, self.expert_sizes):
            raise UserError("order", f"{order!r} gives experts pipeline stages of their own: put pp first or last")
        if not gathers_in_order(self.order, self.expert_sizes):
            raise UserError("order", f"{order!r} lets ep vary faster than tp, which experts cut over both cannot have")
        both = [["tp", "ep"]] if min(self.ep, self.etp) > 1 else []
        for layout, further in ((self._layout, []), (self._expert_layout, both)):
            for names in [[name] for name in DIMENSIONS] + further:
                groups = ([self.ranks[place] for place in group] for group in layout.get_rank_enum(names))
                if descending := [group for group in groups if group != sorted(group)]:
                    named = "-".join(names)
                    raise UserError("ranks", f"a {named} group would have its ranks in the order {descending[0]}")

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
        return self.expert_sizes["ep"]

    @property
    def etp(self) -> int:
        """Ranks that share a routed expert."""
        return self.expert_sizes["tp"]

    @property
    def edp(self) -> int:
        """Ranks that hold the same part of the same routed experts."""
        return self.expert_sizes["dp"]

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

    def members(self, *dimensions: str, experts: bool = False) -> list[list[int]]:
        """The global ranks of every group whose ranks differ along the given dimensions, each ascending.

        The dimensions are those of the experts' grid where that is asked for.
        """
        places = (self._expert_layout if experts else self._layout).get_rank_enum(list(dimensions))
        return [sorted(self.ranks[place] for place in group) for group in places]

    def _make_groups(self) -> ProcessGroupCollection:
        enumerations = {name: self.members(*dimensions) for name, dimensions in _GROUPS.items()}
        enumerations |= {name: self.members(*along, experts=True) for name, along in _EXPERT_GROUPS.items()}
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
        # megatron 0.19 can shard weights along one more dimension; its grouped experts ask even where there is none
        groups.expt_gtp_remat, groups.expt_dp_gtp_remat = None, groups.expt_dp
        return groups

    def _make_group_of_all(self) -> dist.ProcessGroup | None:
        """All ranks of the grid in ascending order; None on the others."""
        if len(self.ranks) == dist.get_world_size():
            return dist.group.WORLD
        group, _ = dist.new_subgroups_by_enumeration([sorted(self.ranks)], timeout=self._timeout)
        return group
