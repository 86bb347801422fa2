"""What goes to an engine's own loader: which whole tensors each rank needs, and in which portions they come."""

from math import prod

import pytest
import torch

from megatron_bridge.boxes import volume
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout
from megatron_bridge.layouts.layout import tensors_of
from megatron_bridge.layouts.loader import LoaderLayout, portions
from megatron_bridge.plan import make_plan
from tests.bridge.toys import empty, labelled, shards, toy, toy_experts, transfer

EXPERTS = "model.layers.0.mlp.experts"


def test_a_rank_gets_the_experts_that_it_holds() -> None:
    wanted = LoaderLayout(VLLMLayout(toy_experts(), tp=2, ep=True))
    for rank, experts in ((0, {"0", "1"}), (1, {"2", "3"})):
        names = wanted.parameters(rank)
        assert {name.split(".")[5] for name in names if name.startswith(EXPERTS)} == experts
        assert names[f"{EXPERTS}.{min(experts)}.down_proj.weight"].shape == (8, 4)
        assert "model.layers.1.mlp.gate_proj.weight" in names


def test_experts_that_are_cut_are_needed_whole_by_all() -> None:
    arch = toy_experts()
    wanted = LoaderLayout(VLLMLayout(arch, tp=2))
    assert wanted.parameters(0).keys() == wanted.parameters(1).keys() == HFLayout(arch, (0,)).parameters(0).keys()


def test_a_stage_gets_its_own_layers() -> None:
    wanted = LoaderLayout(VLLMLayout(toy(tie_word_embeddings=True), tp=1, pp=2))
    first, last = ({name for name in wanted.parameters(rank) if "layers" not in name} for rank in (0, 1))
    assert (first, last) == ({"model.embed_tokens.weight"}, {"model.embed_tokens.weight", "model.norm.weight"})
    assert {name[:14] for name in wanted.parameters(1)} >= {"model.layers.1"}
    assert not [name for name in wanted.parameters(1) if name.startswith("model.layers.0")]


@pytest.mark.parametrize("arch", [toy(), toy_experts()])
@pytest.mark.parametrize("limit", [1, 40, 200, 10**6])
def test_portions_are_bounded_and_hold_everything_once(arch: Architecture, limit: int) -> None:
    whole = HFLayout(arch, (0,))
    largest = max(prod(param.shape) for param in whole.parameters(0).values())
    seen: list[str] = []
    for portion in portions(arch, limit):
        params = portion.of(whole).parameters(0)
        assert sum(prod(param.shape) for param in params.values()) <= max(limit, largest if len(params) == 1 else 0)
        seen += params
    assert seen == list(whole.parameters(0))


def test_a_layers_experts_come_one_by_one() -> None:
    """A layer's experts may be many GB: 4 × 3 tensors of 4 × 8 elements, at most 64 at a time, are 6 portions."""
    arch = toy_experts()
    found = [portion for portion in portions(arch, 64) if f"{EXPERTS}." in portion.units]
    assert [sum(volume(box) for _, box in portion.boxes) for portion in found] == [64] * 6
    assert {name for portion in found for name, _ in portion.boxes} == set(tensors_of(arch, "experts"))


ENGINES = [{"tp": 2, "ep": True}, {"tp": 1, "pp": 2}, {"tp": 2}]
SOURCES = [{"tp": 2, "ep": 2, "etp": 1}, {"pp": 2, "stages": (1, 2)}, {"tp": 2}]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("source", SOURCES)
def test_portions_arrive_whole_from_every_layout(source: dict, engine: dict) -> None:
    arch = toy_experts()
    layout, wanted = MegatronLayout(arch, **source), LoaderLayout(VLLMLayout(arch, **engine))
    checkpoint = labelled(arch)
    held = shards(checkpoint, layout)
    for portion in portions(arch, 100):
        here, there = portion.of(layout), portion.of(wanted)
        filled = {rank: empty(there, rank) for rank in (0, 1)}
        transfer(make_plan(here, there, itemsize=4), _part(here, held), filled, bucket_bytes=64)
        for tensors in filled.values():
            assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in tensors.items())


def test_layers_alike_are_planned_once() -> None:
    """Of six layers on two stages the first of each stage and kind; layer 3 is the dense one."""
    arch = toy_experts(num_hidden_layers=6, mlp_only_layers=[3])
    source, wanted = MegatronLayout(arch, pp=2), LoaderLayout(VLLMLayout(arch, tp=2))
    firsts = {}
    for portion in portions(arch, 1):
        (unit,), (first,) = portion.units, portion.first_alike(source, wanted).units
        firsts[unit] = first
        for layout in (source, wanted):
            here, there = (one.of(layout) for one in (portion, portion.first_alike(source, wanted)))
            names = ([name.split(".", 3)[-1] for name in part.parameters(0)] for part in (here, there))
            assert next(names) == next(names)
    layers = {unit: first for unit, first in firsts.items() if unit.count(".") == 3}
    assert list(layers.values()) == [f"model.layers.{layer}." for layer in (0, 0, 0, 3, 4, 4)]
    assert firsts["model.layers.5.mlp.experts."] == "model.layers.4.mlp.experts."
    assert firsts["lm_head."] == "lm_head."


def _part(layout: Layout, held: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
    return {rank: {name: tensors[name] for name in layout.parameters(rank)} for rank, tensors in held.items()}
