"""A checkpoint holds all that training depends on: the next step is that of the run that was never stopped."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.workers import World

LAYOUTS = [  # ranks and grid that write, ranks and grid that go on
    (1, {}, 1, {}),
    (2, {"tensor": 2}, 2, {"tensor": 2}),
    (1, {}, 2, {"tensor": 2}),
    (2, {"pipeline": 2}, 2, {}),
    (2, {}, 2, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual": 2}, 1, {}),
    (1, {}, 2, {"pipeline": 2, "virtual": 2}),
    (2, {"context": 2}, 2, {}),
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
            "returns": torch.randn(28, generator=generator),
            "old_values": torch.randn(28, generator=generator),
        },
    )
    return batch.select(list(range(4))[grid.replica(grid.rank) :: grid.dp] if grid.is_member else [])


def _engine(model: Path, grid: dict[str, Any], dtype: torch.dtype, *, trained: bool = True) -> Any:
    """An engine on a grid, which may name the number of virtual pipeline stages too."""
    from megatron_bridge.families import load_architecture
    from rlflow import parallel
    from rlflow.config.schema import Optimizer
    from rlflow.roles import Engine

    parallel.initialize(60, 0)
    engine = Engine(
        load_architecture(model),
        parallel.Grid(**{key: size for key, size in grid.items() if key != "virtual"}, timeout_seconds=60),
        dtype=dtype,
        micro_batch_tokens=64,
        virtual_pipeline=grid.get("virtual", 1),
        optimizer=Optimizer(lr=1e-2) if trained else None,
    )
    engine.load_hf(model)
    return engine


def _step(engine: Any, number: int) -> dict[str, float]:
    from rlflow.algorithms import PolicyObjective, ValueObjective

    objective: Any = PolicyObjective() if engine.architecture.head == "lm" else ValueObjective()
    return engine.train_step(_batch(number, engine.grid), objective, lr=1e-2)


def _train_and_save(model: Path, grid: dict[str, int], root: Path, dtype: torch.dtype) -> dict[str, float]:
    """Two steps, a checkpoint, and the metrics of the third step of the run that goes on."""
    from rlflow.checkpoint import Checkpoints, State

    engine = _engine(model, grid, dtype)
    for number in range(2):
        _step(engine, number)
    state = State(step=2, updates={"actor": 2}, loader={"position": 8}, kl_coef=0.05, lengths={"mean": 7.5})
    Checkpoints(root, keep=2).save({"actor": engine}, state)
    return _step(engine, 2)


def _load_and_train(model: Path, grid: dict[str, int], root: Path, dtype: torch.dtype) -> tuple[Any, dict[str, float]]:
    from rlflow.checkpoint import Checkpoints

    engine = _engine(model, grid, dtype)
    checkpoints = Checkpoints(root, keep=2)
    folder = checkpoints.find("auto")
    assert folder is not None
    state = checkpoints.load({"actor": engine}, folder)
    return state, _step(engine, 2)


def _told(metrics: Iterable[dict[str, float]]) -> dict[str, float]:
    """The metrics of the one rank of a grid that has them."""
    (found,) = (each for each in metrics if each)
    return found


@pytest.mark.parametrize(("ranks", "grid", "later_ranks", "later_grid"), LAYOUTS)
def test_the_next_step_is_that_of_the_unbroken_run(  # cases.md F10
    world: World, tiny_model: Any, tmp_path: Path, ranks: int, grid: Any, later_ranks: int, later_grid: Any
) -> None:
    model = tiny_model("qwen2", num_hidden_layers=4)
    unbroken = _told(world(ranks, _train_and_save, model, grid, tmp_path, torch.float32))
    found = world(later_ranks, _load_and_train, model, later_grid, tmp_path, torch.float32)
    state, resumed = found[0][0], _told([metrics for _, metrics in found])
    assert (state.step, state.updates, state.loader) == (2, {"actor": 2}, {"position": 8})
    assert (state.kl_coef, state.lengths) == (0.05, {"mean": 7.5})
    tolerance = 0.0 if (ranks, grid) == (later_ranks, later_grid) else 1e-5
    for name in ("loss", "engine/grad_norm"):
        assert resumed[name] == pytest.approx(unbroken[name], rel=tolerance, abs=tolerance)


def test_saving_leaves_no_process_behind(tiny_model: Any, tmp_path: Path) -> None:
    """One that a rank had started would outlive the rank where that is killed, and hold the job's output open.

    The ranks are fresh: where megatron's own way of saving was taken before, there is one that stays.
    """
    with contextlib.closing(World()) as world:
        assert world(2, _children_after_saving, tiny_model("qwen2"), tmp_path) == [[], []]


def _children_after_saving(model: Path, root: Path) -> list[list[str]]:
    _train_and_save(model, {}, root, torch.float32)
    commands = [child.cmdline() for child in psutil.Process().children()]
    return [command for command in commands if any("multiprocessing.spawn" in word for word in command)]


def test_experts_are_resumed_where_they_now_lie(world: World, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[])
    unbroken = _told(world(2, _train_and_save, model, {"expert": 2}, tmp_path, torch.float32))
    for grid in ({"expert": 2}, {"expert": 1}, {"pipeline": 2}):
        resumed = _told([metrics for _, metrics in world(2, _load_and_train, model, grid, tmp_path, torch.float32)])
        for name in ("loss", "engine/grad_norm"):
            assert resumed[name] == pytest.approx(unbroken[name], rel=1e-5, abs=1e-5)


ROLES = [  # grids of actor and critic in a job, and in the one that goes on
    (3, {"ranks": [0, 2], "tensor": 2}, {"ranks": [1]}, 3, {"ranks": [0, 2], "tensor": 2}, {"ranks": [1]}),
    (3, {"ranks": [1, 2]}, {"ranks": [0, 1], "pipeline": 2}, 2, {"ranks": [1]}, {}),
]


@pytest.mark.parametrize(("ranks", "actor", "critic", "later_ranks", "later_actor", "later_critic"), ROLES)
def test_roles_are_resumed_wherever_they_were_and_are(  # cases.md F10
    world: World, tiny_model: Any, tmp_path: Path, ranks: int, actor: Any, critic: Any, later_ranks: int,
    later_actor: Any, later_critic: Any,
) -> None:  # fmt: skip
    """The critic is a value model."""
    models = tiny_model("qwen2"), tiny_model("llama", tied=False, score=True)
    unbroken = world(ranks, _train_roles, models, (actor, critic), tmp_path, False)
    resumed = world(later_ranks, _train_roles, models, (later_actor, later_critic), tmp_path, True)
    tolerance = 0.0 if (actor, critic) == (later_actor, later_critic) else 1e-5
    for role in range(2):
        expected, found = (_told([result[role] for result in results]) for results in (unbroken, resumed))
        for name in ("loss", "engine/grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance)


def _train_roles(models: tuple[Path, Path], grids: Any, root: Path, resume: bool) -> list[dict[str, float]]:
    """Two steps of one role and one of another, a checkpoint, and the metrics of a further step of each."""
    from rlflow.checkpoint import Checkpoints, State

    engines = dict(zip(("actor", "critic"), map(_engine, models, grids, [torch.float32] * 2), strict=True))
    checkpoints = Checkpoints(root, keep=2)
    if resume:
        folder = checkpoints.find("auto")
        assert folder is not None
        assert checkpoints.load(engines, folder).updates == {"actor": 2, "critic": 1}
    else:
        for role, count in (("actor", 2), ("critic", 1)):
            for number in range(count):
                _step(engines[role], number)
        checkpoints.save(engines, State(step=2, updates={"actor": 2, "critic": 1}))
    return [_step(engine, 2) for engine in engines.values()]


def test_a_run_with_a_critic_does_not_go_on_from_one_without(world: World, tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("qwen2")
    world(1, _train_and_save, model, {}, tmp_path, torch.float32)
    world(1, _find_with_critic, tmp_path)


def _find_with_critic(root: Path) -> None:
    from rlflow.checkpoint import Checkpoints
    from rlflow.errors import UserError

    with pytest.raises(UserError, match="step_000002 holds no critic: a run without wrote it"):
        Checkpoints(root, keep=2).find("auto", ["actor", "critic"])


def test_weights_of_another_model_are_refused(world: World, tiny_model: Any, tmp_path: Path) -> None:
    world(1, _train_and_save, tiny_model("llama"), {}, tmp_path, torch.float32)
    (message,) = world(1, _load_into, tiny_model("qwen2"), tmp_path)  # which has biases
    assert "step_000002/actor does not fit the actor of this run: was it another model's?" in message


def _load_into(model: Path, root: Path) -> str:
    from rlflow.checkpoint import Checkpoints
    from rlflow.errors import UserError

    with pytest.raises(UserError) as raised:
        Checkpoints(root, keep=2).load({"actor": _engine(model, {}, torch.float32)}, root / "step_000002")
    return str(raised.value)


def test_what_a_checkpoint_has_and_a_run_does_not_take_is_told(world: World, tiny_model: Any, tmp_path: Path) -> None:
    world(1, _train_and_save, tiny_model("qwen2"), {}, tmp_path, torch.float32)
    (tmp_path / "step_000002" / "reference").mkdir()
    (told,) = world(1, _warnings_of_finding, tmp_path)
    assert told == ["the reference in step_000002 is not taken: this run does not change it, or has none"]


def _warnings_of_finding(root: Path) -> list[str]:
    import logging

    from rlflow.checkpoint import Checkpoints

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rlflow.checkpoint.store")
    logger.addHandler(handler)
    Checkpoints(root, keep=2).find("auto", ["actor"])
    logger.removeHandler(handler)
    return told


def test_a_frozen_engine_is_saved_without_an_optimizer(world: World, tiny_model: Any, tmp_path: Path) -> None:
    world(2, _save_and_load_frozen, tiny_model("qwen2"), tmp_path)


def _save_and_load_frozen(model: Path, root: Path) -> None:
    """On one rank of two: what was changed comes back."""
    from rlflow.checkpoint import Checkpoints, State

    engine = _engine(model, {"ranks": [1]}, torch.float32, trained=False)
    checkpoints = Checkpoints(root, keep=2)
    weights = engine.parameters_by_name()
    with torch.no_grad():
        for weight in weights.values():
            weight.mul_(1.5)
    saved = {name: weight.clone() for name, weight in weights.items()}
    folder = checkpoints.save({"reference": engine}, State(step=1))
    engine.load_hf(model)
    checkpoints.load({"reference": engine}, folder)
    assert all(torch.equal(weight, saved[name]) for name, weight in engine.parameters_by_name().items())


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
