"""Layouts against labelled rows and against a second, independent account: chunk and cat, as the systems shard."""

import pytest
import torch

from megatron_bridge.boxes import tiles
from megatron_bridge.checkpoints import name_faults
from megatron_bridge.errors import UserError
from megatron_bridge.execute import check_tensors
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from megatron_bridge.plan import make_plan
from tests.bridge.toys import gathered, labelled, move, rows, shards, toy, toy_experts

SOME_NORM = "model.layers.0.self_attn.q_norm.weight"
QKV = "decoder.layers.0.self_attention.linear_qkv"
LEFT, RIGHT = [100, 101, 102, 103, 200, 201, 300, 301], [104, 105, 106, 107, 202, 203, 302, 303]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_qkv_alternates_by_kv_head(kind: str) -> None:  # cases.md A01 (weight), A03 (bias)
    arch = toy(model_type="qwen2")
    checkpoint = labelled(arch)
    for name, labels in ("q", range(100, 108)), ("k", range(200, 204)), ("v", range(300, 304)):
        rows(checkpoint, f"model.layers.0.self_attn.{name}_proj.{kind}", labels)
    held = {tp: shards(checkpoint, MegatronLayout(arch, tp)) for tp in (1, 2)}

    def first_column(tensor: torch.Tensor) -> list[int]:
        return tensor.view(len(tensor), -1)[:, 0].tolist()

    assert [first_column(held[2][rank][f"{QKV}.{kind}"]) for rank in (0, 1)] == [LEFT, RIGHT]
    assert first_column(held[1][0][f"{QKV}.{kind}"]) == LEFT + RIGHT
    there = move(MegatronLayout(arch, 2), held[2], MegatronLayout(arch, 1))
    again = move(MegatronLayout(arch, 1), there, MegatronLayout(arch, 2))
    for layout, store in (MegatronLayout(arch, 1), there), (MegatronLayout(arch, 2), again):
        back = gathered(layout, store)
        assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


def test_zero_biases_are_kept() -> None:  # cases.md A03
    arch = toy(model_type="qwen2")
    checkpoint = {name: tensor.zero_() if "bias" in name else tensor for name, tensor in labelled(arch).items()}
    layout = MegatronLayout(arch, 2)
    back = gathered(layout, shards(checkpoint, layout))
    assert back.keys() == checkpoint.keys()
    assert not back["model.layers.1.self_attn.k_proj.bias"].any()


def test_gate_and_up_are_cut_apart() -> None:  # cases.md A17
    arch = toy(intermediate_size=4)
    checkpoint = labelled(arch)
    rows(checkpoint, "model.layers.0.mlp.gate_proj.weight", range(100, 104))
    rows(checkpoint, "model.layers.0.mlp.up_proj.weight", range(200, 204))
    layout, name = MegatronLayout(arch, 2), "decoder.layers.0.mlp.linear_fc1.weight"
    held = shards(checkpoint, layout)
    assert [held[rank][name][:, 0].tolist() for rank in (0, 1)] == [[100, 101, 200, 201], [102, 103, 202, 203]]
    whole = move(layout, held, MegatronLayout(arch, 1))[0][name]
    assert whole[:, 0].tolist() == [100, 101, 102, 103, 200, 201, 202, 203]


def test_each_of_gate_and_up_must_split() -> None:  # cases.md A17: 2·3 splits in two, 3 does not
    with pytest.raises(UserError, match="intermediate size 3 does not split over tensor parallel size 2"):
        MegatronLayout(toy(intermediate_size=3), 2)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_norms_of_queries_and_keys_are_whole_on_every_rank(tp: int) -> None:  # cases.md A18
    """[head_dim] values 0.5 … 1.5, of more ranks than KV heads too; each is exported once, and comes from somewhere."""
    arch = toy(model_type="qwen3", head_dim=6)
    checkpoint = labelled(arch, torch.float32)
    values = torch.linspace(0.5, 1.5, 6)
    names = [f"model.layers.1.self_attn.{name}_norm.weight" for name in "qk"]
    for name, reverse in zip(names, (False, True), strict=True):
        checkpoint[name] = values.flip(0) if reverse else values
    layout = MegatronLayout(arch, tp)
    held = shards(checkpoint, layout)
    for rank in range(tp):
        norms = [held[rank][f"decoder.layers.1.self_attention.{name}_layernorm.weight"] for name in "qk"]
        assert torch.equal(norms[0], values)
        assert torch.equal(norms[1], values.flip(0))
    exported = gathered(layout, held)
    assert [name for name in exported if "_norm" in name and ".1.self" in name] == names
    assert all(torch.equal(exported[name], checkpoint[name]) for name in checkpoint)


