"""Grids that are suggested in place of one that does not fit: each valid, nearest first."""

from dataclasses import replace
from math import log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.families.architecture import Experts
from megatron_bridge.layouts import MegatronLayout
from rlflow.config import Role
from rlflow.config.check_grid import SIZES, grid_faults
from rlflow.config.nearest_grids import change_words, nearest_grids
from rlflow.config.roles import replica_size
from tests.config.examples import QWEN

DENSE = load_architecture(QWEN)  # 28 layers, 28 heads, 4 key-value heads, 18944 feed-forward channels


def architecture(layers: int, kv_heads: int, queries: int, experts: int | None) -> Architecture:
    arch = replace(
        DENSE, layers=layers, heads=kv_heads * queries, kv_heads=kv_heads, ffn=1536, layer_kinds=("layer",) * layers
    )
    if experts is None:
        return arch
    routed = Experts(count=experts, per_token=2, ffn=96)
    return replace(arch, family="qwen3_moe", experts=routed, layer_kinds=("moe",) * layers)


def words(ranks: int, arch: Architecture = DENSE, **sizes: Any) -> list[str]:
    asked = Role(**sizes)
    return [change_words(asked, found, ranks) for found in nearest_grids(asked, arch, ranks)]


def test_grids_that_need_fewer_doublings_and_halvings_come_first() -> None:
    """Of those equally near the larger replica: it needs less memory."""
    assert words(4, tensor_parallel_size=2, pipeline_parallel_size=4) == [
        "TP2 × PP2 × DP1", "TP1 × PP4 × DP1", "TP2 × PP1 × DP2",
    ]  # fmt: skip
    assert words(4, tensor_parallel_size=8) == ["TP4 × PP1 × DP1", "TP2 × PP1 × DP2", "TP2 × PP2 × DP1"]
    assert words(1, tensor_parallel_size=4, sequence_parallel=True) == ["TP1 × PP1 × DP1 (sequence_parallel false)"]


def test_what_was_not_asked_for_is_not_suggested() -> None:
    assert not any("CP" in found or "VP" in found for found in words(8, tensor_parallel_size=8))
    assert words(8, context_parallel_size=3)[0] == "TP1 × CP4 × PP1 × DP2"
    assert words(4, pipeline_parallel_size=4, virtual_pipeline_parallel_size=2) == [  # 7 layers a rank
        "TP1 × PP4 × DP1", "TP1 × PP2 × VP2 × DP2", "TP1 × PP4 × VP7 × DP1",
    ]  # fmt: skip


def test_grids_that_the_batch_does_not_divide_over_are_the_last_resort() -> None:
    asked = Role(tensor_parallel_size=8)
    found = nearest_grids(asked, DENSE, 8, suits=lambda dp: dp == 4)
    assert [8 // replica_size(role) for role in found] == [4, 4]  # TP2 and PP2
    assert nearest_grids(asked, DENSE, 8, suits=lambda dp: False) == nearest_grids(asked, DENSE, 8)


architectures = st.builds(
    architecture, st.integers(1, 24), st.integers(1, 8), st.integers(1, 4), st.none() | st.integers(2, 12)
)
size = st.integers(1, 9)
roles = st.builds(
    Role, tensor_parallel_size=size, pipeline_parallel_size=size, context_parallel_size=st.integers(1, 3),
    virtual_pipeline_parallel_size=st.integers(1, 3), expert_parallel_size=size, sequence_parallel=st.booleans(),
    expert_tensor_parallel_size=st.none() | size, order=st.sampled_from(["tp-cp-ep-dp-pp", "pp-ep-dp-tp-cp", "x"]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(roles, architectures, st.integers(1, 24))
def test_every_suggestion_is_valid_and_there_always_is_one(asked: Role, arch: Architecture, ranks: int) -> None:
    found = nearest_grids(asked, arch, ranks)
    assert 1 <= len(found) <= 3
    for role in found:
        assert list(grid_faults("actor", role, arch, ranks)) == []
        assert ranks % replica_size(role) == 0
    distances = [
        sum(abs(log2((getattr(role, name) or 1) / (getattr(asked, name) or 1))) for name in SIZES) for role in found
    ]
    assert distances == sorted(distances)


@settings(max_examples=60, deadline=None)
@given(roles, architectures, st.integers(1, 24))
def test_a_good_grid_is_its_own_nearest(asked: Role, arch: Architecture, ranks: int) -> None:
    if not any(grid_faults("actor", asked, arch, ranks)):
        assert nearest_grids(asked, arch, ranks)[0] == asked


@settings(max_examples=60, deadline=None)
@given(roles, architectures, st.integers(1, 24))
def test_the_bridge_can_lay_out_what_is_suggested(asked: Role, arch: Architecture, ranks: int) -> None:
    """Its own rules on layouts refuse none of the grids, and count as many replicas."""
    for role in nearest_grids(asked, arch, ranks):
        layout = MegatronLayout(
            arch, role.tensor_parallel_size, role.pipeline_parallel_size, ranks // replica_size(role),
            order=role.order, vpp=role.virtual_pipeline_parallel_size, cp=role.context_parallel_size,
            ep=role.expert_parallel_size, etp=role.expert_tensor_parallel_size,
        )  # fmt: skip
        assert layout.world == ranks


@pytest.mark.parametrize(
    ("sizes", "ranks", "rule"),
    [
        ({"virtual_pipeline_parallel_size": 2}, 4, "needs role.pipeline_parallel_size above 1"),
        ({"pipeline_parallel_size": 4, "virtual_pipeline_parallel_size": 3}, 4,
         "28 layers do not divide over PP 4 × VP 3 = 12 chunks: with PP 4 valid are 1, 7"),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2}, 6,
         "6 ranks do not divide into blocks of TP × CP × PP = 4"),
    ],
)  # fmt: skip
def test_rules_between_sizes(sizes: dict[str, int], ranks: int, rule: str) -> None:
    (fault,) = grid_faults("role", Role(**sizes), DENSE, ranks)
    assert fault.rule.startswith(rule)
