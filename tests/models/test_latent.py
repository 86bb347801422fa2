"""Latent attention and DeepSeek-V3's router: transformers' log-probs and choices, one process's gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.families import load_architecture
from tests.bridge.toys import toy_latent
from tests.roles import runs
from tests.roles.runs import Case
from tests.roles.samples import random_batch, reference_scores
from tests.roles.test_engine import GRADIENT_STEP, assert_same_change

SP = {"sequence_parallel": True}
ONE, PP2, EP2 = Case("one process", 1), Case("PP2", 2, {"pipeline": 2}), Case("EP2", 2, {"expert": 2})
TP2 = Case("TP2", 2, {"tensor": 2}, SP)
EP2_TP2 = Case("TP2 × EP2", 4, {"tensor": 2, "expert": 2}, SP)


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path]) -> list[Path]:
    """Compressed queries, YaRN, groups of experts; queries as they are, plain rotation, one group, a tied head."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    return [
        tiny_model("deepseek_v3", tied=False),
        tiny_model("deepseek_v3", tied=True, q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=plain),
    ]


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[Tensor]:
    return [reference_scores(folder, random_batch(), 0.9)[0] for folder in folders]


@pytest.mark.parametrize("case", [ONE, PP2, TP2, EP2, EP2_TP2], ids=lambda case: case.name)
def test_log_probs_are_those_of_transformers(
    world: Callable[..., Any], folders: list[Path], references: list[Tensor], case: Case
) -> None:
    for found in world(case.ranks, runs.log_probs, folders, case, 0.9):
        for log_probs, expected in zip(found, references, strict=True):
            assert (log_probs - expected).abs().max() < 1e-4


@pytest.mark.parametrize("case", [TP2, EP2_TP2], ids=lambda case: case.name)
def test_gradients_are_those_of_one_process(world: Callable[..., Any], folders: list[Path], case: Case) -> None:
    """The part of the keys that all heads share has the sum of their gradients, whichever ranks they are on."""
    for folder in folders:
        expected = world(1, runs.learn, folder, ONE, GRADIENT_STEP, 1, {})[0]
        assert_same_change(world(case.ranks, runs.learn, folder, case, GRADIENT_STEP, 1, {})[0], expected, 1e-4)


ONE_SEQUENCE = {"prompt_lengths": (40,), "responses": 1, "longest": 60}


def choices(folder: Path) -> list[Tensor]:
    """Of each layer with experts: which of them every token goes to, bool [T, experts]."""
    engine, found = runs.make_engine(folder, ONE), []
    for name, module in engine.chunks[0].named_modules():
        if name.endswith("mlp.router"):
            module.register_forward_hook(lambda _module, _input, output: found.append(output[1].bool()))
    engine.log_probs(random_batch(**ONE_SEQUENCE), 1.0)
    return found


def transformers_choices(folder: Path) -> list[Tensor]:
    """The same, int64 [T, experts chosen]."""
    from transformers import AutoModelForCausalLM

    model, batch = AutoModelForCausalLM.from_pretrained(folder), random_batch(**ONE_SEQUENCE)
    found: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _module, _input, output: found.append(output[2]))
    with torch.no_grad():
        model(torch.cat([batch.prompts.row(0), batch.responses.row(0)])[None, :-1])  # the last token predicts none
    return found


def test_every_token_goes_to_the_experts_that_transformers_chooses(
    world: Callable[..., Any], folders: list[Path]
) -> None:
    for folder in folders:
        expected, found = transformers_choices(folder), world(1, choices, folder)[0]
        assert len(found) == 3
        for mine, chosen in zip(found, expected, strict=True):
            assert torch.equal(mine, torch.zeros_like(mine).scatter_(1, chosen, True))
            assert len(mine.unique(dim=0)) > 10  # not every token the same


def test_the_rotated_part_gives_the_head_size_of_rotations() -> None:
    arch = load_architecture(toy_latent().hf_config)
    assert (arch.head_dim, arch.rotary_dim, arch.rotary_interleaved) == (2, 2, True)
