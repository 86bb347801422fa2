"""A family's tiny random model gives transformers' log-probs and one process's gradients on every kind of grid."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.roles import runs
from tests.roles.runs import Case
from tests.roles.samples import random_batch, reference_scores
from tests.roles.test_engine import GRADIENT_STEP, assert_same_change

SP = {"sequence_parallel": True}
ONE = Case("one process", 1)
TP2 = Case("TP2", 2, {"tensor": 2})
PP2 = Case("PP2", 2, {"pipeline": 2})
TP2_SP = Case("TP2 with sequence parallelism", 2, {"tensor": 2}, SP)
EP2 = Case("EP2", 2, {"expert": 2})
TP2_EP2 = Case("TP2, experts EP2", 2, {"tensor": 2, "expert": 2, "expert_tensor": 1}, SP)
EP2_TP2 = Case("EP2 × ETP2", 4, {"tensor": 2, "expert": 2}, SP)
EP2_PP2 = Case("EP2 × PP2, recomputed", 4, {"pipeline": 2, "expert": 2}, {"recompute": "full"})
TP4 = Case("TP4", 4, {"tensor": 4})
TP2_ETP1 = Case("TP2, experts whole", 2, {"tensor": 2, "expert_tensor": 1}, SP | {"overlap": False})

DENSE = [("qwen3", {"tied": True}), ("gemma3_text", {"tied": True}), ("glm4", {"tied": False}), ("glm", {"tied": True})]
FEW_KV_HEADS = [("qwen3", {"tied": True}), ("qwen2", {"tied": True, "num_key_value_heads": 1})]  # 48 rows of 32 a rank
EXPERTS = [
    ("qwen3_moe", {"tied": False, "norm_topk_prob": False}),
    ("qwen3_moe", {"tied": True, "norm_topk_prob": True}),
    ("mixtral", {"tied": False}),
]


@pytest.mark.parametrize(
    ("models", "cases"),
    [(DENSE, [ONE, TP2, PP2, TP2_SP]), (EXPERTS, [ONE, PP2, TP2_SP, EP2, TP2_EP2, EP2_TP2]), (FEW_KV_HEADS, [TP4])],
    ids=["dense", "experts", "few KV heads"],
)
def test_log_probs_are_those_of_transformers(
    world: Callable[..., Any], tiny_model: Callable[..., Path], models: list[Any], cases: list[Case]
) -> None:
    folders = [tiny_model(family, **overrides) for family, overrides in models]
    references = [reference_scores(folder, random_batch(), 0.9)[0] for folder in folders]
    for case in cases:
        for found in world(case.ranks, runs.log_probs, folders, case, 0.9):
            for folder, log_probs, expected in zip(folders, found, references, strict=True):
                assert (log_probs - expected).abs().max() < 1e-4, (case.name, folder)


@pytest.mark.parametrize(
    ("model", "cases"),
    [
        (("qwen3", {"tied": True}), [TP2, TP2_SP, TP4]),
        (("qwen3_moe", {"tied": True, "norm_topk_prob": True}), [EP2, EP2_TP2, EP2_PP2, TP2_ETP1]),
    ],
    ids=["dense", "experts"],
)
def test_gradients_are_those_of_one_process(
    world: Callable[..., Any], tiny_model: Callable[..., Path], model: Any, cases: list[Case]
) -> None:
    folder = tiny_model(model[0], **model[1])
    expected = world(1, runs.learn, folder, ONE, GRADIENT_STEP, 1, {})[0]
    for case in cases:
        found = world(case.ranks, runs.learn, folder, case, GRADIENT_STEP, 1, {})[0]
        assert_same_change(found, expected, 1e-5)
        assert found.metrics[0]["engine/grad_norm"] == pytest.approx(expected.metrics[0]["engine/grad_norm"], rel=1e-5)