def test_every_parameter_has_a_source_and_every_tensor_a_target() -> None:  # cases.md A18: Qwen3 with and without norms
    with_norms, without = toy(model_type="qwen3"), toy()
    with pytest.raises(UserError, match="layouts of different models"):
        make_plan(HFLayout(without, (0,)), MegatronLayout(with_norms))
    built = {name: torch.empty(param.shape) for name, param in MegatronLayout(with_norms).parameters(0).items()}
    fault = "decoder.layers.0.self_attention.q_layernorm.weight has no place in the layout"
    with pytest.raises(UserError, match=fault):
        check_tensors(MegatronLayout(without), 0, built)
    held = HFLayout(with_norms, (0,)).parameters(0).keys()
    assert f"{SOME_NORM} is not a tensor of a llama model" in name_faults(held, HFLayout(without, (0,)))
    assert name_faults(held - {SOME_NORM}, HFLayout(with_norms, (0,))) == [f"{SOME_NORM} is missing"]


@pytest.mark.parametrize(
    ("vocab", "padded"),  # cases.md A07: by TP size
    [(50257, {1: 50304, 2: 50432, 4: 50688, 8: 51200}), (151936, {1: 151936, 2: 152064, 4: 152064, 8: 152576})],
)
def test_megatrons_own_vocabulary_padding(vocab: int, padded: dict[int, int]) -> None:
    arch = toy(vocab_size=vocab, num_attention_heads=8, num_key_value_heads=8)
    sizes = {tp: MegatronLayout(arch, tp, vocab_multiple=128).padded_vocab for tp in padded}
    assert sizes == padded


def test_padding_never_leaves_megatron() -> None:  # cases.md A07: TP2 → TP8 keeps rows 0 … V − 1, an export has V rows
    arch = toy(vocab_size=37, num_attention_heads=8, num_key_value_heads=8)
    checkpoint = labelled(arch)
    two, eight = MegatronLayout(arch, 2, vocab_multiple=8), MegatronLayout(arch, 8, vocab_multiple=8)
    wide = move(two, shards(checkpoint, two), eight)
    embedding = torch.cat([wide[rank]["embedding.word_embeddings.weight"] for rank in range(8)])
    assert len(embedding) == 64
    assert torch.equal(embedding[:37], checkpoint["model.embed_tokens.weight"])
    assert not embedding[37:].any()  # padding is zeroed
    assert len(gathered(eight, wide)["lm_head.weight"]) == 37


@pytest.mark.parametrize("pp", [2, 4])
def test_tied_embeddings_under_pipeline_parallelism(pp: int) -> None:  # cases.md A05
    arch = toy(num_hidden_layers=4, tie_word_embeddings=True)
    layout = MegatronLayout(arch, pp=pp)
    held = shards(labelled(arch), layout)
    first, last = held[0]["embedding.word_embeddings.weight"], held[pp - 1]["output_layer.weight"]
    assert torch.equal(first, last)
    exported = gathered(layout, held)
    assert [name for name in exported if "embed" in name or "head" in name] == ["model.embed_tokens.weight"]
    assert "output_layer.weight" not in MegatronLayout(arch).parameters(0)


