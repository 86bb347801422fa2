"""On one GPU: exactness in float32, bfloat16, vLLM with CUDA graphs and sleep, and whole runs."""

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.end_to_end import configuration, records, succeed
from tests.gpu import ranks
from tests.gpu.devices import SPECS, needs_gpus
from tests.roles.samples import random_batch, reference_scores
from tests.workers import World

pytestmark = needs_gpus(1)


@pytest.mark.parametrize("share", [True, False], ids=["prompts shared", "prompts repeated"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "glm4", "deepseek_v3"])
def test_float32_log_probs_are_those_of_transformers(
    gpus: World, tiny_model: Callable[..., Path], family: str, share: bool
) -> None:
    folder, batch = tiny_model(family, family != "deepseek_v3"), random_batch()
    expected = reference_scores(folder, batch, ranks.TEMPERATURE)[0]
    found = gpus(1, partial(ranks.log_probs, share_prompts=share), folder, torch.float32, batch)[0]
    print("float32 against transformers:", (found - expected).abs().max().item())
    # Where Transformer Engine is installed megatron's router multiplies by it, in TF32.
    routed_inexactly = family == "deepseek_v3" and importlib.util.find_spec("transformer_engine") is not None
    assert (found - expected).abs().max() < (1e-2 if routed_inexactly else 1e-3)


@pytest.mark.parametrize("share", [True, False], ids=["prompts shared", "prompts repeated"])
@pytest.mark.parametrize("family", ["gemma3_text", "glm4", "deepseek_v3"])
def test_windows_and_scales_of_the_packed_kernel(
    gpus: World, tiny_model: Callable[..., Path], family: str, share: bool
) -> None:
    """In bfloat16 the kernel for packed sequences computes all, with windows, shared prompts or shorter values."""
    folder, batch = tiny_model(family, family != "deepseek_v3"), random_batch()
    exact = gpus(1, ranks.log_probs, folder, torch.float32, batch)[0]
    gap = (gpus(1, partial(ranks.log_probs, share_prompts=share), folder, torch.bfloat16, batch)[0] - exact).abs()
    print(f"bfloat16 against float32: mean {gap.mean():.2e} of {exact.abs().mean():.2e}")
    assert gap.mean() < 0.02 * exact.abs().mean()


@pytest.fixture(scope="module")
def exact(gpus: World, qwen: Path) -> Tensor:
    return gpus(1, ranks.log_probs, qwen, torch.float32, ranks.long_batch())[0]


@pytest.mark.parametrize("transformer_engine", SPECS)
def test_bfloat16_stays_near_float32(gpus: World, qwen: Path, exact: Tensor, transformer_engine: bool) -> None:
    score = partial(ranks.log_probs, transformer_engine=transformer_engine)
    found = gpus(1, score, qwen, torch.bfloat16, ranks.long_batch())[0]
    gap = (found - exact).abs()
    print(f"bfloat16 against float32: mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.mean() < 0.05
    assert gap.max() < 0.3


@pytest.mark.parametrize("transformer_engine", SPECS)
def test_experts_stay_near_float32(gpus: World, experts: Path, transformer_engine: bool) -> None:
    """Transformer Engine's layers group the products of all experts, the local ones compute one after another."""
    exact = gpus(1, ranks.log_probs, experts, torch.float32, ranks.long_batch())[0]
    score = partial(ranks.log_probs, transformer_engine=transformer_engine)
    gap = (gpus(1, score, experts, torch.bfloat16, ranks.long_batch())[0] - exact).abs()
    print(f"experts, bfloat16 against float32: mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.mean() < 0.1


@pytest.mark.parametrize("transformer_engine", SPECS)
def test_steps_learn_and_agree_with_float32(gpus: World, qwen: Path, transformer_engine: bool) -> None:
    batch = ranks.long_batch()
    exact = gpus(1, ranks.learn, qwen, torch.float32, batch, 1)[0]
    learn = partial(ranks.learn, transformer_engine=transformer_engine)
    found = gpus(1, learn, qwen, torch.bfloat16, batch, 3)[0]
    print("gradient norms:", [step["engine/grad_norm"] for step in found.metrics], exact.metrics[0]["engine/grad_norm"])
    assert found.metrics[0]["engine/grad_norm"] == pytest.approx(exact.metrics[0]["engine/grad_norm"], rel=0.02)
    assert found.metrics[0]["loss"] == pytest.approx(exact.metrics[0]["loss"], abs=2e-3)
    assert found.after > found.before + 0.1


@pytest.mark.parametrize("transformer_engine", SPECS)
def test_gradients_of_experts_agree_with_float32(gpus: World, experts: Path, transformer_engine: bool) -> None:
    batch = ranks.long_batch()
    exact = gpus(1, ranks.learn, experts, torch.float32, batch, 1)[0].metrics[0]["engine/grad_norm"]
    learn = partial(ranks.learn, transformer_engine=transformer_engine)
    found = gpus(1, learn, experts, torch.bfloat16, batch, 1)[0].metrics[0]["engine/grad_norm"]
    print("experts' gradient norms:", found, exact)
    assert found == pytest.approx(exact, rel=0.05)


def test_vllm_sleeps_wakes_and_takes_weights_in_place(fresh_gpus: World, qwen: Path) -> None:  # cases.md C10
    seen = fresh_gpus(1, ranks.roll, qwen)[0]
    print(seen)
    assert seen.in_place
    assert len(seen.refused) == 3  # before the first sync, asleep, and without its cache
    assert seen.repeats
    assert seen.freed_bytes > 1.2e9  # the weights and the cache
    for gap in seen.gaps:
        assert gap.mean < 0.05
        assert gap.k3 < 2e-3


def test_a_run_trains_saves_and_goes_on(tmp_path: Path, shallow_qwen: Path) -> None:
    config = configuration(
        tmp_path,
        shallow_qwen,
        actor={"micro_batch_tokens": 8192},
        optimizer={"lr": 1e-5},
        algorithm={"kl_coef": 1e-3},
        rollout={"n": 8, "max_response_length": 64, "kv_cache_gib": 2.0},
        trainer={"steps": 2, "save_every": 2, "export": False},
    )
    succeed("train", config, "model.dtype=bfloat16")
    succeed("train", config, "model.dtype=bfloat16", "trainer.steps=3", "trainer.export=true")
    run = records(tmp_path / "run")
    print({name: run[-1][name] for name in run[-1] if name.startswith(("time/", "mismatch/", "perf/", "actor/"))})
    assert [record["step"] for record in run] == [0, 1, 2, 3]
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    for record in run[1:]:
        assert record["actor/first_ratio_error"] == 0
        assert record["mismatch/kl"] < 2e-3
