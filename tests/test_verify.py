"""`rlflow verify`: what it prints and answers, for a sound engine and for one whose layout is not what is thought."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_bridge.proof import Proof
from rlflow.config import Config, assemble
from rlflow.verify import random_prompts, table
from tests.rollout.ranks import SwappedGateUp


def test_the_table_names_what_differs() -> None:
    weights: Any = SimpleNamespace(proofs=[None, Proof(12, 3_400_000, ("a.weight",))], decision="by vLLM's loader")
    assert table(weights) == [
        "rank  tensors         MB  different",
        "   1       12        3.4          1",
        "       a.weight",
        "by vLLM's loader",
    ]


def test_prompts_differ_in_length_and_are_the_same_everywhere() -> None:
    prompts = list(random_prompts(100, 32))
    assert [len(prompt.token_ids) for prompt in prompts] == [4, 8, 12, 16, 20, 24, 28, 32]
    assert prompts[7].token_ids == list(random_prompts(100, 32))[7].token_ids


def _verify(config: Config, parity: bool, wrong: bool) -> tuple[int, str]:
    """The exit code and what this rank prints, with the true layout or a wrong one."""
    from rlflow import verify
    from rlflow.rollout import vllm_engine

    right = vllm_engine.VLLMLayout
    if wrong:
        vllm_engine.VLLMLayout = SwappedGateUp  # type: ignore[misc]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            return verify.verify(config, parity=parity), printed.getvalue()
    finally:
        vllm_engine.VLLMLayout = right  # type: ignore[misc]


def configuration(folder: Path, world_size: int, *overrides: str) -> Config:
    rollout = {"kv_cache_gib": 0.05, "max_prompt_length": 48, "max_response_length": 16}
    sections = {"model": {"path": str(folder), "dtype": "float32"}, "rollout": rollout}
    return assemble(sections, overrides, world_size=world_size, purpose="verify", source="test")


def test_a_sound_engine_agrees_with_the_trainer(world: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    sizes = ("rollout.tensor_parallel_size=2", "rollout.expert_parallel=true", "actor.pipeline_parallel_size=2")
    config = configuration(tiny_model("qwen3_moe", True), 2, *sizes)
    (code, printed), (other, nothing) = world(2, _verify, config, True, False)
    assert (code, other, nothing) == (0, 0, "")
    assert "start-up proof passed: 130 tensors" in printed
    assert "log-probs of 128 sampled tokens: engine and trainer differ by " in printed


def test_a_wrong_layout_is_an_error(world: Callable[..., Any], tiny_model: Callable[..., Path]) -> None:
    config = configuration(tiny_model("llama", True), 1)
    code, printed = world(1, _verify, config, False, True)[0]
    assert code == 1
    assert "model.layers.0.mlp.gate_up_proj.weight" in printed
    assert "weights go through vLLM's loader" in printed
