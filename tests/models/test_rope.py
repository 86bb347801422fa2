"""Rotary frequencies are those of transformers, and the rotation is its rotation."""

from typing import Any

import pytest
import torch

from megatron_bridge.families import Architecture, load_architecture
from rlflow.errors import UserError
from rlflow.models.rope import inverse_frequencies, rotate, rotation_table

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def config(**overrides: Any) -> dict[str, Any]:
    plain = {
        "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 64, "max_position_embeddings": 512,
    }  # fmt: skip
    return plain | overrides


def architecture(**overrides: Any) -> Architecture:
    return load_architecture(config(**overrides))


def test_theta_is_used() -> None:  # cases.md A21
    frequencies = inverse_frequencies(architecture(hidden_size=16, rope_theta=500000.0))
    assert frequencies[1].item() == pytest.approx(0.03760603)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=str)
def test_frequencies_are_bitwise_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = config(rope_scaling=scaling, rope_theta=500000.0)
    expected = LlamaRotaryEmbedding(LlamaConfig(**given)).inv_freq
    assert torch.equal(inverse_frequencies(load_architecture(given)), expected)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(UserError, match="'yarn' is not supported; known: default, linear, llama3"):
        inverse_frequencies(architecture(rope_scaling={"rope_type": "yarn", "factor": 4.0}))


def test_rotation_and_its_gradient_turn_channel_pairs() -> None:
    frequencies = torch.tensor([1.0, 0.25])
    positions = torch.tensor([0, 3, 1])
    states = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    table = rotation_table(positions, frequencies, torch.float64)
    turned = rotate(states, table)
    pairs = torch.complex(states[..., :2], states[..., 2:]) * torch.polar(
        torch.ones(3, 1, 2, dtype=torch.float64), (positions[:, None] * frequencies).double()[:, None]
    )
    assert torch.allclose(turned, torch.cat([pairs.real, pairs.imag], -1), atol=1e-6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, table), (states,))
