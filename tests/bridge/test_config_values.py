"""Configs that no one meant: whatever is in a config.json, it is read, or refused in words that name the key."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bridge.errors import UserError
from megatron_bridge.families import FAMILIES, load_architecture
from megatron_bridge.families.values import ROPE_VALUES, VALUES
from tests.bridge.toys import CONFIG, toy, toy_experts, toy_latent

COMMON = {
    **CONFIG, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64, "eos_token_id": [1, 2],
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}  # fmt: skip
EXPERTS = {**toy_experts().hf_config, "num_local_experts": 4, "decoder_sparse_step": 1, "norm_topk_prob": True}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {**COMMON, "model_type": name, "layer_types": ["full_attention"] * 2} for name in FAMILIES},
    "qwen3_moe": EXPERTS,
    "mixtral": {**EXPERTS, "model_type": "mixtral"},
    "deepseek_v3": {**toy_latent().hf_config, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1},
    "gemma3_text": {
        **COMMON, "model_type": "gemma3_text", "rope_scaling": None, "sliding_window": 8, "sliding_window_pattern": 2,
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e4}},
    },
    **{name: {**COMMON, "model_type": name, "partial_rotary_factor": 1.0} for name in ("glm", "glm4")},
}  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, -1, 1, 7, 10**9, 10**30, 10**400, 0.5, float("nan"), float("inf")]),
    st.sampled_from(["", "8", "yarn", "full_attention", "sliding_attention"]),
)  # fmt: skip
KEYS = st.sampled_from(sorted({*VALUES, *ROPE_VALUES, "quantization_config", "moe_layer_freq", "model_type"}))
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_change_loads_or_is_a_users_error(data: st.DataObject) -> None:
    config = json.loads(json.dumps(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))]))
    for _ in range(data.draw(st.integers(1, 3))):
        inside = [value for key, value in config.items() if key.startswith("rope_") and isinstance(value, dict)]
        place = data.draw(st.sampled_from([config, config, *inside]))
        place[data.draw(KEYS)] = data.draw(ANYTHING)
    try:
        arch = load_architecture(config)
    except UserError:
        return
    assert len(arch.layer_kinds) == arch.layers


@pytest.mark.parametrize("family", CONFIGS)
def test_the_configs_that_are_changed_are_sound(family: str) -> None:
    assert load_architecture(CONFIGS[family]).family == family


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, not a positive integer of at most 10000"),
        ("vocab_size", 10**30, "vocab_size is 1000000000000000000000000000000, not a positive integer of at most"),
        ("hidden_size", None, "hidden_size is absent"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6', not a positive number"),
        ("rope_parameters", [1], r"rope_parameters is \[1\], not an object"),
        ("rope_scaling", {"type": "linear", "factor": "2"}, "rope_scaling.factor is '2', not a positive number"),
        ("layer_types", "full", "layer_types is 'full', not a list of texts"),
        ("eos_token_id", "2", "eos_token_id is '2', not a token's number or a list of them"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no', not true or false"),
    ],
)
def test_wrong_values_are_named(key: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        toy(**{key: value})


def test_wrong_values_of_experts_are_named() -> None:
    for key, value in (("decoder_sparse_step", 0), ("mlp_only_layers", 1), ("num_experts", 10**6)):
        with pytest.raises(UserError, match=f"{key} is {value}, not a "):
            toy_experts(**{key: value})
    for key in ("n_group", "topk_group", "first_k_dense_replace", "num_nextn_predict_layers"):
        with pytest.raises(UserError, match=f"{key} is 'two', not a "):
            toy_latent(**{key: "two"})


def test_layers_and_experts_together_are_limited() -> None:
    with pytest.raises(UserError, match="10000 layers of 16384 experts are more than anything can list"):
        toy_experts(num_hidden_layers=10_000, num_experts=16_384)


def test_null_is_absent_or_refused_as_transformers_has_it() -> None:
    assert toy(num_key_value_heads=None) == toy(num_key_value_heads=4)
    absent = ("rope_scaling", "rope_theta", "partial_rotary_factor", "architectures", "eos_token_id", "layer_types")
    assert toy(**dict.fromkeys(absent)) == toy()
    assert toy_experts(mlp_only_layers=None) == toy_experts(mlp_only_layers=[])
    for key in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        with pytest.raises(UserError, match=f"{key} is null, not "):
            toy(**{key: None})
    with pytest.raises(UserError, match="decoder_sparse_step is null, not a positive integer"):
        toy_experts(decoder_sparse_step=None)
    for key in ("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor"):
        with pytest.raises(UserError, match=f"{key} is null, not "):
            toy_latent(**{key: None})
    assert toy_latent(q_lora_rank=None).latent.query_rank == 0  # type: ignore[union-attr]


def test_the_other_files_are_read_as_strictly(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": {"a": 1}}')
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is"):
        load_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[" * 10**6)
    with pytest.raises(UserError, match="broken JSON"):
        load_architecture(tmp_path)


def test_quantized_weights_matter_where_weights_are_read() -> None:
    quantized = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    assert load_architecture(quantized, reads_weights=False) == load_architecture(CONFIG)
    with pytest.raises(UserError, match="quantization_config: quantized weights"):
        load_architecture(quantized)
