"""Plans: every element once, from the cheapest place, and nothing left over."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.boxes import Param, Piece, tiles, whole
from megatron_bridge.errors import UserError
from megatron_bridge.layouts import Layout, MegatronLayout, Unit, VLLMLayout
from megatron_bridge.plan import Plan, make_plan
from tests.bridge.random_layouts import architectures, file_layouts, megatron_layouts, vllm_layouts
from tests.bridge.toys import Stores, empty, labelled, shards, toy, transfer


def check_each_element_is_written_once(plan: Plan) -> None:
    for rank in plan.target.ranks:
        written: dict[str, list[Piece]] = {}
        for copy in (copy for phase in range(plan.phases) for copy in plan.into(rank, phase=phase)):
            place = copy.target
            written.setdefault(place.parameter, []).append(Piece("", whole(copy.shape), place.offset, place.strides))
        for name, param in plan.target.parameters(rank).items():
            assert tiles(param._replace(pieces=tuple(written.get(name, ()))))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_chain_of_layouts_returns_every_bit(data: st.DataObject) -> None:
    arch = data.draw(architectures())
    a, b = data.draw(megatron_layouts(arch)), data.draw(vllm_layouts(arch))
    c = data.draw(megatron_layouts(arch))
    files = data.draw(file_layouts(arch))
    truth = labelled(arch)
    store, layout = shards(truth, a), a
    for target in (b, c, files):
        plan = Plan(layout, target, 4, data.draw(st.sampled_from([1, 2, 8])))
        check_each_element_is_written_once(plan)
        filled: Stores = {rank: empty(target, rank) for rank in target.ranks}
        traffic = transfer(plan, store, filled, data.draw(st.sampled_from([1600, 16000, 10**6])))
        for rank, moved in traffic.items():
            expected = plan.local_bytes(rank), plan.received_bytes(rank), plan.sent_bytes(rank)
            assert (moved.local, moved.received, moved.sent) == expected
        store, layout = filled, target
    back = {name: tensor for tensors in store.values() for name, tensor in tensors.items()}
    assert back.keys() == truth.keys()
    assert all(torch.equal(back[name], truth[name]) for name in truth)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equal_tensor_parallelism_moves_nothing(tp: int) -> None:
    arch = toy(num_attention_heads=8, num_key_value_heads=4, vocab_size=500)
    plan = make_plan(MegatronLayout(arch, tp, dp=2), VLLMLayout(arch, tp, tuple(range(2 * tp))))
    assert plan.rounds(10**6) == 0
    assert not any(plan.received_bytes(rank) for rank in range(2 * tp))


def test_ranks_outside_the_rollout_still_send() -> None:
    arch = toy(num_hidden_layers=3)
    plan = make_plan(MegatronLayout(arch, pp=3), VLLMLayout(arch, 2, (1, 2)), itemsize=4)
    assert plan.received_bytes(0) == plan.local_bytes(0) == 0
    assert plan.targets(0) == [1, 2]
    assert plan.sent_bytes(0) == sum(plan.traffic[0, rank] for rank in (1, 2)) * 4 > 0


def test_a_plan_is_made_once() -> None:
    arch = toy()
    assert make_plan(MegatronLayout(arch, 2), VLLMLayout(arch)) is make_plan(
        MegatronLayout(toy(), 2), VLLMLayout(toy())
    )


@dataclass(frozen=True)
class Without(MegatronLayout):
    """A layout that lost what `lost` names: a unit's canonical prefix, a tensor, or a shard."""

    lost: Any = None

    def units(self, rank: int) -> tuple[Unit, ...]:
        return tuple(unit for unit in super().units(rank) if unit.canonical != self.lost)

    def params(self, kind: str, shard: Any) -> tuple[Param, ...]:
        return tuple(p for p in super().params(kind, 0 if self.lost == "shard" else shard) if self.lost not in p.name)


@pytest.mark.parametrize(
    ("source", "target", "where"),
    [
        (Without(toy(), 2, lost="model.layers.1."), VLLMLayout(toy()), "model.layers.1"),
        (Without(toy(), 2, lost="linear_proj"), VLLMLayout(toy()), "self_attn.o_proj.weight: no source holds"),
        (Without(toy(), 2, lost="shard"), VLLMLayout(toy()), "no source holds"),
        (VLLMLayout(toy()), Without(toy(), 2, lost="model.layers.1."), "model.layers.1.*: the target has no place"),
        (VLLMLayout(toy()), Without(toy(), 2, lost="fc2"), "mlp.down_proj.weight: the target has no place"),
        (VLLMLayout(toy()), MegatronLayout(toy(head_dim=4)), "layouts of different models"),
    ],
)
def test_gaps_are_errors_before_a_byte_moves(source: Layout, target: Layout, where: str) -> None:
    with pytest.raises(UserError, match=where.replace("*", r"\*")):
        make_plan(source, target)


def test_an_uncovered_parameter_is_an_error() -> None:
    @dataclass(frozen=True)
    class Larger(VLLMLayout):
        def params(self, kind: str, shard: Any) -> tuple[Param, ...]:
            return tuple(p._replace(shape=(p.shape[0] + 1, *p.shape[1:])) for p in super().params(kind, shard))

    with pytest.raises(UserError, match="does not cover each of its elements exactly once"):
        make_plan(MegatronLayout(toy()), Larger(toy()))
