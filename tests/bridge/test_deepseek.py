"""DeepSeek-V3: latent attention, shared experts and router biases in every layout, by chunk and cat of tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge.bind_megatron import bind
from megatron_bridge.checkpoints import load_hf
from megatron_bridge.errors import UserError
from megatron_bridge.execute import connect
from megatron_bridge.export import export_hf
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.files import INDEX, SINGLE, open_hf
from megatron_bridge.layouts import HFLayout, Layout, MegatronLayout, VLLMLayout
from megatron_bridge.plan import make_plan
from tests.bridge.test_conversion import Run
from tests.bridge.toys import empty, gathered, labelled, move, rows, shards, toy_latent

FULL_QUERIES = {"q_lora_rank": None}
DEEPSEEK_V3 = {  # the published config.json, without its quantization
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "tie_word_embeddings": False,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "hidden_act": "silu",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip


def layer_of(checkpoint: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): tensor for name, tensor in checkpoint.items() if name.startswith(prefix)}


def gated(layer: dict[str, Tensor], prefix: str, parts: int, part: int) -> tuple[Tensor, Tensor]:
    """A rank's part of gate and up projection, and of the down projection."""
    gate, up, down = (layer[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return torch.cat([gate.chunk(parts)[part], up.chunk(parts)[part]]), down.chunk(parts, 1)[part]


def in_megatron(checkpoint: dict[str, Tensor], tp: tuple[int, int], ep: tuple[int, int]) -> dict[str, Tensor]:
    """Layer 1 in a GPTModel of the local spec, whose projections to latents are cut too; experts are not cut."""
    layer = layer_of(checkpoint, 1)
    expected = {
        "input_layernorm.weight": layer["input_layernorm.weight"],
        "pre_mlp_layernorm.weight": layer["post_attention_layernorm.weight"],
        "self_attention.linear_kv_down_proj.weight": layer["self_attn.kv_a_proj_with_mqa.weight"].chunk(tp[0])[tp[1]],
        "self_attention.kv_layernorm.weight": layer["self_attn.kv_a_layernorm.weight"],
        "self_attention.linear_kv_up_proj.weight": layer["self_attn.kv_b_proj.weight"].chunk(tp[0])[tp[1]],
        "self_attention.linear_proj.weight": layer["self_attn.o_proj.weight"].chunk(tp[0], 1)[tp[1]],
        "mlp.router.weight": layer["mlp.gate.weight"],
        "mlp.router.expert_bias": layer["mlp.gate.e_score_correction_bias"],
    }
    if "self_attn.q_proj.weight" in layer:
        expected["self_attention.linear_q_proj.weight"] = layer["self_attn.q_proj.weight"].chunk(tp[0])[tp[1]]
    else:
        expected |= {
            "self_attention.linear_q_down_proj.weight": layer["self_attn.q_a_proj.weight"].chunk(tp[0])[tp[1]],
            "self_attention.q_layernorm.weight": layer["self_attn.q_a_layernorm.weight"],
            "self_attention.linear_q_up_proj.weight": layer["self_attn.q_b_proj.weight"].chunk(tp[0])[tp[1]],
        }
    shared = "mlp.shared_experts."
    expected[f"{shared}linear_fc1.weight"], expected[f"{shared}linear_fc2.weight"] = gated(layer, shared, *tp)
    for local, expert in enumerate(torch.arange(4).chunk(ep[0])[ep[1]].tolist()):
        fc1, fc2 = gated(layer, f"mlp.experts.{expert}.", 1, 0)
        expected[f"mlp.experts.local_experts.{local}.linear_fc1.weight"] = fc1
        expected[f"mlp.experts.local_experts.{local}.linear_fc2.weight"] = fc2
    return {f"decoder.layers.1.{name}": tensor for name, tensor in expected.items()}


def in_vllm(checkpoint: dict[str, Tensor], tp: int, part: int) -> dict[str, Tensor]:
    """Layer 1 in an engine that cuts experts too."""
    layer, kept = layer_of(checkpoint, 1), ("input_layernorm", "post_attention_layernorm", "self_attn.kv_a_layernorm")
    expected = {f"{name}.weight": layer[f"{name}.weight"] for name in kept}
    expected |= {name: layer[name] for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")}
    down, cut = layer["self_attn.kv_a_proj_with_mqa.weight"], ["self_attn.kv_b_proj.weight"]
    if "self_attn.q_proj.weight" in layer:
        expected["self_attn.kv_a_proj_with_mqa.weight"] = down
        cut.append("self_attn.q_proj.weight")
    else:
        fused = torch.cat([layer["self_attn.q_a_proj.weight"], down])
        name = "self_attn.q_a_layernorm.weight"
        expected |= {"self_attn.fused_qkv_a_proj.weight": fused, name: layer[name]}
        cut.append("self_attn.q_b_proj.weight")
    expected |= {name: layer[name].chunk(tp)[part] for name in cut}
    expected["self_attn.o_proj.weight"] = layer["self_attn.o_proj.weight"].chunk(tp, 1)[part]
    shared = "mlp.shared_experts."
    expected[f"{shared}gate_up_proj.weight"], expected[f"{shared}down_proj.weight"] = gated(layer, shared, tp, part)
    experts = [gated(layer, f"mlp.experts.{expert}.", tp, part) for expert in range(4)]
    expected["mlp.experts.w13_weight"] = torch.stack([fc1 for fc1, _ in experts])
    expected["mlp.experts.w2_weight"] = torch.stack([fc2 for _, fc2 in experts])
    return {f"model.layers.1.{name}": tensor for name, tensor in expected.items()}


def assert_same(held: dict[str, Tensor], expected: dict[str, Tensor], prefix: str) -> None:
    assert {name for name in held if name.startswith(prefix)} == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("config", [{}, FULL_QUERIES], ids=["compressed queries", "full queries"])
def test_shards_are_what_the_systems_cut(config: dict[str, Any]) -> None:
    arch = toy_latent(**config)
    checkpoint = labelled(arch)
    for tp, ep, dp in ((1, 1, 1), (2, 2, 1), (1, 4, 4), (2, 2, 2)):
        layout = MegatronLayout(arch, tp, dp=dp, ep=ep, etp=1)
        for rank, held in shards(checkpoint, layout).items():
            assert_same(held, in_megatron(checkpoint, (tp, rank % tp), (ep, rank % ep)), "decoder.layers.1.")
    for tp in (1, 2, 4):
        for rank, held in shards(checkpoint, VLLMLayout(arch, tp)).items():
            assert_same(held, in_vllm(checkpoint, tp, rank), "model.layers.1.")


def test_latents_are_whole_in_transformer_engines_spec() -> None:
    """Its projections to them are replicated, and the norms of latents are fused with what follows."""
    arch = toy_latent()
    local, te = (MegatronLayout(arch, tp=2, spec=spec).parameters(0) for spec in ("local", "te"))
    attention = "decoder.layers.1.self_attention."
    for name, size in ("linear_q_down_proj", 6), ("linear_kv_down_proj", 4 + 2):
        shapes = [params[f"{attention}{name}.weight"].shape for params in (local, te)]
        assert shapes == [(size // 2, 8), (size, 8)]
    assert te.keys() - local.keys() == {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        *(f"decoder.layers.{i}.self_attention.linear_q_up_proj.layer_norm_weight" for i in range(3)),
        *(f"decoder.layers.{i}.self_attention.linear_kv_up_proj.layer_norm_weight" for i in range(3)),
    }
    with pytest.raises(UserError, match="query latent size 6 does not split over tensor parallel size 4"):
        MegatronLayout(arch, tp=4)
    MegatronLayout(arch, tp=4, spec="te")


def test_a_shared_expert_is_cut_by_tensor_parallelism_only() -> None:  # cases.md A15
    arch = toy_latent(n_shared_experts=1)
    checkpoint = labelled(arch)
    rows(checkpoint, "model.layers.1.mlp.shared_experts.gate_proj.weight", range(100, 104))
    rows(checkpoint, "model.layers.1.mlp.shared_experts.up_proj.weight", range(200, 204))
    held = shards(checkpoint, MegatronLayout(arch, tp=2, dp=2, ep=2, etp=1))
    fc1 = [store["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"][:, 0].tolist() for store in held.values()]
    assert fc1 == [[100, 101, 200, 201], [102, 103, 202, 203]] * 2
    names = {name.removeprefix("model.layers.") for name in checkpoint}
    assert {"0.mlp.gate_proj.weight", "1.mlp.gate.weight", "2.mlp.experts.3.down_proj.weight"} <= names
    assert not [name for name in names if name.startswith("0.mlp.") and "expert" in name]


@pytest.mark.parametrize("config", [{}, FULL_QUERIES], ids=["compressed queries", "full queries"])
def test_every_layout_comes_back_bitwise(config: dict[str, Any]) -> None:
    arch = toy_latent(**config)
    layouts: list[Layout] = [
        MegatronLayout(arch, tp=2, ep=2, etp=1),
        VLLMLayout(arch, tp=2, ep=True),
        MegatronLayout(arch, pp=3, spec="te", experts="grouped"),
        VLLMLayout(arch, tp=4),
        MegatronLayout(arch, tp=2, pp=2, stages=(1, 2), dp=2, ep=4, etp=1),
        VLLMLayout(arch, tp=1, pp=2),
        MegatronLayout(arch, tp=2, pp=1, vpp=3, spec="te"),
        VLLMLayout(arch, tp=2, ranks=(3, 1, 0, 2)),
    ]
    checkpoint = labelled(arch)
    held, at = shards(checkpoint, layouts[0]), layouts[0]
    for layout in layouts[1:]:
        held, at = move(at, held, layout), layout
    back = gathered(at, held)
    assert back.keys() == checkpoint.keys()
    assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


def stock(arch: Architecture, grid: dict[str, int]) -> dict[str, Tensor]:
    """What megatron-core's own modules hold, by their names, after labelled weights came in."""
    from rlflow import parallel  # before megatron-core, which it makes ready for a CPU
    from rlflow.models import transformer_config
    from rlflow.models.attention import PackedAttention

    from megatron.core.models.gpt import GPTModel  # isort: skip
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # isort: skip
    from megatron.core.transformer.identity_op import IdentityOp  # isort: skip

    parallel.initialize(timeout_seconds=60, seed=0)
    groups, rank = parallel.Grid(**grid), dist.get_rank()
    layout = MegatronLayout(arch, groups.tp, groups.pp, groups.dp, ep=groups.ep, etp=groups.etp)
    config = transformer_config(arch, groups, torch.float32, sequence_parallel=True)
    config.sequence_parallel = False  # megatron's norm refuses it, and nothing is computed here
    with parallel.active(groups):
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        for layer in block.layer_specs:  # megatron's own knows no latent attention outside Transformer Engine
            parts = layer.submodules.self_attention.submodules
            parts.core_attention = PackedAttention
            if arch.latent is not None and not arch.latent.query_rank:
                parts.q_layernorm = IdentityOp  # nothing is there to be normed, and 0.19 minds
        model = GPTModel(
            config, block,
            vocab_size=layout.padded_vocab, max_sequence_length=64, position_embedding_type="none",
            share_embeddings_and_output_weights=False, pg_collection=groups.groups,
        )  # fmt: skip
    whole = HFLayout(arch, layout.ranks)
    connect(
        whole, labelled(arch, torch.float32), layout, bind(model, layout, rank), rank=rank, dtype=torch.float32
    ).run()
    bias = {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    return {name: tensor.detach().clone() for name, tensor in {**dict(model.named_parameters()), **bias}.items()}


@pytest.mark.parametrize("config", [{}, FULL_QUERIES], ids=["compressed queries", "full queries"])
@pytest.mark.parametrize(("ranks", "grid"), [(1, {}), (2, {"tensor": 2, "expert": 2, "expert_tensor": 1})], ids=str)
def test_names_and_values_are_megatrons(
    world: Callable[..., Any], config: dict[str, Any], ranks: int, grid: dict[str, int]
) -> None:
    arch = toy_latent(**config)
    checkpoint = labelled(arch, torch.float32)
    for rank, held in enumerate(world(ranks, stock, arch, grid)):
        assert_same(held, in_megatron(checkpoint, (ranks, rank), (ranks, rank)), "decoder.layers.1.")


def test_the_router_bias_stays_float32_on_the_way() -> None:
    """Weights travel as bfloat16 between two systems that both keep the bias in float32."""
    arch = toy_latent()
    source, target = MegatronLayout(arch), VLLMLayout(arch)
    held, filled = empty(source, 0, torch.bfloat16, fill=1), empty(target, 0, torch.bfloat16, fill=0)
    exact = torch.tensor([1 + 2.0**-20, 2.0, 3.0, 4.0])
    for layer in (1, 2):
        held[f"decoder.layers.{layer}.mlp.router.expert_bias"] = exact
        filled[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(4)
    traffic = connect(source, held, target, filled, rank=0, dtype=torch.bfloat16).run()
    assert torch.equal(filled["model.layers.2.mlp.gate.e_score_correction_bias"], exact)
    assert (filled["model.layers.1.mlp.experts.w2_weight"] == 1).all()
    elements = sum(tensor.numel() for tensor in labelled(arch).values())
    assert traffic.local == 2 * elements + 2 * 2 * 4  # two more bytes for each of two layers' four biases


def test_the_published_size() -> None:
    """671,026,419,200 elements by hand: with the routers' biases, without what predicts further tokens."""
    c = DEEPSEEK_V3
    hidden, heads, layers, dense = 7168, 128, 61, 3
    attention = (
        1536 * hidden + 1536 + heads * (128 + 64) * 1536  # queries down, their norm, up
        + (512 + 64) * hidden + 512 + heads * (128 + 128) * 512  # keys and values down, norm, up
        + hidden * heads * 128 + 2 * hidden  # output; the layer's norms
    )  # fmt: skip
    sparse = 256 * hidden + 256 + (256 + 1) * 3 * 2048 * hidden  # router, its bias, routed and shared experts
    whole = 2 * 129280 * hidden + hidden + layers * attention + dense * 3 * 18432 * hidden + (layers - dense) * sparse
    arch = load_architecture(c)
    found = sum(tensor.numel() for tensor in _meta(HFLayout(arch, (0,))).values())
    assert found == whole == 671_026_419_200


def _meta(layout: HFLayout) -> dict[str, Tensor]:
    return {name: torch.empty(param.shape, device="meta") for name, param in layout.parameters(0).items()}


def test_the_published_size_can_be_planned() -> None:
    arch = load_architecture(DEEPSEEK_V3)
    first, between = 8, 7
    training = MegatronLayout(arch, tp=4, pp=8, dp=8, ep=32, etp=1, stages=(first, *[between] * 6, 61 - first - 42))
    rollout = VLLMLayout(arch, tp=16, ranks=training.ranks, ep=True)
    plan = make_plan(training, rollout)
    needed = sum(plan.traffic[source, 0] for source in training.ranks if (source, 0) in plan.traffic)
    params = rollout.parameters(0).values()
    assert needed == sum(torch.Size(param.shape).numel() - param.padding for param in params)


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    left_out = (
        "q_lora_rank",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
    )
    arch = load_architecture({key: value for key, value in DEEPSEEK_V3.items() if key not in left_out})
    assert arch == load_architecture(DEEPSEEK_V3)  # the defaults are the published model's


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"topk_method": "greedy"}, "topk_method is 'greedy', only 'noaux_tc' is supported"),
        ({"rope_interleave": False}, "rope_interleave is False, only True is supported"),
        ({"n_shared_experts": None}, "n_shared_experts is None, not a positive integer"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, not that of the heads, 4"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear', only 'yarn' is supported"),
    ],
)
def test_what_the_family_does_not_do_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy_latent(**config)


# ---------------------------------------------------------------- what predicts further tokens
PREDICTION = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


def with_prediction(path: Path, without: str = "") -> tuple[Path, dict[str, Tensor]]:
    """A folder whose layer 3 is no part of the model, and that layer's tensors; `without` one of them."""
    arch = toy_latent(num_nextn_predict_layers=1)
    tensors = labelled(arch, torch.float32)
    extra = {name.replace("layers.2.", "layers.3."): t + 0.5 for name, t in tensors.items() if "layers.2." in name}
    extra |= {f"model.layers.3.{name}": torch.full((8,), 2.0) for name in PREDICTION}
    extra.pop(without, None)
    path.mkdir()
    save_file(tensors | extra, path / SINGLE)
    (path / "config.json").write_text(json.dumps(arch.hf_config))
    return path, extra


def test_layers_that_predict_further_tokens_are_left_out_and_carried_along(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, extra = with_prediction(tmp_path / "source")
    layout = MegatronLayout(load_architecture(source))
    tensors = empty(layout, 0, torch.float32)
    load_hf(source, layout, tensors, rank=0)
    load_hf(source, layout, tensors, rank=0)
    said = [record.getMessage() for record in caplog.records if "further tokens" in record.getMessage()]
    assert said == [f"{source}: {len(extra)} tensors of layers that predict further tokens are left out"]
    export_hf(tmp_path / "out", layout, tensors, rank=0, source=source)
    before, after = open_hf(source), open_hf(tmp_path / "out")
    assert before.keys() == after.keys() == json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"].keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_such_layers_stay_as_they_were_where_experts_are_stacked_and_apart_again(run: Run, tmp_path: Path) -> None:
    source, extra = with_prediction(tmp_path / "source")
    run("reshard", "--from", source, "--to", tmp_path / "stacked", "--experts", "stacked")
    stacked = open_hf(tmp_path / "stacked")
    assert "model.layers.2.mlp.experts.gate_up_proj" in stacked
    assert all(torch.equal(stacked[name], extra[name]) for name in extra)
    run("reshard", "--from", tmp_path / "stacked", "--to", tmp_path / "again", "--experts", "separate")
    before, after = open_hf(source), open_hf(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert "0 not" in run("verify", source, tmp_path / "stacked")


def test_what_megatron_cannot_hold_is_counted_apart(run: Run, tmp_path: Path) -> None:
    source, extra = with_prediction(tmp_path / "source")
    run("import", "--hf", source, "--out", tmp_path / "megatron")
    said = f"left out: {len(extra)} tensors of layers that predict further tokens"
    for folders in ((source, tmp_path / "megatron"), (tmp_path / "megatron", source)):
        found = run("verify", *folders)
        assert said in found
        assert "0 not (0 missing" in found
    run("export", "--megatron", tmp_path / "megatron", "--out", tmp_path / "back")  # two of Hugging Face's may differ
    assert f"{len(extra)} not" in run("verify", source, tmp_path / "back", code=1)


def test_a_part_of_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:  # cases.md A25
    source, _ = with_prediction(tmp_path / "source", without="model.layers.3.eh_proj.weight")
    layout = MegatronLayout(load_architecture(source))
    with pytest.raises(UserError, match=r"model\.layers\.3\.eh_proj\.weight is missing"):
        load_hf(source, layout, empty(layout, 0, torch.float32), rank=0)


def test_a_model_without_such_layers_knows_none(tmp_path: Path) -> None:
    source, _ = with_prediction(tmp_path / "source")
    config = {
        key: value for key, value in json.loads((source / "config.json").read_text()).items() if "nextn" not in key
    }
    (source / "config.json").write_text(json.dumps(config))
    layout = MegatronLayout(load_architecture(source))
    with pytest.raises(UserError, match=r"layers\.3\.enorm\.weight is not a tensor of a deepseek_v3 model"):
        load_hf(source, layout, empty(layout, 0, torch.float32), rank=0)
