"""Gemma-3 and GLM: what their configs say, and where their tensors go."""

from typing import Any

import pytest
import torch

from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture, load_architecture
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from tests.bridge.toys import CONFIG, gathered, labelled, move, rows, shards, toy

LAYER = "decoder.layers.0."
GATE_UP, DOWN = "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight"


def gemma(**overrides: Any) -> Architecture:
    return toy(**{"model_type": "gemma3_text", "num_hidden_layers": 12, **overrides})


def glm(**overrides: Any) -> Architecture:
    return toy(**{"model_type": "glm4", "head_dim": 4, **overrides})


ARCHITECTURES = [
    gemma(num_hidden_layers=3, tie_word_embeddings=True),
    glm(num_hidden_layers=3),
    glm(num_hidden_layers=3, attention_bias=False, model_type="glm"),
]


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.family)
def test_weights_come_back_bitwise_through_megatron_and_vllm(arch: Architecture) -> None:
    checkpoint = labelled(arch, torch.float64)
    training = MegatronLayout(arch, tp=2, pp=2, stages=(2, 1))
    rollout = VLLMLayout(arch, tp=2, ranks=(1, 3))
    held = move(training, shards(checkpoint, training), rollout)
    back = gathered(rollout, held)
    assert back.keys() == checkpoint.keys()
    assert all(torch.equal(back[name], checkpoint[name]) for name in checkpoint)


def test_both_halves_of_glms_fused_projection_are_cut_apart() -> None:  # cases.md A17, of one tensor
    arch = glm(intermediate_size=4)
    checkpoint = labelled(arch)
    rows(checkpoint, "model.layers.0.mlp.gate_up_proj.weight", [100, 101, 102, 103, 200, 201, 202, 203])
    for layout, name in (
        (MegatronLayout(arch, 2), LAYER + "mlp.linear_fc1.weight"),
        (VLLMLayout(arch, 2), "model.layers.0.mlp.gate_up_proj.weight"),
    ):
        held = shards(checkpoint, layout)
        assert [held[rank][name][:, 0].tolist() for rank in (0, 1)] == [[100, 101, 200, 201], [102, 103, 202, 203]]
        whole = move(layout, held, MegatronLayout(arch, 1))[0][LAYER + "mlp.linear_fc1.weight"]
        assert whole[:, 0].tolist() == [100, 101, 102, 103, 200, 201, 202, 203]
    with pytest.raises(UserError, match="intermediate size 3 does not split over tensor parallel size 2"):
        MegatronLayout(glm(intermediate_size=3), 2)


@pytest.mark.parametrize(("tp", "heads"), [(2, 4), (3, 6)])
def test_vllm_cuts_both_halves_of_the_older_glm_as_one(tp: int, heads: int) -> None:
    """Its generic model gathers what ranks make of the rows in a run and only then takes gate and up apart."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 12, "vocab_size": 192}
    arch = glm(model_type="glm", **sizes)
    checkpoint, layout = labelled(arch), VLLMLayout(arch, tp)
    held = shards(checkpoint, layout)
    for rank in range(tp):
        assert torch.equal(held[rank][GATE_UP], checkpoint[GATE_UP].chunk(tp)[rank])
        assert torch.equal(held[rank][DOWN], checkpoint[DOWN].chunk(tp, 1)[rank])
    training = MegatronLayout(arch, tp)
    back = gathered(training, move(layout, held, training))
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in back.items())


def test_glms_bias_is_what_its_config_says() -> None:
    for biased in (True, False):
        arch = glm(attention_bias=biased)
        names = set(HFLayout(arch, (0,)).parameters(0))
        assert ("model.layers.0.self_attn.k_proj.bias" in names) == arch.qkv_bias == biased
        assert (LAYER + "self_attention.linear_qkv.bias" in MegatronLayout(arch).parameters(0)) == biased
        assert "model.layers.0.self_attn.o_proj.bias" not in names
        assert arch.has_dense_layers
    assert glm().qkv_bias  # what transformers takes where the config is silent


@pytest.mark.parametrize(
    ("arch", "norms"),
    [
        (gemma(), ["input", "post_attention", "pre_feedforward", "post_feedforward"]),
        (glm(), ["input", "post_self_attn", "post_attention", "post_mlp"]),
    ],
    ids=["gemma3_text", "glm4"],
)
def test_four_norms_a_layer_in_the_order_of_the_forward_pass(arch: Architecture, norms: list[str]) -> None:
    checkpoint = labelled(arch)
    for label, norm in enumerate(norms):
        checkpoint[f"model.layers.0.{norm}_layernorm.weight"].fill_(label)
    local = [
        "input_layernorm.weight", "self_attention.linear_proj.post_layernorm.weight", "pre_mlp_layernorm.weight",
        "mlp.linear_fc2.post_layernorm.weight",
    ]  # fmt: skip
    te = [
        "self_attention.linear_qkv.layer_norm_weight", local[1], "mlp.linear_fc1.layer_norm_weight", local[3],
    ]  # fmt: skip
    for layout, names in (MegatronLayout(arch, 2), local), (MegatronLayout(arch, 2, spec="te"), te):
        for held in shards(checkpoint, layout).values():
            assert [held[LAYER + name].unique().tolist() for name in names] == [[0], [1], [2], [3]]


OLD_FORM = {
    "rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 4,
}  # fmt: skip
NEW_FORM = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    },
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
}


@pytest.mark.parametrize("form", [OLD_FORM, NEW_FORM], ids=["older", "newer"])
def test_gemmas_rotations_and_windows_in_every_form(form: dict[str, Any]) -> None:  # cases.md A21
    arch = gemma(sliding_window=512, **form)
    assert (arch.rope_theta, arch.window_rope_theta) == (2e6, 3e4)
    assert arch.rope_scaling == {"rope_type": "linear", "factor": 8.0}
    assert arch.windows == (512, 512, 512, 0) * 3


def test_gemmas_defaults_are_those_of_transformers() -> None:
    from transformers import Gemma3TextConfig

    silent = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    arch = load_architecture({**silent, "model_type": "gemma3_text", "num_hidden_layers": 7})
    theirs = Gemma3TextConfig(num_hidden_layers=7)
    rope = theirs.rope_parameters
    assert rope is not None
    assert arch.rope_theta == rope["full_attention"]["rope_theta"]
    assert arch.window_rope_theta == rope["sliding_attention"]["rope_theta"]
    assert arch.attention_scale == theirs.query_pre_attn_scalar**-0.5
    assert theirs.layer_types is not None
    windows = [theirs.sliding_window if kind == "sliding_attention" else 0 for kind in theirs.layer_types]
    assert list(arch.windows) == windows
    assert arch.tied == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    "form",
    [{}, {"partial_rotary_factor": 0.5}, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}],
)
def test_half_of_glms_channels_are_rotated(form: dict[str, Any]) -> None:
    arch = glm(**form)
    assert (arch.rotary_dim, arch.rotary_interleaved, arch.rope_scaling) == (2, True, None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gemma3"},
            "Gemma3ForCausalLM of its config.text_config, give it the former's model.language_model",
        ),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "only 'gelu_pytorch_tanh'"),
        ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types does not say"),
        ({"model_type": "gemma3_text", "head_dim": None}, "head_dim is absent; transformers would take 256"),
        ({"model_type": "glm4", "head_dim": None}, "head_dim is absent; transformers would take 128"),
        ({"model_type": "glm4", "head_dim": 6}, "turns 3 of 6 channels"),
        ({"model_type": "glm4", "mlp_bias": True}, "mlp_bias is true"),
    ],
)
def test_what_these_families_do_not_do_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy(**config)
