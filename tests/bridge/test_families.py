"""What a config.json says of a model, in every form that configs come in."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.errors import UserError
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout
from tests.bridge.toys import CONFIG, toy


@pytest.mark.parametrize(
    ("sizes", "qkv_rows", "o_columns"),
    [((64, 8, 5120, 128), 10240, 8192), ((16, 8, 1024, 128), 4096, 2048)],
    ids=["32B", "0.6B"],
)
def test_head_dim_is_read_not_derived(sizes: tuple[int, ...], qkv_rows: int, o_columns: int) -> None:  # cases.md A20
    heads, kv_heads, hidden, head_dim = sizes
    arch = toy(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=hidden, head_dim=head_dim)
    params = MegatronLayout(arch).parameters(0)
    assert params["decoder.layers.0.self_attention.linear_qkv.weight"].shape == (qkv_rows, hidden)
    assert params["decoder.layers.0.self_attention.linear_proj.weight"].shape == (hidden, o_columns)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
        {"rope_theta": 500000, "rope_scaling": None},
    ],
)
def test_rope_theta_in_every_form(rope: dict[str, Any]) -> None:  # cases.md A21
    arch = toy(**rope)
    assert arch.rope_scaling is None
    assert arch.rope_theta ** (-2 / 8) == pytest.approx(0.03760603)  # inv_freq[1] of head_dim 8; 0.1 with theta 10000


@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_gains_no_keys(form: str) -> None:  # cases.md A23
    yarn = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    arch = toy(**{form: {**yarn, "beta_fast": None}})
    assert arch.rope_scaling == yarn


def test_the_older_name_of_rope_type() -> None:
    assert toy(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_mixtrals_own_defaults() -> None:
    """transformers' MixtralConfig: a base of a million and a larger epsilon, where a config is silent."""
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    silent = toy(**experts)
    assert (silent.rope_theta, silent.norm_eps) == (1e6, 1e-5)
    said = toy(**experts, rope_parameters={"rope_theta": 500.0, "rope_type": "default"}, rms_norm_eps=1e-6)
    assert (said.rope_theta, said.norm_eps) == (500.0, 1e-6)
    assert toy(**experts, rope_theta=700.0).rope_theta == 700.0


def test_contradictory_rope_is_refused() -> None:
    with pytest.raises(UserError, match=r"rope_theta is 10000 but rope_parameters.rope_theta is 500000"):
        toy(rope_theta=10000, rope_parameters={"rope_theta": 500000})
    with pytest.raises(UserError, match="rope_scaling and rope_parameters differ"):
        toy(rope_scaling={"type": "linear", "factor": 2}, rope_parameters={"rope_type": "linear", "factor": 4})


def test_every_eos_id_is_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 151645, "bos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    arch = load_architecture(tmp_path)
    assert arch.eos_token_ids == (151645, 151643)
    assert arch.bos_token_id == 7
    assert toy().eos_token_ids == ()


def test_qwen2_has_qkv_biases_and_llama_has_none() -> None:
    bias = "decoder.layers.0.self_attention.linear_qkv.bias"
    assert bias in MegatronLayout(toy(model_type="qwen2")).parameters(0)
    assert bias not in MegatronLayout(toy()).parameters(0)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(UserError) as error:
        toy(num_attention_heads=3, vocab_size=0, intermediate_size="16", head_dim=None)
    for fault in (
        "num_attention_heads 3 is not a multiple of num_key_value_heads 2",
        "vocab_size is 0, not a positive integer",
        "intermediate_size is '16', not a positive integer",
        "hidden_size 8 is not a multiple of num_attention_heads 3, and head_dim is absent",
    ):
        assert fault in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not one of llama, qwen2"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "window attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_a_family_does_not_do_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy(**config)


def test_a_folder_without_a_usable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config.json here"):
        load_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="broken JSON"):
        load_architecture(tmp_path)
