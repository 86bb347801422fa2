"""Placements: the bytes that an order of dimensions or a numbering of the engines' ranks saves, in models' real sizes.

Where a rank of the trainer holds a part of its own slice, the least that can be received is the rest of it; the numbers
are a slice's bytes in bfloat16 (8.19 GB are half of Qwen3-8B, 15.4 GB an eighth of Llama-3-70B) times that rest.
"""

import itertools
import random
from typing import Any

import pytest

from megatron_bridge.assignment import assign
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.placement import Placement, align, natural
from megatron_bridge.plan import make_plan
from tests.bridge.toys import toy, toy_experts
from tools.bench_plan import LLAMA_70B

QWEN3 = {"model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
QWEN3_8B = {
    **QWEN3, "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288
}  # fmt: skip
QWEN3_32B = {
    **QWEN3, "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 64, "intermediate_size": 25600
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "grid", "tp", "before", "after"),
    [
        (QWEN3_8B, {"tp": 8}, 2, 8.190, 6.143),  # half of the model, of which a rank holds an eighth
        (QWEN3_8B, {"tp": 2, "dp": 4}, 4, 4.095, 0.0),  # a quarter, which is in the half that two ranks hold
        (QWEN3_32B, {"tp": 8}, 4, 16.381, 8.190),
        (QWEN3_32B, {"tp": 2, "pp": 4}, 8, 8.191, 6.241),  # an eighth, of which a rank holds one stage in four
        (LLAMA_70B, {"tp": 4, "pp": 2}, 8, 17.639, 8.820),
        (LLAMA_70B, {"tp": 8}, 8, 0.0, 0.0),
    ],
)
def test_the_bound_is_reached(
    config: dict[str, Any], grid: dict[str, int], tp: int, before: float, after: float
) -> None:
    arch = load_architecture(config)
    train, rollout = MegatronLayout(arch, **grid), VLLMLayout(arch, tp, tuple(range(8)))
    assert natural(train, rollout).cost[0] / 1e9 == pytest.approx(before, abs=6e-4)
    placement = align(train, rollout)
    assert placement.cost[0] / 1e9 == pytest.approx(after, abs=6e-4)
    check(placement)
    assert sum(placement.received_bytes) <= 1.02 * sum(placement.least_bytes)


def check(placement: Placement) -> None:
    """The plan moves what the placement says, and nobody's slice has changed."""
    plan = make_plan(placement.train, placement.rollout)
    assert placement.received_bytes == tuple(plan.received_bytes(rank) for rank in sorted(placement.rollout.ranks))
    assert all(low <= got for low, got in zip(placement.least_bytes, placement.received_bytes, strict=True))
    for groups in _groups(placement.train).values():
        assert all(list(group) == sorted(group) for group in groups)


def _groups(train: MegatronLayout) -> dict[str, list[tuple[int, ...]]]:
    """Ranks that differ along one dimension, by their place in it."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for along in ("tp", "dp", "pp"):
        others = [name for name in ("tp", "dp", "pp", "cp") if name != along]
        groups: dict[tuple[int, ...], dict[int, int]] = {}
        for rank in train.ranks:
            key = tuple(train.coordinate(rank, name) for name in others)
            groups.setdefault(key, {})[train.coordinate(rank, along)] = rank
        found[along] = [tuple(group[place] for place in sorted(group)) for group in groups.values()]
    return found


def test_the_order_alone_where_engines_must_keep_their_numbering() -> None:
    arch = load_architecture(QWEN3_8B)
    train, rollout = MegatronLayout(arch, tp=2, dp=4), VLLMLayout(arch, 4, tuple(range(8)))
    placement = align(train, rollout, renumber=False)
    assert placement.rollout == rollout
    assert placement.train.ranks == (0, 2, 1, 3, 4, 6, 5, 7)  # tp between two parts of dp
    assert placement.cost == (0, 0)
    check(placement)
    fixed = align(MegatronLayout(arch, tp=8), VLLMLayout(arch, 2, tuple(range(8))), renumber=False)
    assert fixed.cost[0] / 1e9 == pytest.approx(8.190, abs=6e-4)  # no order of one dimension helps


def test_what_is_best_already_stays_as_it_is() -> None:
    arch = toy(vocab_size=64)
    train, rollout = MegatronLayout(arch, tp=2, dp=2), VLLMLayout(arch, 2, (0, 1, 2, 3))
    placement = align(train, rollout)
    assert (placement.train, placement.rollout) == (train, rollout)


def test_tensor_parallel_groups_stay_inside_a_node() -> None:
    arch = load_architecture({**LLAMA_70B, "num_hidden_layers": 8})
    train, rollout = MegatronLayout(arch, tp=4, pp=4), VLLMLayout(arch, 4, tuple(range(16)))
    placement = align(train, rollout, ranks_per_node=8)
    check(placement)
    for group in _groups(placement.train)["tp"]:
        assert len({rank // 8 for rank in group}) == 1
    engines = [placement.rollout.ranks[begin : begin + 4] for begin in range(0, 16, 4)]
    assert all(len({rank // 8 for rank in engine}) == 1 for engine in engines)


def test_between_equals_the_one_that_spares_the_network_is_taken() -> None:
    """Each rank holds half of its slice in any order; with pp fastest, its node holds the other half."""
    arch = load_architecture({**LLAMA_70B, "num_hidden_layers": 8})
    train, rollout = MegatronLayout(arch, tp=2, pp=2, dp=2), VLLMLayout(arch, 2, tuple(range(8)))
    placement = align(train, rollout, ranks_per_node=4)
    plan = make_plan(placement.train, placement.rollout, ranks_per_node=4)
    assert not [1 for s, t in plan.traffic if s // 4 != t // 4]
    check(placement)


@pytest.mark.parametrize(
    "grid",
    [
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 1},
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "etp": 2},
        {"tp": 2, "pp": 4, "dp": 1, "ep": 1, "etp": 1},  # two replicas of the experts, one of all else
        {"tp": 1, "pp": 2, "cp": 2, "dp": 2, "ep": 4},
    ],
)
def test_experts_keep_the_stages_of_their_layers(grid: dict[str, int]) -> None:
    arch = toy_experts(num_hidden_layers=4, mlp_only_layers=[])
    train = MegatronLayout(arch, **grid)  # type: ignore[arg-type]
    rollout = VLLMLayout(arch, 2, tuple(range(8)), ep=True)
    placement = align(train, rollout, ranks_per_node=4)
    names = [name for name in placement.train.order.split("-") if name in ("tp", "dp", "pp")]
    assert "pp" in (names[0], names[-1])
    assert min(train.ep, train.expert_tp) == 1 or placement.train.order.index("tp") < placement.train.order.index("ep")
    check(placement)
    assert placement.cost <= natural(train, rollout).cost


def test_assignment_is_the_best_of_all() -> None:
    chance = random.Random(0)
    for size in (1, 2, 3, 4, 5, 5, 5):
        gain = [[chance.randint(-3, 9) for _ in range(size)] for _ in range(size)]
        best = max(sum(gain[i][j] for i, j in enumerate(p)) for p in itertools.permutations(range(size)))
        columns = assign(gain)
        assert sorted(columns) == list(range(size))
        assert sum(gain[i][j] for i, j in enumerate(columns)) == best
    assert assign([[1, 1], [1, 1]]) == [0, 1]
