"""Sizes and orders of Megatron's two grids: which go together, and how many replicas hold a layer's experts."""

import pytest

from megatron_bridge.layouts import MegatronLayout
from megatron_bridge.layouts.grid import expert_sizes, fewest_replicas, gathers_in_order, shares_stages, valid_sizes
from tests.bridge.toys import toy_experts


def test_experts_lie_on_the_ranks_of_a_stage() -> None:
    sizes = {"tp": 2, "cp": 2, "dp": 3, "pp": 2}  # 12 ranks a stage
    assert expert_sizes(sizes, ep=2, etp=2) == {"tp": 2, "cp": 1, "ep": 2, "dp": 3, "pp": 2}
    assert expert_sizes(sizes, ep=4, etp=1) == {"tp": 1, "cp": 1, "ep": 4, "dp": 3, "pp": 2}
    assert expert_sizes(sizes, ep=4, etp=2) is None


@pytest.mark.parametrize(
    ("order", "pp", "shared"),
    [
        ("tp-cp-ep-dp-pp", 2, True),
        ("pp-tp-cp-ep-dp", 2, True),
        ("tp-cp-dp-pp-ep", 2, False),  # a stage's step is 4 ranks in one grid, 2 in the other
        ("tp-cp-dp-pp-ep", 1, True),  # one stage holds all, wherever it stands
    ],
)
def test_both_grids_have_the_same_stages(order: str, pp: int, shared: bool) -> None:
    sizes = {"tp": 1, "dp": 4, "pp": pp}
    experts = expert_sizes(sizes, ep=2, etp=1)
    assert experts is not None
    assert shares_stages(order.split("-"), sizes, experts) == shared
    if pp == 1:
        arch = toy_experts(num_hidden_layers=2, mlp_only_layers=[])
        layout = MegatronLayout(arch, dp=4, ep=2, order=order)
        assert [layout.coordinate(rank, "ep", experts=True) for rank in range(4)] == [0, 0, 1, 1]


def test_tp_varies_faster_than_ep_where_experts_are_cut_over_both() -> None:
    before, behind = ["tp", "cp", "ep", "dp", "pp"], ["ep", "tp", "cp", "dp", "pp"]
    assert gathers_in_order(before, {"tp": 2, "ep": 2})
    assert not gathers_in_order(behind, {"tp": 2, "ep": 2})
    assert gathers_in_order(behind, {"tp": 1, "ep": 2})


def test_replicas_and_sizes_in_words() -> None:
    assert [fewest_replicas(2, ep, 1) for ep in (1, 2, 3, 4)] == [1, 1, 3, 2]
    assert valid_sizes(lambda size: 12 % size, 6) == "1, 2, 3, 4, 6"
