"""Pipeline stages take equally long, the head counted."""

from typing import Any

import pytest

from megatron_bridge.families import load_architecture
from rlflow.models import split_layers

SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536,
}  # fmt: skip


def split(stages: int, **overrides: Any) -> tuple[int, ...]:
    return split_layers(load_architecture(SMOLLM2 | overrides), stages)


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 6, 30])
def test_every_layer_is_placed_and_every_stage_has_one(stages: int) -> None:
    layers = split(stages)
    assert len(layers) == stages
    assert sum(layers) == 30
    assert min(layers) >= 1
    assert len(set(layers[1:-1])) <= 1


def test_the_last_stage_has_fewer_layers_for_its_head() -> None:
    # 28.3M head weights, half of the rows scored, against 3.54M weights a layer: 4 layers
    assert split(2) == (17, 13)


def test_a_small_vocabulary_leaves_stages_even() -> None:
    assert split(2, vocab_size=64) == (15, 15)
    assert split(5, vocab_size=64) == (6, 6, 6, 6, 6)


def test_a_head_weighs_more_beside_narrow_experts() -> None:
    # two experts of 192 neurons a token: 1.55M weights a layer, so that the head costs as much as 9 layers
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
    assert split(2, model_type="qwen3_moe", **experts) == (20, 10)


def test_a_score_costs_nothing() -> None:
    assert split(2, architectures=["LlamaForSequenceClassification"], num_labels=1) == (15, 15)
