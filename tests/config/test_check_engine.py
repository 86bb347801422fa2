"""Rules of how vLLM cuts a model into ranks and stages, of its cache, and of the number format that it keeps."""

import json
from pathlib import Path

import pytest

from tests.config.examples import QWEN, faults

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


def engine_faults(folder: Path, overrides: str, world_size: int, experts: bool) -> list[str]:
    """Where vLLM alone is asked for, of the example's model or of one with six experts."""
    sections = {}
    if experts:
        model = json.loads((QWEN / "config.json").read_text())
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps({**model, **EXPERTS, "use_sliding_window": False}))
        sections["model"] = {"path": str(folder / "model")}
    return faults(folder, *overrides.split(), world_size=world_size, purpose="generate", **sections)


@pytest.mark.parametrize(
    ("overrides", "world_size", "experts"),
    [
        ("rollout.pipeline_parallel_size=4", 8, False),
        ("rollout.tensor_parallel_size=2 rollout.expert_parallel=true", 2, True),
        ("rollout.tensor_parallel_size=4", 4, True),
        ("rollout.quantization=fp8", 1, False),
        ("rollout.dtype=float16", 1, False),
    ],
)
def test_what_vllm_can_do_is_accepted(tmp_path: Path, overrides: str, world_size: int, experts: bool) -> None:
    assert engine_faults(tmp_path, overrides, world_size, experts) == []


@pytest.mark.parametrize(
    ("overrides", "world_size", "experts", "message"),
    [
        ("rollout.pipeline_parallel_size=3", 3, False,
         "rollout.pipeline_parallel_size = 3: 28 layers do not divide over 3: divisors are 1, 2, 4, 7, 14, 28; "
         "nearest: 4"),
        ("rollout.tensor_parallel_size=2 rollout.pipeline_parallel_size=2", 6, False,
         "rollout.tensor_parallel_size = 2: 6 ranks do not divide into vLLM replicas of TP × PP = 4"),
        ("rollout.expert_parallel=true", 1, False,
         "rollout.expert_parallel = true: qwen2 has no experts; nearest: false"),
        ("rollout.tensor_parallel_size=4 rollout.expert_parallel=true", 4, True,
         "rollout.tensor_parallel_size = 4: 6 experts do not divide over 4: divisors are 1, 2, 3, 6; nearest: 3"),
        ("rollout.tensor_parallel_size=7", 7, True,
         "rollout.tensor_parallel_size = 7: vLLM wants no more ranks than the 6 experts; nearest: 4"),
        ("rollout.quantization=fp8 rollout.dtype=float32", 1, False,
         "rollout.quantization = fp8: weights are quantized from 16 bits: set rollout.dtype; nearest: null"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused(
    tmp_path: Path, overrides: str, world_size: int, experts: bool, message: str
) -> None:
    assert message in engine_faults(tmp_path, overrides, world_size, experts)


def test_the_kv_cache_must_hold_one_sequence(tmp_path: Path) -> None:
    """32768 tokens × 2 (k, v) × 28 layers × 4 heads × 128 channels × 2 bytes = 1.75 GiB; half of the heads at TP2."""
    lengths = ("rollout.max_prompt_length=2048", "rollout.max_response_length=30720")
    (fault,) = faults(tmp_path, *lengths, "rollout.kv_cache_gib=1.7")
    assert fault == "rollout.kv_cache_gib = 1.7: one sequence of 32768 tokens needs 1.75 GiB; nearest: 1.75"
    assert faults(tmp_path, *lengths, "rollout.kv_cache_gib=1.75") == []
    tp2 = "rollout.tensor_parallel_size=2"
    assert faults(tmp_path, *lengths, "rollout.kv_cache_gib=0.9", tp2, world_size=2) == []
