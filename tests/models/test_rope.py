"""Rotary frequencies are those of transformers, and the rotation is its rotation."""

from typing import Any

import pytest
import torch

from megatron_bridge.families import Architecture, load_architecture
from rlflow.errors import UserError
from rlflow.limits import ROPE_TYPES
from rlflow.models import rope
from rlflow.models.rope import Rope, make_ropes, rotate, rotation_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128}
YARN_OF_DEEPSEEK = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2}


def config(**overrides: Any) -> dict[str, Any]:
    plain = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    return plain | overrides


def architecture(**overrides: Any) -> Architecture:
    return load_architecture(config(**overrides))


def test_theta_is_used() -> None:  # cases.md A21
    rope = make_ropes(architecture(hidden_size=16, rope_theta=500000.0)).plain
    assert rope.frequencies[1].item() == pytest.approx(0.03760603)


SCALINGS = [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN, YARN_OF_DEEPSEEK]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "linear", "llama3", "yarn", "yarn of deepseek"])
def test_frequencies_are_bitwise_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = config(rope_scaling=scaling, rope_theta=500000.0)
    expected = LlamaRotaryEmbedding(LlamaConfig(**given))
    found = make_ropes(load_architecture(given)).plain
    assert torch.equal(found.frequencies, expected.inv_freq)
    assert found.factor == expected.attention_scaling


def test_yarn_enlarges_by_what_its_factor_says() -> None:  # cases.md A23
    rope = make_ropes(architecture(rope_scaling=YARN)).plain
    assert rope.factor == pytest.approx(1.138629, abs=1e-6)  # 0.1 · ln 4 + 1
    table = rotation_table(torch.tensor([0]), rope, torch.float32)
    assert table.cosines.unique().tolist() == [pytest.approx(1.138629, abs=1e-6)]


def test_an_unknown_scaling_is_refused() -> None:
    assert set(ROPE_TYPES) == {"default", *rope.SCALINGS}
    with pytest.raises(UserError, match="'longrope' is not supported; known: default, linear, llama3, yarn"):
        make_ropes(architecture(rope_scaling={"rope_type": "longrope", "factor": 4.0}))


def test_layers_with_a_window_have_their_own_base_and_no_scaling() -> None:
    scaled = {"rope_type": "linear", "factor": 8.0}
    gemma = architecture(model_type="gemma3_text", head_dim=16, num_hidden_layers=6, rope_scaling=scaled)
    ropes = make_ropes(gemma)
    assert ropes.window == 4096
    assert ropes.plain.frequencies[1].item() == pytest.approx(1e6 ** (-2 / 16) / 8)
    assert ropes.windowed is not None
    assert ropes.windowed.frequencies[1].item() == pytest.approx(1e4 ** (-2 / 16))


def test_neighbours_of_half_a_head_are_turned_as_in_transformers() -> None:
    from transformers.models.glm4.modeling_glm4 import Glm4Config, Glm4RotaryEmbedding, apply_rotary_pos_emb

    given = config(model_type="glm4", head_dim=16)
    rope = make_ropes(load_architecture(given)).plain
    positions = torch.tensor([0, 5, 3])
    states = torch.randn(3, 2, 16, requires_grad=True)
    embedding = Glm4RotaryEmbedding(Glm4Config(**given))
    cosines, sines = embedding(states, positions[None])
    expected = apply_rotary_pos_emb(states[None].transpose(1, 2), states[None].transpose(1, 2), cosines, sines)[0]
    table = rotation_table(positions, rope, torch.float32)
    assert torch.allclose(rotate(states, table), expected[0].transpose(0, 1), atol=1e-6)
    exact = table._replace(cosines=table.cosines.double(), sines=table.sines.double())
    assert torch.autograd.gradcheck(lambda x: rotate(x, exact), (states.double(),))


def test_rotation_and_its_gradient_turn_channel_pairs() -> None:
    frequencies = torch.tensor([1.0, 0.25])
    positions = torch.tensor([0, 3, 1])
    states = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    table = rotation_table(positions, Rope(frequencies), torch.float64)
    turned = rotate(states, table)
    pairs = torch.complex(states[..., :2], states[..., 2:]) * torch.polar(
        torch.ones(3, 1, 2, dtype=torch.float64), (positions[:, None] * frequencies).double()[:, None]
    )
    assert torch.allclose(turned, torch.cat([pairs.real, pairs.imag], -1), atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), (states,))
