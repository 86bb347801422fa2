"""Kinds of engines on GPUs: eight-bit weights, experts, whole or cut, latent attention, windows, pipeline stages.

usage: pytest -q -s tests/gpu/test_engines.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import engine_ranks
from tests.gpu.devices import needs_gpus
from tests.workers import World

pytestmark = needs_gpus(1)
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")


@pytest.mark.parametrize("model", ["qwen", "experts"])
def test_vllm_quantizes_what_it_loads(fresh_gpus: World, request: pytest.FixtureRequest, model: str) -> None:
    """Linear layers are kept in fp8 in the same storage; sampling then differs from the trainer by fp8's error."""
    folder = request.getfixturevalue(model)
    seen = fresh_gpus(1, engine_ranks.keep, folder, {}, {"quantization": "fp8"})[0]
    print(model, seen)
    assert not seen.in_place
    assert seen.decision == "weights go through vLLM's loader, which quantises them"
    assert torch.float8_e4m3fn in seen.dtypes
    assert seen.same_storage
    for gap in seen.gaps:
        assert 0 < gap.mean < 0.4  # .27 with weights without structure, whose largest are no outliers


@pytest.mark.parametrize(
    ("model", "count", "grid", "options"),
    [
        pytest.param("experts", 1, {}, {}, id="experts"),
        pytest.param("latent", 1, {}, {}, id="latent attention"),
        pytest.param("gemma", 1, {}, {}, id="windows and norms behind"),
        pytest.param("experts", 2, {"expert": 2}, {"tensor": 2}, id="experts EP2 to TP2", marks=TWO),
        pytest.param("experts", 2, {"expert": 2}, {"tensor": 2, "expert_parallel": True}, id="experts EP2 to EP2",
                     marks=TWO),
        pytest.param("qwen", 2, {"tensor": 2}, {"pipeline_parallel_size": 2}, id="TP2 to PP2", marks=TWO),
    ],
)  # fmt: skip
def test_weights_are_written_in_place(
    fresh_gpus: World, request: pytest.FixtureRequest, model: str, count: int, grid: dict[str, Any],
    options: dict[str, Any],
) -> None:  # fmt: skip
    folder: Path = request.getfixturevalue(model)
    for seen in fresh_gpus(count, engine_ranks.keep, folder, grid, options):
        print(model, options, seen)
        assert seen.in_place
        assert seen.same_storage
        for gap in seen.gaps:
            assert gap.mean < 0.05
            assert gap.k3 < 2e-3
