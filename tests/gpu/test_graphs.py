"""Micro-batches replayed as CUDA graphs say and learn what computing them one kernel after the other does."""

from functools import partial
from pathlib import Path

import pytest
import torch

from rlflow.algorithms import PolicyObjective, ValueObjective
from rlflow.config.schema import Optimizer
from rlflow.roles.graphs import WARM_UP
from tests.gpu import ranks
from tests.gpu.devices import SPECS, needs_gpus
from tests.workers import World

pytestmark = needs_gpus(1)
two_gpus = needs_gpus(2)[1]


def repeat(folder: Path, transformer_engine: bool, policy_loss: str) -> tuple[list[torch.Tensor], list[dict]]:
    """Log-probs and steps of rate 0 on one batch: first as kernels come, then captured, then replayed."""
    batch = ranks.long_batch()
    engine = ranks.make_engine(
        folder, torch.bfloat16, optimizer=Optimizer(lr=0.0), transformer_engine=transformer_engine, cuda_graphs=True
    )
    times = WARM_UP + 2
    scores = [engine.log_probs(batch, ranks.TEMPERATURE).cpu() for _ in range(times)]
    objective = PolicyObjective(policy_loss=policy_loss)
    steps = [engine.train_step(batch, objective, temperature=ranks.TEMPERATURE, lr=0.0) for _ in range(times)]
    return scores, steps


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo"])
@pytest.mark.parametrize("transformer_engine", SPECS)
def test_replays_repeat_what_was_captured(gpus: World, qwen: Path, transformer_engine: bool, policy_loss: str) -> None:
    scores, steps = gpus(1, repeat, qwen, transformer_engine, policy_loss)[0]
    gaps = [(later - scores[0]).abs() for later in scores[1:]]
    print(
        "graphs:", [(gap.mean().item(), gap.max().item()) for gap in gaps], [step["engine/grad_norm"] for step in steps]
    )
    assert max(gap.mean() for gap in gaps) < 2e-3
    assert max(gap.max() for gap in gaps) < 0.1
    for step in steps[1:]:
        assert step["tokens"] == steps[0]["tokens"]
        assert step["loss"] == pytest.approx(steps[0]["loss"], abs=1e-4)
        assert step["engine/grad_norm"] == pytest.approx(steps[0]["engine/grad_norm"], rel=5e-3)


@pytest.mark.parametrize("transformer_engine", SPECS)
def test_graphs_learn_as_kernels_do(gpus: World, qwen: Path, transformer_engine: bool) -> None:
    batch = ranks.long_batch()
    learn = partial(ranks.learn, transformer_engine=transformer_engine, share_prompts=False)
    (plain,) = gpus(1, learn, qwen, torch.bfloat16, batch, 6)
    (graphs,) = gpus(1, partial(learn, cuda_graphs=True), qwen, torch.bfloat16, batch, 6)
    print("losses:", [step["loss"] for step in plain.metrics], [step["loss"] for step in graphs.metrics])
    for one, other in zip(plain.metrics, graphs.metrics, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=5e-3)
        assert other["engine/grad_norm"] == pytest.approx(one["engine/grad_norm"], rel=0.05)
    assert graphs.after == pytest.approx(plain.after, rel=0.05)


@two_gpus
@pytest.mark.parametrize("grid", [{}, {"tensor": 2}], ids=["DP2", "TP2"])
def test_graphs_over_two_ranks(gpus: World, qwen: Path, grid: dict[str, int]) -> None:
    batch, learn = ranks.long_batch(), partial(ranks.learn, share_prompts=False, grid=grid)
    plain = gpus(2, learn, qwen, torch.bfloat16, batch, 4)[0]
    graphs = gpus(2, partial(learn, cuda_graphs=True), qwen, torch.bfloat16, batch, 4)[0]
    for one, other in zip(plain.metrics, graphs.metrics, strict=True):
        assert other["engine/grad_norm"] == pytest.approx(one["engine/grad_norm"], rel=0.05)
    assert graphs.after == pytest.approx(plain.after, rel=0.05)


def critic_values(folder: Path) -> list[torch.Tensor]:
    """Values of a critic, whose samples have a last one each, and what it learns in a step between."""
    batch = ranks.long_batch()
    tokens = len(batch.responses.values)
    batch.tokens |= {"returns": torch.ones(tokens), "old_values": torch.zeros(tokens)}
    found = []
    engine = ranks.make_critic(folder, torch.bfloat16, optimizer=Optimizer(lr=1e-4), cuda_graphs=True)
    for _ in range(WARM_UP + 2):
        values = engine.values(batch)
        found.append(torch.cat([values.tokens, values.last]).cpu())
    for _ in range(WARM_UP + 2):
        engine.train_step(batch, ValueObjective(), lr=1e-4)
    found.append(engine.values(batch).tokens.cpu())
    return found


def test_a_critic_has_graphs_too(gpus: World, qwen: Path) -> None:
    *before, after = gpus(1, critic_values, qwen)[0]
    for later in before[1:]:
        assert (later - before[0]).abs().max() < 0.05
    assert after.mean() > before[0].mean() + 0.01
