"""Layouts of routed experts: labelled rows, names on disk, and every way to cut them against chunk and cat."""

from typing import Any

import pytest
import torch

from megatron_bridge.checkpoints import hf_layout
from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout
from tests.bridge.toys import gathered, labelled, move, rows, shards, toy, toy_experts, toy_latent

EXPERTS = "model.layers.0.mlp.experts"


def test_experts_are_named_one_by_one() -> None:  # cases.md A13
    arch = toy_experts(num_hidden_layers=2, num_experts=12, mlp_only_layers=[])
    names = set(HFLayout(arch, (0,)).parameters(0))
    assert f"{EXPERTS}.11.gate_proj.weight" in names
    assert len([name for name in names if ".experts." in name]) == 2 * 12 * 3
    grouped = MegatronLayout(arch, experts="grouped").parameters(0)
    assert grouped["decoder.layers.1.mlp.experts.linear_fc1.weight11"].shape == (8, 8)
    assert not [name for name in names if name.endswith(tuple("0123456789"))]


def test_each_layer_has_its_own_kind() -> None:  # cases.md A15: frequencies 1, 0, 1
    names = {name.removeprefix("model.layers.") for name in HFLayout(toy_experts(), (0,)).parameters(0)}
    assert {"0.mlp.gate.weight", "1.mlp.gate_proj.weight", "2.mlp.experts.3.down_proj.weight"} <= names
    assert not {"0.mlp.gate_proj.weight", "1.mlp.gate.weight", "1.mlp.experts.0.gate_proj.weight"} & names


def test_stacked_experts() -> None:  # cases.md A14: E = 2, I = 2, H = 3
    arch = toy_experts(num_experts=2, moe_intermediate_size=2, hidden_size=3)
    checkpoint = labelled(arch)
    for expert in (0, 1):
        rows(checkpoint, f"{EXPERTS}.{expert}.gate_proj.weight", [10 * expert, 10 * expert + 1])
        rows(checkpoint, f"{EXPERTS}.{expert}.up_proj.weight", [10 * expert + 5, 10 * expert + 6])
    layout = HFLayout(arch, (0,), stacked=True)
    held = move(HFLayout(arch, (0,)), {0: checkpoint}, layout)[0]
    assert held[f"{EXPERTS}.gate_up_proj"][:, :, 0].tolist() == [[0, 1, 5, 6], [10, 11, 15, 16]]
    assert torch.equal(held[f"{EXPERTS}.down_proj"][1], checkpoint[f"{EXPERTS}.1.down_proj.weight"])
    back = move(layout, {0: held}, HFLayout(arch, (0,)))[0]
    assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


@pytest.mark.parametrize("arch", [toy_latent(), toy(model_type="mixtral", num_local_experts=3, num_experts_per_tok=2)])
def test_stacked_experts_are_what_transformers_holds(arch: Architecture) -> None:
    """Names and shapes of its state dict, and by its conversion's rules what is in them."""
    import transformers

    config = transformers.AutoConfig.for_model(**arch.hf_config)
    with torch.device("meta"):
        held = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    layout = HFLayout(arch, (0,), stacked=True)
    assert {name: param.shape for name, param in layout.parameters(0).items()} == {
        name: tuple(tensor.shape) for name, tensor in held.items()
    }
    checkpoint = labelled(arch)
    stacked = move(HFLayout(arch, (0,)), {0: checkpoint}, layout)[0]
    prefix, gate, up, down = (
        ("block_sparse_moe", "w1", "w3", "w2")
        if arch.family == "mixtral"
        else ("mlp", "gate_proj", "up_proj", "down_proj")
    )
    for number in range(arch.experts.count if arch.experts else 0):
        one = {name: checkpoint[f"model.layers.1.{prefix}.experts.{number}.{name}.weight"] for name in (gate, up, down)}
        fused = stacked["model.layers.1.mlp.experts.gate_up_proj"][number]
        assert torch.equal(fused, torch.cat([one[gate], one[up]]))
        assert torch.equal(stacked["model.layers.1.mlp.experts.down_proj"][number], one[down])
    assert hf_layout(stacked, arch) == layout
    assert hf_layout(checkpoint, arch) == HFLayout(arch, (0,))
    back = move(layout, {0: stacked}, HFLayout(arch, (0,)))[0]
    assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


