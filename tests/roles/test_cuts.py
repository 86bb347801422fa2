"""However samples are dealt to replicas and cut into micro-batches, an optimizer step is the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.roles.parity import GRADIENT, MODEL, ONE, SP, TEMPERATURE, Row, matrix_batch
from tests.roles.runs import Case

World = Callable[..., Any]

DP2 = Case("DP2", 2)
DP4 = Case("DP4", 4)
VP2 = Case("PP2 × VP2", 2, {"pipeline": 2}, {"virtual_pipeline": 2})
CP2 = Case("CP2", 2, {"context": 2})
CP2_TP2 = Case("CP2 × TP2 × SP", 4, {"context": 2, "tensor": 2}, SP)
VP2_DP2 = Case("PP2 × VP2 × DP2", 4, {"pipeline": 2}, {"virtual_pipeline": 2})
CP2_DP2 = Case("CP2 × DP2, cp the slower", 4, {"context": 2, "order": "tp-dp-cp-ep-pp"})

# Rows at most: all samples at once, some, nearly each alone, each alone. Of the first, replicas behind virtual stages
# have one group of samples for a round of two micro-batches: the second is empty.
BUDGETS = (10_000, 60, 35, 1)


class Step(NamedTuple):
    loss: float
    grad_norm: float
    forwards: int  # of this rank; 0 where it has no loss
    micro_batches: float  # as the metrics tell


def objective() -> Any:
    """One that depends on every log-prob and entropy."""
    from rlflow.algorithms import PolicyObjective

    return PolicyObjective(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.1)


def step(engine: Any, batch: Any) -> Step:
    forwards: list[int] = []

    def counted(log_probs: Tensor, entropy: Tensor | None, fields: Any) -> Any:
        forwards.append(len(log_probs))
        return objective()(log_probs, entropy, fields)

    found = engine.train_step(batch, counted, temperature=TEMPERATURE, lr=0.0, with_entropy=True)
    told = engine.tell([found])[0]
    return Step(told["loss"], told["engine/grad_norm"], len(forwards), told["engine/micro_batches"])


def cut(folder: Path, case: Case) -> list[Step]:
    """A step on the whole batch under each budget."""
    row = Row(folder, case)
    engine = row.engine(GRADIENT)
    steps = []
    for budget in BUDGETS:
        engine.micro_batch_tokens = budget
        steps.append(step(engine, row.own))
    return steps


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("qwen2", tied=True, **MODEL)


@pytest.fixture(scope="module")
def whole(world: World, folder: Path) -> Step:
    """One process, one micro-batch."""
    return world(1, cut, folder, ONE)[0][0]


@pytest.mark.parametrize("case", [ONE, DP2, DP4, VP2, CP2, CP2_TP2, VP2_DP2], ids=lambda case: case.name)
def test_a_cut_changes_nothing(world: World, folder: Path, whole: Step, case: Case) -> None:
    """cases.md B09, B10, B11."""
    for steps in world(case.ranks, cut, folder, case):
        for found in steps:
            assert found.loss == pytest.approx(whole.loss, abs=1e-6)
            assert found.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
            assert found.forwards in (0, found.micro_batches)  # the same number on every replica
            assert found.micro_batches % case.grid.get("pipeline", 1) == 0


def idle(folder: Path, case: Case) -> tuple[list[Step], int, list[int]]:
    """A step for which one replica alone has samples, one for which none has, and what is scored of the former."""
    row, batch = Row(folder, case), matrix_batch()
    nothing = batch.select([])
    own = batch if row.grid.replica(row.grid.rank) == 0 else nothing
    engine, critic = row.engine(GRADIENT), row.engine(GRADIENT, head="score")
    steps = [step(engine, part) for part in (own, nothing)]
    values = critic.values(own)
    assert torch.cat(values).isfinite().all()
    return steps, len(engine.log_probs(own, TEMPERATURE)) - len(own.responses.values), [len(part) for part in values]


@pytest.mark.parametrize("case", [DP2, VP2_DP2, CP2_DP2], ids=lambda case: case.name)
def test_a_replica_without_samples_takes_part(world: World, folder: Path, whole: Step, case: Case) -> None:
    """cases.md B02."""
    batch = matrix_batch()
    for (some, none), unscored, values in world(case.ranks, idle, folder, case):
        assert some.loss == pytest.approx(whole.loss, abs=1e-6)
        assert some.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        assert none.loss == none.grad_norm == unscored == 0
        assert values in ([0, 0], [len(batch.responses.values), len(batch)])
