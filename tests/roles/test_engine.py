"""An engine gives transformers' log-probs, one process's gradients over several steps, and precise failures.

Every parallelism is compared with one process in `test_parity`, every cut into micro-batches in `test_cuts`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_rope import LLAMA3
from tests.roles import runs
from tests.roles.runs import Case
from tests.roles.samples import random_batch, reference_scores

MakeModel = Callable[..., Path]
World = Callable[..., Any]

ONE = Case("one process", 1)
PACKED = Case("prompts repeated", 1, {}, {"share_prompts": False})
PP2 = Case("PP2", 2, {"pipeline": 2})
DP2 = Case("DP2 with overlap", 2)
TP2_ACROSS = Case("TP2 across neighbours of DP2", 4, {"ranks": [0, 2, 1, 3], "tensor": 2})
TP2_PP2 = Case("TP2 × PP2", 4, {"tensor": 2, "pipeline": 2})
VP2_DP2 = Case("PP2 × VP2 × DP2", 4, {"pipeline": 2}, {"virtual_pipeline": 2})

GRADIENT_STEP = {"lr": 1e4, "eps": 1e4, "weight_decay": 0.0, "clip_grad": 0.0}
"""AdamW whose first step is the gradient itself, in float32: lr · g / (|g| + eps)."""


def names(case: Any) -> str:
    return case.name if isinstance(case, Case) else str(case)


@pytest.fixture(scope="session")
def models(tiny_model: MakeModel) -> list[Path]:
    scaled = {"rope_scaling": LLAMA3, "rope_theta": 500000.0}
    return [
        tiny_model("llama", tied=True, num_hidden_layers=5),  # uneven pipeline stages
        tiny_model("llama", tied=False, **scaled),
        tiny_model("qwen2", tied=True),
        tiny_model("qwen2", tied=False),
    ]


@pytest.fixture(scope="session")
def references(models: list[Path]) -> list[Tensor]:
    return [reference_scores(folder, random_batch(), 0.9)[0] for folder in models]


@pytest.mark.parametrize("case", [ONE, PACKED, TP2_PP2], ids=names)
def test_log_probs_are_those_of_transformers(
    world: World, models: list[Path], references: list[Tensor], case: Case
) -> None:
    for found in world(case.ranks, runs.log_probs, models, case, 0.9):
        for log_probs, expected in zip(found, references, strict=True):
            assert (log_probs - expected).abs().max() < 1e-4


@pytest.fixture(scope="session")
def single(world: World, models: list[Path]) -> Callable[[int, dict[str, Any], int, dict[str, Any]], runs.Learned]:
    """What one process learns, by model and settings, computed once."""
    known: dict[str, runs.Learned] = {}

    def learn(model: int, settings: dict[str, Any], steps: int, objective: dict[str, Any]) -> runs.Learned:
        key = repr((model, settings, steps, objective))
        if key not in known:
            known[key] = world(1, runs.learn, models[model], ONE, settings, steps, objective)[0]
        return known[key]

    return learn


def assert_same_change(found: runs.Learned, expected: runs.Learned, tolerance: float) -> None:
    for name, before in expected.before.items():
        change, expected_change = found.after[name] - found.before[name], expected.after[name] - before
        assert (change - expected_change).abs().max() <= tolerance * expected_change.abs().max(), name


@pytest.mark.parametrize("case", [TP2_ACROSS, TP2_PP2], ids=names)
def test_gradients_are_those_of_one_process(world: World, models: list[Path], single: Any, case: Case) -> None:
    objective = {"entropy_coef": 0.01}
    for model in (0, 3):  # tied (cases.md A05) and untied, without and with biases, uneven and even stages
        expected = single(model, GRADIENT_STEP, 1, objective)
        ranks = world(case.ranks, runs.learn, models[model], case, GRADIENT_STEP, 1, objective)
        assert_same_change(ranks[0], expected, 1e-5)
        assert ranks[0].metrics[0]["loss"] == pytest.approx(expected.metrics[0]["loss"], abs=1e-6)
        assert all(rank.metrics == ranks[0].metrics for rank in ranks)


@pytest.mark.parametrize("case", [ONE, DP2, TP2_PP2, VP2_DP2], ids=names)
def test_gradients_known_with_the_log_probs_are_those_of_the_backward_pass(
    world: World, models: list[Path], case: Case
) -> None:
    """To the last bit, with chunks of 7 tokens; bfloat16 for the products that add to float32."""
    options = {**case.options, "logprob_chunk_tokens": 7, "dtype": torch.bfloat16}
    found = world(case.ranks, runs.learn_both_ways, models[2], Case(case.name, case.ranks, case.grid, options))
    (at_once, weights), (late, expected) = found[0]
    assert at_once == late
    assert at_once[0]["engine/grad_norm"] > 0
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("case", [DP2, VP2_DP2], ids=names)
def test_several_clipped_steps_are_those_of_one_process(
    world: World, models: list[Path], single: Any, case: Case
) -> None:
    settings = {"lr": 1e-2, "eps": 1e-2, "clip_grad": 0.5, "weight_decay": 0.1}
    expected = single(2, settings, 3, {})
    found = world(case.ranks, runs.learn, models[2], case, settings, 3, {})[0]
    for mine, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert mine["engine/grad_norm"] == pytest.approx(theirs["engine/grad_norm"], rel=1e-4)
    assert_same_change(found, expected, 1e-3)


def test_an_engine_leaves_nothing_behind(world: World, models: list[Path]) -> None:
    """Its process groups have threads, which go with the last that holds the groups."""
    first, *later = (world(1, runs.threads_after_an_engine, models[2])[0] for _ in range(3))
    assert later == [first, first]


def test_nan_outside_the_mask_reaches_nothing(world: World, models: list[Path]) -> None:  # cases.md B01
    clean, holed = world(1, runs.with_nan_outside_the_mask, models[2])[0]
    assert holed == clean


def test_a_gradient_that_is_not_finite_ends_the_run(world: World, models: list[Path]) -> None:
    (message,) = world(1, runs.with_an_infinite_advantage, models[2])
    assert message.startswith("the gradient's norm is ")


def test_the_first_update_is_on_policy(world: World, models: list[Path]) -> None:
    assert world(1, runs.with_nan_outside_the_mask, models[2])[0][0]["ratio_error_max"] < 1e-5


def test_ranks_outside_the_grid_hold_nothing(world: World, models: list[Path]) -> None:
    first, outsider, last = world(3, runs.outside, models[2], Case("", 3, {"ranks": [0, 2], "pipeline": 2}))
    assert outsider[2] == 0
    assert len(outsider[0]) == 0
    assert torch.equal(first[0], last[0])
    assert first[1] == outsider[1] == last[1]


@pytest.mark.parametrize("case", [ONE, PP2], ids=names)
def test_names_are_those_of_the_layout(world: World, models: list[Path], case: Case) -> None:
    stages = world(case.ranks, runs.names_of, models[0], case)
    assert sum("embedding" in name for stage in stages for name in stage) == 1
    assert sum(name == "output_layer.weight" for stage in stages for name in stage) == case.ranks - 1
    assert sum("linear_fc2" in name for stage in stages for name in stage) == 5


def test_bfloat16_stays_near(world: World, models: list[Path], references: list[Tensor]) -> None:
    case = Case("", 2, {"pipeline": 2}, {"dtype": torch.bfloat16})
    found = world(2, runs.log_probs, models, case, 0.9)[0]
    for log_probs, expected in zip(found, references, strict=True):
        assert (log_probs - expected).abs().mean() < 0.3  # logits here are near ±100, where bfloat16 has steps of .5


def test_bfloat16_learns_with_float32_parameters(world: World, models: list[Path]) -> None:
    """Steps of 2e-4 add up, though bfloat16 has nothing between 1 and 1.0078."""
    case = Case("", 1, {}, {"dtype": torch.bfloat16})
    settings = {"lr": 2e-4, "weight_decay": 0.0}
    learned = world(1, runs.learn, models[0], case, settings, 30, {})[0]
    change = learned.after["model.norm.weight"] - learned.before["model.norm.weight"]
    assert change.abs().max() > 1e-3
