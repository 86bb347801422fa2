"""The layout of torch_dist checkpoints: every grid of boxes holds every element once, whatever the boxes cut."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.boxes import Param, interleave, stack, volume, whole
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import HFLayout, MegatronLayout
from megatron_bridge.layouts.torch_dist import TorchDistLayout, candidates, cut_grids, key_names, stored, window
from tests.bridge.toys import labelled, move, shards, toy, toy_experts, toy_latent

MODELS = [
    toy(num_attention_heads=8, num_key_value_heads=2),  # more shards than KV heads cut through heads
    toy(tie_word_embeddings=True, vocab_size=130),
    toy_experts(num_hidden_layers=4),
    toy_latent(q_lora_rank=8, kv_lora_rank=6),  # latents that four ranks share
    toy(model_type="glm", head_dim=4),  # gate and up in one tensor
    toy(model_type="gemma3_text"),
]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[MegatronLayout, MegatronLayout]:
    """Two ways to lay one model out: one that cuts a checkpoint, one that loads it."""
    arch = draw(st.sampled_from(MODELS))

    def layout() -> MegatronLayout:
        most = 4 if arch.heads == 4 else 8
        tp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= most]))
        experts = {"ep": draw(st.sampled_from([1, 2])), "etp": 1, "dp": 2} if arch.experts else {}
        return MegatronLayout(arch, tp=tp, vocab_multiple=draw(st.sampled_from([1, 16])), **experts)

    return layout(), layout()


@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(1, 300))
def test_what_any_grid_holds_any_layout_loads(pair: tuple[MegatronLayout, MegatronLayout], most: int) -> None:
    cutting, loading = pair
    arch = cutting.arch
    checkpoint = labelled(arch)
    target = TorchDistLayout(arch, (0,), cut_grids(cutting, most))
    held = move(HFLayout(arch, (0,)), {0: checkpoint}, target)
    source = TorchDistLayout(arch, loading.ranks, target.grids)
    loaded = move(source, {rank: dict(held[0]) for rank in loading.ranks}, loading)
    expected = shards(checkpoint, loading)
    assert all(
        (loaded[rank][name] == tensor).all() for rank in loading.ranks for name, tensor in expected[rank].items()
    )


def test_no_box_has_more_elements_than_asked_for_unless_a_row_has() -> None:
    arch = MODELS[0]
    grids = dict(cut_grids(MegatronLayout(arch, tp=4), 20))
    sizes = {name: [volume(box) for box in boxes] for kind in grids for name, boxes in grids[kind]}
    assert all(max(counts) <= 20 for counts in sizes.values())
    assert len(sizes["mlp.linear_fc1.weight"]) == 2 * 4 * 2  # gate and up of 4 shards, 4 rows of 8 in boxes of 2


def test_a_window_takes_part_of_what_alternates() -> None:
    """q of two heads, k, v of one, all of two rows: rows 3 to 9 of [q q q q k k v v | q …] of two KV heads."""
    blocks = [("q", whole((2, 2, 2, 3))), ("k", whole((2, 1, 2, 3))), ("v", whole((2, 1, 2, 3)))]
    fused = Param("qkv", (16, 3), interleave(blocks))
    part = window(fused, ((3, 10), (1, 3)), "part")
    assert part.shape == (7, 2)
    found = sorted((piece.offset // 2, piece.name, piece.box[:3]) for piece in part.pieces)
    assert found == [
        (0, "q", ((0, 1), (1, 2), (1, 2))),  # row 3: the second row of the second query head
        (1, "k", ((0, 1), (0, 1), (0, 2))),
        (3, "v", ((0, 1), (0, 1), (0, 2))),
        (5, "q", ((1, 2), (0, 1), (0, 2))),  # rows 8 and 9: of the next KV head
    ]
    assert all(piece.box[3] == (1, 3) for piece in part.pieces)


def test_what_a_window_has_beyond_the_pieces_is_padding() -> None:
    padded = Param("weight", (10, 4), stack([("weight", whole((7, 4)))]), 12)
    assert window(padded, ((5, 10), (0, 4)), "last").padding == 3 * 4
    assert window(padded, ((8, 10), (0, 4)), "none") == Param("none", (2, 4), (), 8)


# ---------------------------------------------------------------- keys
def keys(arch: Architecture, name: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(place.key, place.indices) for places in candidates(arch, name) for place in places]


def test_layers_are_stacked_or_numbered_and_so_are_experts() -> None:
    arch = toy_experts()
    assert stored(arch, "decoder.layers.2.mlp.linear_fc2.weight", homogeneous=True)[:3] == (
        "decoder.layers.mlp.linear_fc2.weight", (2,), (3,),
    )  # fmt: skip
    assert keys(arch, "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight") == [
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 3)),
        ("decoder.layers.2.mlp.experts.experts.linear_fc1.weight", (3,)),
        ("decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight", ()),
        ("decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight_w", ()),
        ("decoder.layers.2.mlp.experts.experts.3.linear_fc1.weight_v", ()),
    ]


@pytest.mark.parametrize(
    ("kind", "name", "written"),
    [
        ("layer", "input_layernorm.weight", ("self_attention.linear_qkv.layer_norm_weight",)),
        ("layer", "pre_mlp_layernorm.weight", ("mlp.linear_fc1.layer_norm_weight",)),
        ("moe", "pre_mlp_layernorm.weight", ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")),
        ("layer", "mlp.linear_fc1.weight", ("mlp.linear_fc1.weight",)),
    ],
)
def test_norms_have_the_keys_that_both_specs_ask_for(kind: str, name: str, written: tuple[str, ...]) -> None:
    """As sharded_state_dict of megatron-core 0.16.1 and 0.19.2 names them: local spec, Transformer Engine's."""
    assert key_names(toy_experts(), kind)[name].written() == written


def test_a_checkpoint_names_each_parameter_once() -> None:
    arch = MODELS[2]
    layout = TorchDistLayout(arch, (0,), cut_grids(MegatronLayout(arch), 2**20))
    params = layout.parameters(0)
    elements = sum(prod(param.shape) - param.padding for param in params.values())
    assert elements == sum(tensor.numel() for tensor in labelled(arch).values())
