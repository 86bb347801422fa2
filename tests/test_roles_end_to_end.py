"""PPO with every role on a grid of its own, from the configuration to the checkpoint, with real Megatron and vLLM."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end import configuration, records, run_in
from tests.workers import World


@pytest.fixture(scope="module")
def trained(world: World, tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    """The folder of a run of three steps on four ranks.

    The actor is TP2 × PP2 on all ranks, the critic one copy a rank, the reference TP2 on two of them and the reward
    model on the other two; in the first step only the critic learns.
    """
    folder = tmp_path_factory.mktemp("roles")
    one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    config = configuration(
        folder,
        tiny_model("qwen2", num_hidden_layers=2),
        actor={"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        critic={**one, "warmup_steps": 1},
        reference={**one, "ranks": "2-3", "tensor_parallel_size": 2, "update_every": 2, "ema": 0.5},
        reward_model={
            **one, "ranks": "0-1", "weight": 0.1,
            "path": str(tiny_model("qwen2", tied=False, num_hidden_layers=2, score=True)),
        },
        algorithm={
            "advantage": "gae", "lam": 0.95, "bootstrap_truncated": True, "mini_batches": 2, "kl_coef": 0.05,
            "kl_in": "reward", "kl_estimator": "k1", "kl_controller": "adaptive",
        },
        rollout={"n": 2, "tensor_parallel_size": 2},
        optimizer={"lr": 1e-5},
        trainer={"steps": 3, "prompts_per_step": 8, "save_every": 1, "keep": 0},
    )  # fmt: skip
    run_in(world, 4, "train", config)
    return folder


def test_each_role_does_its_part(trained: Path) -> None:
    start, first, second, third = records(trained / "run")
    assert start["step"] == 0
    for record in (first, second, third):
        assert record["critic/grad_norm"] > 0
        assert record["mismatch/log_prob_max"] < 1e-4 if "mismatch/log_prob_max" in record else record is first
        assert record["train/reward"] == pytest.approx(record["train/digits"] + 0.1 * record["train/reward_model"])
    assert not [name for name in first if name.startswith("actor/") and name != "actor/kl_coef"]
    for record in (second, third):
        assert record["actor/grad_norm"] > 0
        assert record["actor/first_ratio_error"] < 1e-5
    assert second["actor/kl"] < 1e-3 < 0.1  # far below the target, so that the coefficient falls
    assert third["actor/kl_coef"] == pytest.approx(0.05 * (1 - 0.2 * 16 / 10000))


def test_the_memory_and_time_of_each_phase_are_recorded(trained: Path) -> None:
    phases = {
        "generate", "predict/reward_model", "predict/reference", "predict/critic", "predict/actor", "update/critic",
        "update/actor", "sync",
    }  # fmt: skip
    last = records(trained / "run")[-1]
    for phase in phases:
        assert last[f"memory/{phase}_gib"] > 0
        assert last[f"time/{phase}"] >= 0


def test_a_resumed_run_repeats_the_unbroken_one(world: World, trained: Path, tmp_path: Path) -> None:
    """From before the actor's first update: critic, moving reference and coefficient go on as they were."""
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step_{step:06d}")
    run_in(world, 4, "train", trained / "config.yaml", f"trainer.output_dir={run}")
    unbroken, resumed = records(trained / "run"), records(run)
    assert [record["step"] for record in resumed] == [0, 1, 2, 3]
    measured = ("time/", "perf/", "memory/", "rollout/")
    for theirs, ours in zip(unbroken, resumed, strict=True):
        same = [name for name in theirs if not name.startswith(measured)]
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
