"""Weights from Megatron's layouts into vLLM engines cut by tensor, expert and pipeline, on real processes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout import sync_ranks
from tests.rollout.ranks import gap
from tests.rollout.sync_ranks import SCALE, Synced
from tests.workers import World

EACH_ONCE = [(f"train/{prompt}", index) for prompt in range(5) for index in range(2)]
WAYS = {"in place": 1.0, "by vLLM's loader": SCALE}
EP2_TP2 = {"tp": 2, "ep": 2, "etp": 1}  # on two ranks: attention is cut, experts are whole
QKV = "layers.0.self_attention.linear_qkv"
CASES = [  # model, vLLM's sizes, Megatron's grid, what is lost, ranks
    pytest.param("qwen3_moe-tied", {"tensor": 2}, EP2_TP2, "local_experts.1.linear_fc2", 2, id="EP2 to TP2"),
    pytest.param("qwen3_moe", {"tensor": 2, "experts": True}, EP2_TP2, "router", 2, id="EP2 to EP2"),
    pytest.param("mixtral", {"pipeline": 2}, {"dp": 2, "ep": 2}, "", 2, id="EP2 to PP2"),
    pytest.param("qwen3-tied", {"pipeline": 2}, {"pp": 2, "vpp": 2}, f"1.decoder.{QKV}", 2, id="PP2 VPP2 to PP2, tied"),
    pytest.param("qwen2-one", {"tensor": 2}, {"pp": 2, "stages": (3, 1)}, QKV, 2, id="uneven PP2 to TP2, one KV head"),
    pytest.param("llama-tied", {"tensor": 2}, {"pp": 4}, "", 4, id="PP4 to TP2 twice, tied"),
    pytest.param(
        "qwen3_moe-tied", {"tensor": 2, "pipeline": 2, "experts": True}, {"tp": 2, "dp": 2, "ep": 4, "etp": 1}, "", 4,
        id="EP4 TP2 to TP2 PP2 EP2",
    ),
    pytest.param(
        "qwen3_moe-tied", {"tensor": 2, "experts": True, "ranks": (1, 2)}, {"tp": 2, "dp": 2, "ep": 2}, "", 4,
        id="EP2 ETP2 to EP2 on two of four ranks",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("model", "engine", "source", "lost", "ranks"), CASES)
def test_engines_sample_from_megatrons_weights(
    world: World, tiny_model: Callable[..., Path], model: str, engine: dict[str, Any], source: dict[str, Any],
    lost: str, ranks: int,
) -> None:  # fmt: skip
    """The proof holds for all parameters; log-probs are transformers' in place and by the loader; cases.md A29, C01."""
    family, _, kind = model.partition("-")
    folder = tiny_model(family, kind == "tied", **({"num_key_value_heads": 1} if kind == "one" else {}))
    found = world(ranks, sync_ranks.sync, folder, engine, source, lost)
    rolling = [found[rank] for rank in engine.get("ranks", range(ranks))]
    assert all(seen.proven for seen in found)
    assert min(seen.compared for seen in rolling) > 10
    for way, scale in WAYS.items():
        samples = [sample for seen in found for sample in seen.samples[way]]
        assert sorted((sample.prompt.id, sample.index) for sample in samples) == EACH_ONCE
        assert gap(reference(folder, scale), samples, 0.7) < 1e-4
        assert all(seen.traffic[way].received + seen.traffic[way].local > 0 for seen in rolling)
    if lost:
        refused(found, lost)


def test_senders_cast_to_the_engines_number_format(world: World, tiny_model: Callable[..., Path]) -> None:
    pairs = [("float32", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float32")]
    for found in world(1, sync_ranks.cast, tiny_model("qwen3", True), pairs)[0]:
        assert len(found) > 30
        assert all(found.values())


def refused(found: list[Synced], lost: str) -> None:
    """Rank 0, which lacks a tensor, names it with its fused target; nobody generates from a half-updated engine."""
    for in_place in (True, False):
        errors = [seen.errors[f"lost, in place {in_place}"] for seen in found]
        assert [kind for kind, _ in errors] == ["UserError"] + ["SyncError"] * (len(found) - 1)
        assert " lacks its part " in errors[0][1]
        assert lost in errors[0][1]
        assert "ranks [0]" in errors[1][1]
        assert {seen.errors[f"then, in place {in_place}"][0] for seen in found} == {"NotReady"}


def reference(folder: Path, scale: float) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model
