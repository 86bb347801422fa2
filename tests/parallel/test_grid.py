"""Grids: who shares what with whom, on any ranks and in any order, and what megatron's globals show."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_bridge.layouts import MegatronLayout
from rlflow.errors import UserError


def groups_here(options: dict[str, Any]) -> dict[str, list[int] | None]:
    from rlflow.parallel import Grid

    groups = Grid(**options).groups
    names = ("tp", "pp", "dp", "mp", "embd", "pos_embd")
    ranks = {name: getattr(groups, name) for name in names}
    return {name: None if group is None else dist.get_process_group_ranks(group) for name, group in ranks.items()}


def test_tensor_parallel_ranks_are_neighbours_by_default(world: Callable[..., Any]) -> None:
    ranks = world(4, groups_here, {"tensor": 2, "pipeline": 2})
    assert [rank["tp"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["pp"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert ranks[0]["mp"] == [0, 1, 2, 3]
    assert [rank["embd"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["pos_embd"] for rank in ranks] == [[0], [1], None, None]


def test_the_order_of_dimensions_is_free(world: Callable[..., Any]) -> None:
    ranks = world(4, groups_here, {"tensor": 2, "order": "pp-dp-tp-cp-ep"})
    assert [rank["dp"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["tp"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_data_parallelism_may_lie_on_both_sides_of_tensor_parallelism(world: Callable[..., Any]) -> None:
    ranks = world(4, groups_here, {"ranks": [0, 2, 1, 3], "tensor": 2})
    assert [rank["tp"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [rank["dp"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    message = world(4, refused, {"ranks": [2, 0, 1, 3], "tensor": 2})[0]
    assert message == "ranks: a tp group would have its ranks in the order [2, 0]"


def test_a_grid_may_leave_ranks_out(world: Callable[..., Any]) -> None:
    ranks = world(4, groups_here, {"ranks": [1, 3], "tensor": 2})
    assert [rank["tp"] for rank in ranks] == [None, [1, 3], None, [1, 3]]


def fenced() -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from rlflow import parallel

    actor, rollout = parallel.Grid(tensor=2), parallel.Grid()
    own = torch.get_rng_state()
    seen = []
    for grid in (actor, rollout, actor):
        with parallel.active(grid), get_cuda_rng_tracker().fork():
            size = parallel_state.get_tensor_model_parallel_world_size()
            seen.append((size, parallel_state.get_data_parallel_rank(), torch.rand(1).item()))
    unmoved = torch.equal(own, torch.get_rng_state())
    return [*seen, unmoved, parallel_state._TENSOR_MODEL_PARALLEL_GROUP is None, get_cuda_rng_tracker().get_states()]


def test_active_shows_one_role_and_leaves_nothing_behind(world: Callable[..., Any]) -> None:
    first, second = world(2, fenced)
    assert [seen[:2] for seen in first[:3]] == [(2, 0), (1, 0), (2, 0)]
    assert [seen[:2] for seen in second[:3]] == [(2, 0), (1, 1), (2, 0)]
    assert first[3:] == second[3:] == [True, True, {}]
    # The actor's tracker goes on where it stopped, and differs between tensor-parallel ranks.
    assert first[0][2] != first[2][2]
    assert first[0][2] != second[0][2]


def coordinates(options: dict[str, Any]) -> list[tuple[dict[str, int], int, bool, bool]]:
    from rlflow.parallel import Grid

    grid = Grid(**options)
    here = grid.here
    return [({name: here[name] for name in ("tp", "pp", "dp")}, grid.replica(grid.rank), grid.is_first_stage,
             grid.is_last_stage)]  # fmt: skip


def test_coordinates_follow_the_order(world: Callable[..., Any]) -> None:
    ranks = world(4, coordinates, {"pipeline": 2, "order": "pp-tp-cp-ep-dp"})
    assert [rank[0] for rank in ranks] == [
        ({"tp": 0, "pp": 0, "dp": 0}, 0, True, False),
        ({"tp": 0, "pp": 1, "dp": 0}, 0, False, True),
        ({"tp": 0, "pp": 0, "dp": 1}, 1, True, False),
        ({"tp": 0, "pp": 1, "dp": 1}, 1, False, True),
    ]


def refused(options: dict[str, Any]) -> str:
    from rlflow.parallel import Grid

    with pytest.raises(UserError) as caught:
        Grid(**options)
    return str(caught.value)


def test_ranks_that_do_not_fill_the_grid_are_refused(world: Callable[..., Any]) -> None:
    assert "2 ranks cannot hold tensor 2 × context 1 × pipeline 2" in world(2, refused, {"tensor": 2, "pipeline": 2})[0]


def test_an_order_without_a_dimension_is_refused(world: Callable[..., Any]) -> None:
    assert "must name each of tp, cp, ep, dp, pp once" in world(2, refused, {"order": "tp-dp-pp"})[0]


def test_experts_that_do_not_fit_the_ranks_are_refused(world: Callable[..., Any]) -> None:
    message = world(2, refused, {"expert": 2, "expert_tensor": 2})[0]
    assert "2 ranks of a pipeline stage cannot hold expert 2 × expert tensor 2" in message
    assert "put pp first or last" in world(4, refused, {"pipeline": 2, "expert": 2, "order": "tp-cp-dp-pp-ep"})[0]
    order = {"tensor": 2, "expert": 2, "order": "ep-tp-cp-dp-pp"}
    assert "lets ep vary faster than tp" in world(4, refused, order)[0]
    across = {"tensor": 2, "expert": 2, "ranks": [0, 2, 1, 3]}
    assert "a tp-ep group would have its ranks in the order [0, 2, 1, 3]" in world(4, refused, across)[0]


def expert_places(options: dict[str, Any], layout: dict[str, Any]) -> list[Any]:
    from megatron.core import parallel_state

    from rlflow import parallel
    from tests.bridge.toys import toy_experts

    grid = parallel.Grid(**options)
    here = MegatronLayout(toy_experts(num_hidden_layers=2, mlp_only_layers=[]), **layout, order="-".join(grid.order))
    with parallel.active(grid):
        sizes = (parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_data_parallel_rank())
        place = (parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank())
    rows = {name: dist.get_process_group_ranks(getattr(grid.groups, name)) for name in ("ep", "expt_tp", "expt_dp")}
    same = {name: [here.shard(rank, "experts") for rank in rows[name]] for name in rows}
    return [sizes, place, here.shard(grid.rank, "experts"), rows, same]


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"tensor": 2, "expert": 2}, {"tp": 2, "dp": 2, "ep": 2}),
        ({"tensor": 2, "expert": 2, "expert_tensor": 1}, {"tp": 2, "dp": 2, "ep": 2, "etp": 1}),
        ({"tensor": 2, "expert": 4, "expert_tensor": 1}, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}),
        ({"pipeline": 2, "expert": 2, "order": "pp-tp-cp-ep-dp"}, {"pp": 2, "dp": 2, "ep": 2}),
        ({"expert": 2, "order": "dp-tp-cp-ep-pp"}, {"dp": 4, "ep": 2}),
    ],
    ids=["EP2×ETP2", "TP2 EP2 ETP1", "EP4", "PP2 fastest", "DP fastest"],
)
def test_experts_lie_where_the_bridge_says(world: Callable[..., Any], options: Any, layout: Any) -> None:
    for (ep, _), place, shard, rows, shards in world(4, expert_places, options, layout):
        assert place == shard
        assert ep == options["expert"] == len(rows["ep"])
        assert [expert for expert, _ in shards["ep"]] == list(range(ep))
        assert {part for _, part in shards["ep"]} == {place[1]}
        assert {expert for expert, _ in shards["expt_tp"]} == {place[0]}
        assert set(shards["expt_dp"]) == {place}
