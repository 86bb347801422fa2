"""Gemma-3 and GLM in vLLM: written as its loader would, and of the trainer's opinion on what it samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rollout import ranks

World = Callable[..., Any]


def opinions(folder: Path, tensor: int) -> tuple[bool, float]:
    """Whether weights may be written in place, and the largest difference of log-probs to Megatron on as many ranks."""
    import torch

    from megatron_bridge.families import load_architecture
    from rlflow import parallel
    from rlflow.batch.batch import Batch
    from rlflow.roles import Engine

    parallel.initialize(60, 0)
    rollout = ranks.start(folder, tensor=tensor, prove=True)
    grid = parallel.Grid(tensor=tensor, timeout_seconds=60)
    actor = Engine(load_architecture(folder), grid, dtype=torch.float32, micro_batch_tokens=256)
    actor.load_hf(folder)
    rollout.sync(actor.layout, actor.parameters_by_name())
    prompts = ranks.prompts()
    mine = rollout.generate(prompts, n=2, temperature=1.0, step=0)
    everyone: list[Any] = [None] * tensor
    torch.distributed.all_gather_object(everyone, mine)
    numbers = {prompt.id: number for number, prompt in enumerate(prompts)}
    batch = Batch.from_samples([sample for part in everyone for sample in part], numbers)
    gap = (actor.log_probs(batch, 1.0) - batch.tokens["rollout_log_probs"]).abs().max().item()
    rollout.shutdown()
    return rollout._weights.in_place, gap


@pytest.mark.parametrize(
    ("family", "tied", "tensor", "in_place"),
    [
        ("gemma3_text", True, 2, True),
        ("glm4", False, 2, True),
        ("glm", True, 2, True),  # vLLM's generic model cuts the fused projection of gate and up straight through
    ],
)
def test_vllm_and_megatron_agree(
    world: World, tiny_model: Callable[..., Path], family: str, tied: bool, tensor: int, in_place: bool
) -> None:
    for found, gap in world(tensor, opinions, tiny_model(family, tied), tensor):
        assert found == in_place
        assert gap < 1e-3
