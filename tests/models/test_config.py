"""Grids that cannot hold a model are refused, with the key and both numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bridge.families import Architecture, load_architecture
from rlflow.errors import UserError
from rlflow.limits import model_limits
from tests.bridge.toys import toy, toy_experts, toy_latent
from tests.models.test_rope import config


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"tp": 5}, "tensor_parallel_size: 5 does not divide the 12 attention heads"),
        ({"tp": 4}, "tensor_parallel_size: 4 neither divides the 6 key/value heads of the model nor is divided by"),
        ({"tp": 2}, "tensor_parallel_size: 2 does not divide the intermediate size 63"),
        ({"pp": 2}, "pipeline_parallel_size: 3 layers do not split evenly over 2 pipeline stages"),
    ],
    ids=["heads", "key/value heads", "intermediate", "layers"],
)
def test_misfits_are_refused(grid: dict[str, int], message: str) -> None:  # cases.md A09, A17, H05
    from rlflow.models import transformer_config

    arch = load_architecture(
        config(num_attention_heads=12, num_key_value_heads=6, head_dim=8, intermediate_size=63, num_hidden_layers=3)
    )
    shape: Any = SimpleNamespace(**({"tp": 1, "pp": 1, "cp": 1} | grid))
    with pytest.raises(UserError, match=message):
        transformer_config(arch, shape, torch.float32)


LIMITED = [
    (toy_latent(norm_topk_prob=False), "norm_topk_prob is false, only true is supported"),
    (toy_latent(num_experts_per_tok=1), "num_experts_per_tok is 1: sigmoid scores are divided by their sum"),
    (
        toy_latent(n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=6),
        "num_experts_per_tok 6 is not twice topk_group 2.*; num_experts_per_tok 4 would be right",
    ),
    (
        toy_experts(num_experts_per_tok=1, norm_topk_prob=True),
        "num_experts_per_tok is 1: a single normalized weight .* at least 2, or norm_topk_prob false",
    ),
    (toy(model_type="mixtral", num_local_experts=2, num_experts_per_tok=1), "num_experts_per_tok is 1: .* at least 2$"),
    (toy(rope_scaling={"rope_type": "longrope", "factor": 4.0}), "rope_scaling: rope_type 'longrope' is not supported"),
    (
        toy(rope_parameters={"rope_type": "dynamic", "factor": 4.0}),
        "rope_parameters: rope_type 'dynamic' is not supported; known: default, linear, llama3, yarn",
    ),
]


@pytest.mark.parametrize(("arch", "message"), LIMITED)
def test_models_that_the_trainer_does_not_compute_are_refused(arch: Architecture, message: str) -> None:
    from rlflow.models import transformer_config

    grid: Any = SimpleNamespace(tp=1, pp=1, cp=1, ep=1, etp=1)
    with pytest.raises(UserError, match=f"config.json: .*{message}"):
        transformer_config(arch, grid, torch.float32)


def test_one_expert_a_token_with_a_weight_of_its_own_is_trained() -> None:
    assert model_limits(toy_experts(num_experts_per_tok=1, norm_topk_prob=False)) == []
    assert model_limits(toy_latent()) == model_limits(toy()) == []


def test_transformer_engine_has_the_layers_of_models_with_experts_alone() -> None:
    from rlflow.models import layer_spec

    assert [layer_spec(toy(), with_it) for with_it in (False, True)] == ["local", "local"]
    assert [layer_spec(toy_experts(), with_it) for with_it in (False, True)] == ["local", "te"]