def test_uneven_layers_need_explicit_stages() -> None:  # cases.md A09
    arch = toy(num_hidden_layers=30)
    with pytest.raises(UserError, match="stages of 7-7-7-7 layers are not 30 layers on 4 pipeline stages"):
        MegatronLayout(arch, pp=4)
    layout = MegatronLayout(arch, pp=4, stages=(7, 8, 8, 7))
    built = [sum("input_layernorm" in name for name in layout.parameters(rank)) for rank in range(4)]
    assert built == [7, 8, 8, 7]


def test_layers_of_a_stage_are_numbered_from_zero() -> None:
    layout = MegatronLayout(toy(num_hidden_layers=3), pp=2, stages=(1, 2))
    prefixes = [(unit.canonical, unit.prefix) for unit in layout.units(1) if unit.kind == "layer"]
    assert prefixes == [("model.layers.1.", "decoder.layers.0."), ("model.layers.2.", "decoder.layers.1.")]


def test_grid_orders() -> None:
    arch = toy(num_hidden_layers=2)
    natural = MegatronLayout(arch, tp=2, pp=2, dp=2)
    assert [natural.coordinate(5, name) for name in ("tp", "dp", "pp")] == [1, 0, 1]
    pipeline_first = MegatronLayout(arch, tp=2, pp=2, dp=2, order="pp-tp-dp")
    assert [pipeline_first.coordinate(5, name) for name in ("tp", "dp", "pp")] == [0, 1, 1]
    elsewhere = MegatronLayout(arch, tp=2, ranks=(7, 3))
    assert [elsewhere.shard(7, "layer"), elsewhere.shard(3, "layer"), elsewhere.units(0)] == [0, 1, ()]
    with pytest.raises(UserError, match="order 'tp-pp' does not name tp, dp and pp once each"):
        MegatronLayout(arch, order="tp-pp")
    with pytest.raises(UserError, match="order 'tp-dp-pp' does not name cp, whose size is 2"):
        MegatronLayout(arch, cp=2, order="tp-dp-pp")
    with pytest.raises(UserError, match="order 'pp-tp-dp' does not name ep, whose size is 2"):
        MegatronLayout(toy_experts(), ep=2, dp=2, order="pp-tp-dp")
    with pytest.raises(UserError, match=r"ranks \[0, 1, 2\] do not fill tp 2 × pp 1 × dp 2"):
        MegatronLayout(arch, tp=2, dp=2, ranks=(0, 1, 2))


def test_kv_heads_and_tensor_parallelism() -> None:
    arch = toy(num_attention_heads=8, num_key_value_heads=2)
    with pytest.raises(UserError, match="6 KV heads do not split over tensor parallel size 4"):
        MegatronLayout(toy(num_attention_heads=12, num_key_value_heads=6, intermediate_size=12), tp=4)
    with pytest.raises(UserError, match="20 fused rows of a KV head do not split over the 8 ranks that share it"):
        MegatronLayout(toy(num_attention_heads=8, num_key_value_heads=1), tp=8)
    assert VLLMLayout(arch, tp=4).parameters(0)["model.layers.0.self_attn.qkv_proj.weight"].shape == (4 + 2 + 2, 8)
    with pytest.raises(UserError, match="8 attention heads do not split over tensor parallel size 3"):
        VLLMLayout(toy(num_attention_heads=8, intermediate_size=12, vocab_size=192), tp=3)


def test_transformer_engine_names_its_fused_norms() -> None:
    local, te = (set(MegatronLayout(toy(), spec=spec).parameters(0)) for spec in ("local", "te"))
    assert {name for name in te - local if ".0." in name} == {
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
    }
    assert len(te) == len(local)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [2, 4, 8])
