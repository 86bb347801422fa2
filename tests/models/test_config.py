"""Grids that cannot hold a model are refused, with the key and both numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bridge.families import load_architecture
from rlflow.errors import UserError
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
