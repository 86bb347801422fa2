"""DeepSeek-V3 in vLLM: written as its loader would, what it derives renewed, log-probs transformers'."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout import sync_ranks
from tests.rollout.ranks import gap, start
from tests.rollout.sync_ranks import megatron
from tests.rollout.test_sync import EP2_TP2, WAYS, refused
from tests.workers import World

FULL_QUERIES = {
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
CASES = [  # config, vLLM's sizes, Megatron's grid, what is lost, ranks
    pytest.param({}, {"tensor": 2}, EP2_TP2, "router.expert_bias", 2, id="TP2"),
    pytest.param(FULL_QUERIES, {"tensor": 2, "experts": True}, {"pp": 2}, "", 2, id="EP2, full queries"),
]


def reference(folder: Path, scale: float) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for tensor in [*model.parameters(), *biases]:
            tensor.mul_(scale)
    return model


@pytest.mark.parametrize(("config", "engine", "source", "lost", "ranks"), CASES)
def test_engines_sample_from_megatrons_weights(
    world: World, tiny_model: Callable[..., Path], config: dict[str, Any], engine: dict[str, Any],
    source: dict[str, Any], lost: str, ranks: int,
) -> None:  # fmt: skip
    folder = tiny_model("deepseek_v3", False, **config)
    found = world(ranks, sync_ranks.sync, folder, engine, source, lost)
    assert all(seen.proven for seen in found)
    for way, scale in WAYS.items():
        samples = [sample for seen in found for sample in seen.samples[way]]
        assert len(samples) == 10
        assert gap(reference(folder, scale), samples, 0.7) < 1e-4
    if lost:
        refused(found, lost)


@dataclass
class Derived:
    """Of each layer: whether what vLLM derives is right after a sync, and after mere writing, and where it was."""

    right: list[bool]
    right_without: list[bool]
    same_place: list[bool]


def derive(folder: Path) -> Derived:
    """A sync into an engine whose derived tensors are no views of the weights, as after a reload."""
    from megatron_bridge import compat

    rollout = start(folder)
    layers = [module for module in compat.vllm_model(rollout._llm).modules() if hasattr(module, "W_UK_T")]
    for layer in layers:
        for name in ("W_UK_T", "W_UV"):
            setattr(layer, name, torch.nn.Parameter(getattr(layer, name).detach().clone(), requires_grad=False))
    places = [(layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) for layer in layers]
    layout, tensors = megatron(folder, {})
    rollout.weights._bound(layout, tensors).run()  # the writing alone
    before = [_right(layer) for layer in layers]
    rollout.sync(layout, tensors)
    after = [_right(layer) for layer in layers]
    same = [
        (layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) == place for layer, place in zip(layers, places, strict=True)
    ]
    rollout.shutdown()
    return Derived(after, before, same)


def _right(layer: Any) -> bool:
    """Whether the derived tensors are those of vLLM's own rule, the weight seen as [latent, heads, nope + value]."""
    weight = layer.kv_b_proj.weight.detach().t()
    parts = weight.reshape(layer.kv_lora_rank, layer.num_heads, layer.qk_nope_head_dim + layer.v_head_dim)
    keys, values = parts[..., : layer.qk_nope_head_dim], parts[..., layer.qk_nope_head_dim :]
    return torch.equal(layer.W_UK_T, keys.permute(1, 2, 0)) and torch.equal(layer.W_UV, values.permute(1, 0, 2))


def test_what_vllm_derives_from_a_weight_is_renewed_where_it_lies(
    world: World, tiny_model: Callable[..., Path]
) -> None:
    found = world(1, derive, tiny_model("deepseek_v3", False))[0]
    assert found == Derived([True] * 4, [False] * 4, [True] * 4)


def test_the_cache_holds_one_latent_a_token(tiny_model: Callable[..., Path]) -> None:
    from megatron_bridge.families import load_architecture
    from rlflow.config.schema import Rollout
    from rlflow.rollout.vllm_process import cache_bytes

    config = Rollout(max_prompt_length=32, max_response_length=32, max_num_seqs=1, kv_cache_gib=1.0)
    arch = load_architecture(tiny_model("deepseek_v3", False))
    assert cache_bytes(arch, config, "float32") == 2 * 128 * 4 * (512 + 64) * 4  # blocks, tokens, layers, latent, bytes
