"""Context-parallel ranks compute what one process does, whatever the attention; more grids are in `test_parity`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.roles.runs import Case, canonical, make_engine
from tests.roles.samples import random_batch

ONE = Case("one process", 1, {}, {"share_prompts": False})
CP2 = Case("CP2", 2, {"context": 2}, {"recompute": "selective"})
CP4 = Case("CP4", 4, {"context": 4})
CP2_TP2 = Case("CP2 × TP2", 4, {"context": 2, "tensor": 2}, {"sequence_parallel": True})
CP2_PP2 = Case("CP2 × PP2", 4, {"context": 2, "pipeline": 2})
CP2_DP2 = Case("CP2 × DP2, cp the slower", 4, {"context": 2, "order": "tp-dp-cp-ep-pp"})

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", {"tied": True}),
    "windows": ("gemma3_text", {"tied": True}),
    "latents and experts": ("deepseek_v3", {"tied": False}),
    "values": ("qwen3", {"tied": False, "score": True}),
}
GRADIENT_STEP = {"lr": 1e7, "eps": 1e4, "weight_decay": 0.0, "clip_grad": 0.0}
"""AdamW whose first step is lr / eps · g: a thousand gradients, so that the rounding of the weights does not show."""

TEMPERATURE = 20.0
"""Brings the test models' logits from near ±100 to the size of a trained one's, where float32 is exact enough."""


@dataclass
class Seen:
    """What a rank sees of a model: of all response tokens, and of an optimizer step on them."""

    scores: Tensor  # log-probs or values, and the values at the last tokens
    metrics: dict[str, float]
    gradient: dict[str, Tensor]  # canonical tensors, on rank 0


def see(folder: Path, case: Case) -> Seen:
    from rlflow.algorithms import PolicyObjective, ValueObjective
    from rlflow.config.schema import Optimizer

    engine, batch = make_engine(folder, case, Optimizer(**GRADIENT_STEP)), random_batch()
    is_policy = engine.architecture.head == "lm"
    scores = engine.log_probs(batch, TEMPERATURE) if is_policy else torch.cat(engine.values(batch))
    batch.tokens["returns"] = batch.tokens["advantages"]
    batch.tokens["old_values"] = torch.zeros_like(batch.tokens["returns"])
    own = batch.select(list(range(engine.grid.replica(engine.grid.rank), len(batch), engine.grid.dp)))
    objective: Any = PolicyObjective(entropy_coef=0.01) if is_policy else ValueObjective()
    before = canonical(engine)
    metrics = engine.train_step(own, objective, lr=GRADIENT_STEP["lr"], temperature=TEMPERATURE, with_entropy=is_policy)
    after = canonical(engine)
    return Seen(scores, engine.tell([metrics])[0], {name: after[name] - before[name] for name in after})


@pytest.fixture(scope="module")
def single(world: Callable[..., Any], tiny_model: Callable[..., Path]) -> Callable[[str], tuple[Path, Seen]]:
    """A model and what one process sees of it."""
    known: dict[str, tuple[Path, Seen]] = {}

    def look(model: str) -> tuple[Path, Seen]:
        if model not in known:
            family, options = MODELS[model]
            folder = tiny_model(family, **options)
            known[model] = folder, world(1, see, folder, ONE)[0]
        return known[model]

    return look


def distance(found: Tensor, expected: Tensor) -> float:
    """Greatest difference over the greatest value, which may be zero."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize(
    ("model", "case"),
    [
        *((model, case) for model in MODELS for case in (CP2, CP2_TP2) if (model, case) != ("dense", CP2_TP2)),
        ("dense", CP4),
        ("values", CP2_PP2),
        ("dense", CP2_DP2),
    ],
    ids=lambda given: given.name if isinstance(given, Case) else given,
)
def test_context_parallel_ranks_see_what_one_process_sees(
    world: Callable[..., Any], single: Callable[[str], tuple[Path, Seen]], model: str, case: Case
) -> None:
    """cases.md B10: with CP2 the tokens count once."""
    folder, expected = single(model)
    ranks = world(case.ranks, see, folder, case)
    for found in ranks:
        assert distance(found.scores, expected.scores) < 1e-5
        for name in ("loss", "tokens"):
            assert found.metrics[name] == pytest.approx(expected.metrics[name], rel=1e-5, abs=1e-7)
        assert found.metrics["engine/grad_norm"] == pytest.approx(expected.metrics["engine/grad_norm"], rel=1e-5)
    for name, gradient in expected.gradient.items():
        assert distance(ranks[0].gradient[name], gradient) < 1e-5, name


def in_bfloat16(folder: Path, case: Case) -> tuple[Tensor, dict[str, float]]:
    """Log-probs, and the metrics of an optimizer step."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    engine = make_engine(folder, replace(case, options=case.options | {"dtype": torch.bfloat16}), Optimizer())
    scores = engine.log_probs(random_batch(), TEMPERATURE)
    metrics = engine.train_step(random_batch(), PolicyObjective(), lr=1e-6, temperature=TEMPERATURE)
    return scores, engine.tell([metrics])[0]


def test_bfloat16_is_as_near_float32_as_on_one_rank(
    world: Callable[..., Any], single: Callable[[str], tuple[Path, Seen]]
) -> None:
    folder, exact = single("dense")
    (one, one_metrics), (two, two_metrics) = (world(case.ranks, in_bfloat16, folder, case)[0] for case in (ONE, CP2))
    assert (two - exact.scores).abs().mean() < 1.5 * (one - exact.scores).abs().mean()
    assert two_metrics["engine/grad_norm"] == pytest.approx(one_metrics["engine/grad_norm"], rel=0.05)