def test_shards_are_what_the_systems_cut(kv_heads: int, tp: int) -> None:
    arch = toy(model_type="qwen2", num_attention_heads=8, num_key_value_heads=kv_heads, head_dim=4, hidden_size=16)
    checkpoint = labelled(arch)
    layer = {name.removeprefix("model.layers.1."): tensor for name, tensor in checkpoint.items()}
    gate, up, down = (layer[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    o, embedding = layer["self_attn.o_proj.weight"], checkpoint["model.embed_tokens.weight"]
    embedding = torch.cat([embedding, embedding.new_zeros(64 - 37, 16)])
    vllm = shards(checkpoint, VLLMLayout(arch, tp))
    megatron = shards(checkpoint, MegatronLayout(arch, tp))
    for t in range(tp):
        mlp = torch.cat([gate.chunk(tp)[t], up.chunk(tp)[t]])
        v = {name.removeprefix("model.layers.1."): tensor for name, tensor in vllm[t].items()}
        assert torch.equal(v["mlp.gate_up_proj.weight"], mlp)
        assert torch.equal(v["mlp.down_proj.weight"], down.chunk(tp, 1)[t])
        assert torch.equal(v["self_attn.o_proj.weight"], o.chunk(tp, 1)[t])
        assert torch.equal(v["model.embed_tokens.weight"], embedding.chunk(tp)[t])
        for kind in ("weight", "bias"):
            q, k, value = (layer[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
            size, at = 4 * max(1, kv_heads // tp), t * kv_heads // tp * 4
            expected = torch.cat([q.chunk(tp)[t], k.narrow(0, at, size), value.narrow(0, at, size)])
            assert torch.equal(v[f"self_attn.qkv_proj.{kind}"], expected)
            heads = zip(q.chunk(kv_heads), k.chunk(kv_heads), value.chunk(kv_heads), strict=True)
            fused = torch.cat([part for head in heads for part in head])  # more ranks than KV heads cut it all the same
            m = megatron[t][f"decoder.layers.1.self_attention.linear_qkv.{kind}"]
            assert torch.equal(m, fused.chunk(tp)[t])
        m = {name.removeprefix("decoder.layers.1."): tensor for name, tensor in megatron[t].items()}
        assert torch.equal(m["mlp.linear_fc1.weight"], mlp)
        assert torch.equal(m["mlp.linear_fc2.weight"], down.chunk(tp, 1)[t])
        assert torch.equal(m["self_attention.linear_proj.weight"], o.chunk(tp, 1)[t])
        assert torch.equal(m["embedding.word_embeddings.weight"], embedding.chunk(tp)[t])


def test_a_shard_may_be_padding_alone() -> None:
    arch = toy(vocab_size=20)
    params = [VLLMLayout(arch, 2).parameters(rank)["model.embed_tokens.weight"] for rank in (0, 1)]
    assert [(param.shape, param.padding) for param in params] == [((32, 8), 12 * 8), ((32, 8), 32 * 8)]
    assert all(map(tiles, params))


def test_a_tied_checkpoint_may_list_both_matrices() -> None:  # cases.md A04 (i)
    arch = toy(tie_word_embeddings=True)
    layout = HFLayout(arch, (0,), tied_head=True)
    held = move(HFLayout(arch, (0,)), {0: labelled(arch)}, layout)[0]
    assert torch.equal(held["lm_head.weight"], held["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "expected"),
    [
        (8, 2, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),  # cases.md A11
        (8, 2, 4, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
    ],
)
def test_virtual_stages_alternate(layers: int, pp: int, vpp: int, expected: list[list[list[int]]]) -> None:
    layout = MegatronLayout(toy(num_hidden_layers=layers), pp=pp, vpp=vpp)
    for rank, chunks in enumerate(expected):
        held = [(unit.prefix, unit.canonical) for unit in layout.units(rank) if unit.kind == "layer"]
        assert held == [
            (f"{chunk}.decoder.layers.{local}.", f"model.layers.{layer}.")
            for chunk, layers_of_chunk in enumerate(chunks)
            for local, layer in enumerate(layers_of_chunk)
        ]


def test_layers_that_do_not_fill_the_stages_are_refused() -> None:  # cases.md A09
    with pytest.raises(UserError, match="not 80 layers on 16 pipeline stages of 2 chunks: give `stages`"):
        MegatronLayout(toy(num_hidden_layers=80), pp=16, vpp=2)
