"""A checkpoint holds all that training depends on: the next step is that of the run that was never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers import World

LAYOUTS = [  # ranks and grid that write, ranks and grid that go on
    (1, {}, 1, {}),
    (2, {"tensor": 2}, 2, {"tensor": 2}),
    (1, {}, 2, {"tensor": 2}),
    (2, {"pipeline": 2}, 2, {}),
    (2, {}, 2, {"pipeline": 2}),
]


def _batch(seed: int, grid: Any) -> Any:
    """This replica's share of four samples, with random advantages and weights."""
    from rlflow.batch import Batch, Ragged

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 400, (4, 12), generator=generator)
    weights = torch.full((4 * 7,), 1 / (4 * 7))
    batch = Batch(
        prompts=Ragged(ids[:, :5].flatten(), torch.full((4,), 5)),
        responses=Ragged(ids[:, 5:].flatten(), torch.full((4,), 7)),
        prompt_of=torch.arange(4),
        samples={"group": torch.arange(4)},
        tokens={
            "mask": torch.ones(28, dtype=torch.bool),
            "advantages": torch.randn(28, generator=generator),
            "weights": weights,
        },
    )
    return batch.select(list(range(4))[grid.replica(grid.rank) :: grid.dp])


def _engine(model: Path, grid: dict[str, int], dtype: torch.dtype) -> Any:
    from megatron_bridge.families import load_architecture
    from rlflow import parallel
    from rlflow.config.schema import Optimizer
    from rlflow.roles import Engine

    parallel.initialize(60, 0)
    engine = Engine(
        load_architecture(model),
        parallel.Grid(**grid, timeout_seconds=60),
        dtype=dtype,
        micro_batch_tokens=64,
        optimizer=Optimizer(lr=1e-2),
    )
    engine.load_hf(model)
    return engine


def _step(engine: Any, number: int) -> dict[str, float]:
    from rlflow.algorithms import PolicyObjective

    return engine.train_step(_batch(number, engine.grid), PolicyObjective(), temperature=1.0, lr=1e-2)


def _train_and_save(model: Path, grid: dict[str, int], root: Path, dtype: torch.dtype) -> dict[str, float]:
    """Two steps, a checkpoint, and the metrics of the third step of the run that goes on."""
    from rlflow.checkpoint import Checkpoints, State

    engine = _engine(model, grid, dtype)
    for number in range(2):
        _step(engine, number)
    Checkpoints(root, keep=2).save(engine, State(step=2, updates=2, loader={"position": 8}))
    return _step(engine, 2)


def _load_and_train(model: Path, grid: dict[str, int], root: Path, dtype: torch.dtype) -> tuple[Any, dict[str, float]]:
    from rlflow.checkpoint import Checkpoints

    engine = _engine(model, grid, dtype)
    checkpoints = Checkpoints(root, keep=2)
    folder = checkpoints.find("auto")
    assert folder is not None
    state = checkpoints.load(engine, folder)
    return state, _step(engine, 2)


@pytest.mark.parametrize(("ranks", "grid", "later_ranks", "later_grid"), LAYOUTS)
def test_the_next_step_is_that_of_the_unbroken_run(  # cases.md F10
    world: World, tiny_model: Any, tmp_path: Path, ranks: int, grid: Any, later_ranks: int, later_grid: Any
) -> None:
    model = tiny_model("qwen2")
    unbroken = world(ranks, _train_and_save, model, grid, tmp_path, torch.float32)[0]
    state, resumed = world(later_ranks, _load_and_train, model, later_grid, tmp_path, torch.float32)[0]
    assert (state.step, state.updates, state.loader) == (2, 2, {"position": 8})
    tolerance = 0.0 if (ranks, grid) == (later_ranks, later_grid) else 1e-5
    for name in ("loss", "actor/grad_norm"):
        assert resumed[name] == pytest.approx(unbroken[name], rel=tolerance, abs=tolerance)


def test_experts_are_resumed_where_they_now_lie(world: World, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[])
    unbroken = world(2, _train_and_save, model, {"expert": 2}, tmp_path, torch.float32)[0]
    for grid in ({"expert": 2}, {"expert": 1}, {"pipeline": 2}):
        _, resumed = world(2, _load_and_train, model, grid, tmp_path, torch.float32)[0]
        for name in ("loss", "actor/grad_norm"):
            assert resumed[name] == pytest.approx(unbroken[name], rel=1e-5, abs=1e-5)


def test_bfloat16_keeps_its_float32_main_parameters(world: World, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    unbroken = world(1, _train_and_save, model, {}, tmp_path, torch.bfloat16)[0]
    _, resumed = world(1, _load_and_train, model, {}, tmp_path, torch.bfloat16)[0]
    assert resumed == unbroken


def test_never_means_a_fresh_start_and_a_folder_must_be_complete(world: World, tmp_path: Path) -> None:
    world(1, _find_faults, tmp_path)


def _find_faults(root: Path) -> None:
    from rlflow.checkpoint import Checkpoints
    from rlflow.errors import UserError

    checkpoints = Checkpoints(root, keep=2)
    assert checkpoints.find("never") is None
    assert checkpoints.find("auto") is None
    (root / "step_000003").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoints.find(str(root / "step_000003"))