@pytest.mark.parametrize("grid", [{"tp": 2}, {"tp": 2, "ep": 2, "dp": 2}, {"ep": 4, "dp": 4}, {"ep": 2, "dp": 2}])
@pytest.mark.parametrize("etp", [1, 2])
def test_megatron_gives_experts_to_ep_ranks_and_cuts_them_over_etp(grid: dict[str, int], etp: int) -> None:
    arch = toy_experts()
    ep = grid.get("ep", 1)
    if grid.get("tp", 1) * grid.get("dp", 1) % (ep * etp):
        with pytest.raises(UserError, match=f"etp {etp} × ep {ep} does not divide"):
            MegatronLayout(arch, **grid, etp=etp)
        return
    layout = MegatronLayout(arch, **grid, etp=etp)
    checkpoint = labelled(arch)
    for rank, held in shards(checkpoint, layout).items():
        part, place = rank % etp, rank // etp % ep  # etp is fastest, then ep
        for local in range(4 // ep):
            gate, up, down = (
                checkpoint[f"{EXPERTS}.{place * 4 // ep + local}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            expert = f"decoder.layers.0.mlp.experts.local_experts.{local}"
            fused = torch.cat([gate.chunk(etp)[part], up.chunk(etp)[part]])
            assert torch.equal(held[f"{expert}.linear_fc1.weight"], fused)
            assert torch.equal(held[f"{expert}.linear_fc2.weight"], down.chunk(etp, 1)[part])
    back = gathered(layout, shards(checkpoint, layout))
    assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


@pytest.mark.parametrize("ep", [False, True])
def test_vllm_stacks_experts_or_parts_of_them(ep: bool) -> None:
    arch = toy_experts()
    checkpoint = labelled(arch)
    for rank, held in shards(checkpoint, VLLMLayout(arch, tp=2, ep=ep)).items():
        experts = [
            [checkpoint[f"{EXPERTS}.{e}.{name}_proj.weight"] for name in ("gate", "up", "down")] for e in range(4)
        ]
        if ep:
            experts = experts[2 * rank : 2 * rank + 2]
        else:
            experts = [[g.chunk(2)[rank], u.chunk(2)[rank], d.chunk(2, 1)[rank]] for g, u, d in experts]
        assert torch.equal(held[f"{EXPERTS}.w13_weight"], torch.stack([torch.cat([g, u]) for g, u, _ in experts]))
        assert torch.equal(held[f"{EXPERTS}.w2_weight"], torch.stack([d for *_, d in experts]))


def test_every_layout_comes_back_bitwise() -> None:
    arch = toy_experts(num_hidden_layers=4, tie_word_embeddings=True)
    layouts: list[Layout] = [
        MegatronLayout(arch, tp=2, pp=2, vpp=2, ep=2, etp=1, dp=1),
        VLLMLayout(arch, tp=2, pp=2, ep=True),
        MegatronLayout(arch, tp=4, pp=1, ep=1),
        VLLMLayout(arch, tp=4),
        MegatronLayout(arch, pp=4, stages=(0, 2, 2, 0), experts="grouped"),
        VLLMLayout(arch, tp=1, pp=3, ranks=(0, 1, 2)),
        MegatronLayout(arch, tp=2, dp=2, ep=4, etp=1),
    ]
    checkpoint = labelled(arch)
    held, at = shards(checkpoint, layouts[0]), layouts[0]
    for layout in layouts[1:]:
        held, at = move(at, held, layout), layout
    back = gathered(at, held)
    assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


def test_experts_that_do_not_split_are_refused() -> None:
    with pytest.raises(UserError, match="4 experts do not split over expert parallel size 3"):
        MegatronLayout(toy_experts(), ep=3, dp=3)
    with pytest.raises(
        UserError, match="experts' intermediate size 3 does not split over expert tensor parallel size 2"
    ):
        MegatronLayout(toy_experts(moe_intermediate_size=3), tp=2)
    with pytest.raises(UserError, match="4 experts do not split over expert parallel size 8"):
        VLLMLayout(toy_experts(num_attention_heads=8), tp=8, ep=True)


def test_mixtral_has_its_own_names() -> None:
    arch = toy(model_type="mixtral", num_local_experts=2, num_experts_per_tok=1)
    assert {
        "model.layers.0.block_sparse_moe.gate.weight",
        "model.layers.1.block_sparse_moe.experts.1.w3.weight",
    } <= set(HFLayout(arch, (0,)).parameters(0))
    held = shards(labelled(arch), VLLMLayout(arch))[0]
    assert held["model.layers.0.block_sparse_moe.experts.w13_weight"].shape == (2, 32, 8)


def test_experts_in_configs() -> None:
    sparse = toy_experts(mlp_only_layers=[1], decoder_sparse_step=2, num_hidden_layers=4, norm_topk_prob=True)
    assert sparse.layer_kinds == ("layer", "layer", "layer", "moe")
    assert sparse.experts is not None
    assert (sparse.experts.count, sparse.experts.per_token, sparse.experts.ffn) == (4, 2, 4)
    assert sparse.experts.normalize
    mixtral = toy(model_type="mixtral", num_local_experts=2, num_experts_per_tok=1, intermediate_size=6)
    assert mixtral.experts is not None
    assert (mixtral.experts.ffn, mixtral.experts.normalize, mixtral.layer_kinds) == (6, True, ("moe", "moe"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None, not a positive integer"),
        ({"num_experts": 0}, "num_experts is 0, not a positive integer"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than num_experts 4"),
        ({"model_type": "mixtral"}, "num_local_experts is None, not a positive integer"),
        ({"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8}, "sliding_window is 8"),
    ],
)
def test_experts_without_sizes_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy_experts(**config)
