"""What the layers that some families have of their own pass back: the gradients of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.roles import runs
from tests.roles.runs import Case
from tests.roles.samples import random_batch
from tests.roles.test_engine import GRADIENT_STEP

ONE = Case("one process", 1)
TP2_SP = Case("TP2 with sequence parallelism", 2, {"tensor": 2}, {"sequence_parallel": True})


def gradients(folder: Path) -> dict[str, Tensor]:
    """Of −Σ weight · advantage · log-prob over the random batch's unmasked tokens, at the temperature of `learn`."""
    from transformers import AutoModelForCausalLM

    model, batch = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), random_batch()
    factors = (batch.tokens["weights"] * batch.tokens["advantages"] * batch.tokens["mask"]).split(
        batch.responses.lengths.tolist()
    )
    for sample, prompt in enumerate(batch.prompt_of.tolist()):
        response = batch.responses.row(sample)
        ids = torch.cat([batch.prompts.row(prompt), response])
        logits = model(ids[None]).logits[0, len(ids) - len(response) - 1 : -1]
        log_probs = torch.log_softmax(logits / 0.8, -1).gather(1, response[:, None])[:, 0]
        (-factors[sample] * log_probs).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("family", "tied"), [("gemma3_text", True), ("glm4", False)])
def test_gradients_are_those_of_transformers(
    world: Callable[..., Any], tiny_model: Callable[..., Path], family: str, tied: bool
) -> None:
    folder = tiny_model(family, tied)
    expected = gradients(folder)
    for case in (ONE, TP2_SP):
        found = world(case.ranks, runs.learn, folder, case, GRADIENT_STEP, 1, {})[0]
        assert found.before.keys() == expected.keys()
        for name, gradient in expected.items():
            change = found.after[name] - found.before[name]
            assert (change + gradient).abs().max() <= 1e-4 * gradient.abs().max(), (case.name, name)
