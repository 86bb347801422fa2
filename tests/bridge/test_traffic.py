"""How many bytes a plan moves between which ranks: no more than must be, once into each node, and evenly sent."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_bridge.balance import Task, spread
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import Layout, MegatronLayout, VLLMLayout
from megatron_bridge.plan import Plan, make_plan
from tests.bridge.random_layouts import architectures, megatron_layouts, vllm_layouts
from tests.bridge.toys import labelled, shards, toy
from tools.bench_plan import LLAMA_70B


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_byte_more_than_must_be(data: st.DataObject) -> None:
    """A rank receives what it needs and does not hold, a node what its ranks need and none of them holds."""
    arch = data.draw(architectures())
    a, node = data.draw(megatron_layouts(arch)), data.draw(st.sampled_from([2, 4]))
    b = data.draw(st.one_of(vllm_layouts(arch), megatron_layouts(arch)))
    plan = Plan(a, b, 1, node)
    held, wanted = labels(a), labels(b)
    assume(all(len(found) == len(found.unique()) for found in wanted.values()))  # no rank has a tied embedding twice
    for rank in b.ranks:
        own = int(torch.isin(wanted[rank], held.get(rank, torch.empty(0))).sum())
        assert plan.local_bytes(rank) == own
        assert plan.received_bytes(rank) == len(wanted[rank]) - own
    for number in {rank // node for rank in b.ranks}:
        near, needed = (
            torch.cat([torch.empty(0), *(found for rank, found in of.items() if rank // node == number)])
            for of in (held, wanted)
        )
        missing = needed[~torch.isin(needed, near)].unique()
        across = sum(n for (s, t), n in plan.traffic.items() if s // node != t // node == number)
        assert across == len(missing)


def labels(layout: Layout) -> dict[int, torch.Tensor]:
    """The labels of all weights that each rank holds; padding, which is 0, left out."""
    held = shards(labelled(layout.arch), layout)
    none = torch.empty(0, dtype=torch.int32)
    flat = {
        rank: torch.cat([none, *(tensor.flatten() for tensor in tensors.values())]) for rank, tensors in held.items()
    }
    return {rank: found[found != 0] for rank, found in flat.items()}


def test_engines_of_a_node_fetch_once_and_share_the_fetching() -> None:
    """Two nodes of 4: the actor is on one, two engines of TP2 on the other."""
    arch = load_architecture({**LLAMA_70B, "num_hidden_layers": 4})
    plan = make_plan(MegatronLayout(arch, 2, dp=2), VLLMLayout(arch, 2, (4, 5, 6, 7)), ranks_per_node=4)
    model = 2 * (2 * 128256 * 8192 + 8192 + 4 * (8192 * 10240 + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192))
    across, within = (sum(traffic.values()) * 2 for traffic in plan.phase_traffic)
    assert plan.phases == 2
    assert across == model
    assert across + within == sum(plan.received_bytes(rank) for rank in range(4, 8))
    assert all(s in (0, 1, 2, 3) and t in (4, 5, 6, 7) for s, t in plan.phase_traffic[0])
    fetched = [sum(n for (_, t), n in plan.phase_traffic[0].items() if t == rank) * 2 for rank in range(4, 8)]
    assert max(fetched) < 1.001 * model / 4
    copies = [copy for phase in (0, 1) for copy in plan.into(6, phase=phase)]
    assert {copy.source.rank for copy in copies} >= {4}
    assert {copy.source.parameter.startswith("model.") for copy in copies if copy.source.rank == 4} == {True}


def test_a_single_node_needs_one_phase() -> None:
    assert make_plan(MegatronLayout(toy(), 2, dp=2), VLLMLayout(toy(), 1, (0, 1, 2, 3))).phases == 1


SENDING: list[tuple[dict[str, Any], int, range, int]] = [  # grid, rollout TP and ranks, ranks a node
    ({"tp": 4, "pp": 2, "dp": 16}, 8, range(128), 8),
    ({"tp": 8, "pp": 8, "dp": 4}, 8, range(256), 8),
    ({"tp": 8, "pp": 8, "dp": 4}, 2, range(256), 8),
    ({"tp": 2, "pp": 4, "dp": 3, "order": "pp-tp-dp"}, 4, range(24), 8),
    ({"tp": 2, "pp": 1, "dp": 3}, 8, range(8, 16), 8),
    ({"tp": 1, "pp": 1, "dp": 5}, 1, range(5, 6), 1),
    ({"tp": 2, "pp": 2, "dp": 7}, 4, range(32, 44), 4),
]


@pytest.mark.parametrize(("grid", "tp", "ranks", "node"), SENDING)
def test_replicas_share_the_sending(grid: dict[str, Any], tp: int, ranks: range, node: int) -> None:
    arch = load_architecture(LLAMA_70B)
    actor = MegatronLayout(arch, **grid)
    plan = make_plan(actor, VLLMLayout(arch, tp, tuple(ranks)), ranks_per_node=node)
    flows = Counter[int]()
    for (source, target), elements in plan.phase_traffic[0].items():
        flows[source] += elements if source != target else 0
    sent = [flows[rank] for rank in actor.ranks]
    assert max(sent) <= 1.2 * sum(sent) / len(sent)
    total = [plan.sent_bytes(rank) for rank in sorted({*actor.ranks, *ranks})]
    if set(ranks) == set(actor.ranks):
        assert max(total) <= 1.2 * sum(total) / len(total)


def test_tasks_stay_whole_where_loads_are_even_without_cutting() -> None:
    load = Counter[int]()
    assert spread([Task(6400, (0, 1)), Task(6400, (0, 1))], load) == [[(0, 6400)], [(1, 6400)]]
    assert load == {0: 6400, 1: 6400}


def test_a_task_is_cut_where_a_replica_would_idle() -> None:
    load = Counter({2: 3200})
    cuts = spread([Task(64 * 150, (0, 1, 2))], load)[0]
    assert sum(elements for _, elements in cuts) == 64 * 150
    assert max(load.values()) - min(load.values()) <= 2 * 64
    assert all(elements % 64 == 0 for _, elements in cuts[1:])


def test_holders_without_a_choice_are_spared_by_those_with_one() -> None:
    load = Counter[int]()
    spread([Task(6400, (0, 1)), Task(3200, (0,)), Task(3200, (0,))], load)
    assert load == {0: 6400, 1: 6400}


def test_rounds_keep_every_rank_under_the_cap() -> None:
    arch = toy(num_attention_heads=8, num_key_value_heads=4)
    plan = make_plan(MegatronLayout(arch, 4), VLLMLayout(arch, 1, (0,)), itemsize=4)
    cap = 400
    rounds = plan.rounds(cap)
    largest = sum(-(-plan.traffic[rank, 0] // rounds) for rank in (1, 2, 3))
    assert largest * 4 <= cap
    assert rounds >= plan.received_bytes(0) / cap
