"""Which parameters an engine must have, and what is said of weights that are not there (cases.md A29)."""

from megatron_bridge.bind_vllm import is_used, missing_parts, unfilled
from megatron_bridge.compat import vllm_parameter_name
from megatron_bridge.layouts import HFLayout, MegatronLayout, VLLMLayout
from tests.bridge.toys import toy, toy_experts


def test_a_missing_part_is_named_with_the_fused_parameter_that_it_leaves_half_written() -> None:
    source, target = HFLayout(toy(), (0,)), VLLMLayout(toy())
    given = set(source.parameters(0)) - {"model.layers.1.self_attn.v_proj.weight"}
    assert missing_parts(source, 0, given, target) == [
        "model.layers.1.self_attn.qkv_proj.weight lacks its part model.layers.1.self_attn.v_proj.weight"
    ]
    assert missing_parts(source, 0, source.parameters(0), target) == []


def test_nothing_given_is_everything_missing() -> None:
    source = HFLayout(toy(), (0,))
    assert len(missing_parts(source, 0, [], VLLMLayout(toy()))) == len(source.parameters(0))


def test_an_expert_on_a_later_stage_is_found() -> None:
    arch = toy_experts(num_hidden_layers=4)
    source, target = MegatronLayout(arch, ep=2, dp=2), VLLMLayout(arch, tp=1, pp=2)
    lost = "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight"
    given = set(source.parameters(1)) - {lost}
    assert missing_parts(source, 1, given, target) == [f"model.layers.3.mlp.experts.w13_weight lacks its part {lost}"]


def test_what_another_stage_uses_is_left_alone() -> None:
    """Some of vLLM's models build embedding, norm and head on every stage."""
    layout = VLLMLayout(toy(), pp=2)
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.foo")
    assert [[is_used(name, layout, rank) for name in names] for rank in (0, 1)] == [
        [True, False, False, True],
        [False, True, True, True],
    ]
    assert all(is_used(name, VLLMLayout(toy()), 0) for name in names)


def test_what_a_loader_did_not_name_is_unfilled() -> None:
    layout = VLLMLayout(toy())
    loaded = set(layout.parameters(0)) - {"model.norm.weight"}
    assert unfilled(layout, 0, loaded) == ["vLLM's loader took nothing for model.norm.weight"]


def test_names_of_experts_are_the_same_in_all_versions() -> None:
    name = "model.layers.0.mlp.experts.w13_weight"
    assert vllm_parameter_name("model.layers.0.mlp.experts.routed_experts.w13_weight") == name
    assert vllm_parameter_name(name) == name
