"""What of a role is on the device when, and that training goes on as if nothing had ever left it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.roles.runs import Case, make_engine
from tests.roles.samples import random_batch
from tests.workers import World


class Diary:
    """A mover that writes down what it is asked for."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def offload(self, part: str) -> None:
        self.entries.append(f"{part} off")

    def load(self, part: str) -> None:
        self.entries.append(f"{part} on")


def residency(diary: Diary) -> Any:
    from rlflow.roles.residency import Residency

    engine: Any = None  # only a mover would look at it
    return Residency(engine, offload=True, mover=diary)


def test_a_phase_brings_what_it_needs_and_takes_away_what_it_brought() -> None:
    diary = Diary()
    role = residency(diary)
    role.offload()
    diary.entries.clear()
    with role.using(weights=True):
        assert role.on_device == ("weights",)
        with role.using(weights=True, gradients=True):
            assert role.on_device == ("weights", "gradients")
        assert role.on_device == ("weights",)
    assert role.on_device == ()
    assert diary.entries == ["weights on", "gradients on", "gradients off", "weights off"]


def test_what_is_there_is_not_moved() -> None:
    diary = Diary()
    role = residency(diary)
    role.load("weights")
    role.offload("optimizer", "gradients")
    role.offload("optimizer")
    with role.using(weights=True):
        pass
    role.load()
    assert diary.entries == ["optimizer off", "gradients off", "gradients on", "optimizer on"]


def test_on_a_cpu_nothing_moves(world: World, tiny_model: Any) -> None:
    world(1, _offload_on_a_cpu, tiny_model("qwen2"))


def _offload_on_a_cpu(folder: Path) -> None:
    from rlflow.config.schema import Optimizer
    from rlflow.roles.residency import PARTS, Residency

    engine = make_engine(folder, Case("", 1), Optimizer())
    role = Residency(engine, offload=True)
    role.offload()
    assert role.on_device == PARTS
    assert len(engine.log_probs(random_batch(), 1.0))


CASES = [
    Case("DP2", 2),
    Case("TP2 × PP2 in bfloat16", 4, {"tensor": 2, "pipeline": 2}, {"dtype": torch.bfloat16}),
    Case("bfloat16", 1, {}, {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_does_not_notice(world: World, tiny_model: Any, case: Case) -> None:
    """Metrics and weights after steps between which everything leaves and comes back, bit for bit."""
    model = tiny_model("qwen2")
    stayed = world(case.ranks, _train, model, case, False)
    for (metrics, weights), (expected, expected_weights) in zip(
        world(case.ranks, _train, model, case, True), stayed, strict=True
    ):
        assert metrics == expected
        assert all(torch.equal(weights[name], weight) for name, weight in expected_weights.items())


def _train(folder: Path, case: Case, leaves: bool) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer
    from rlflow.roles.residency import EngineMover, Residency

    engine = make_engine(folder, case, Optimizer(lr=1e-3))
    role = Residency(engine, offload=leaves, mover=EngineMover(engine) if leaves else None)
    batch, metrics = random_batch(), []
    own = batch.select(list(range(engine.grid.replica(engine.grid.rank), len(batch), engine.grid.dp)))
    for _ in range(3):
        role.offload()
        with role.using(weights=True):
            engine.log_probs(own, 1.0)
        with role.using(weights=True, gradients=True, optimizer=True):
            metrics.append(engine.train_step(own, PolicyObjective(), lr=1e-3))
    with role.using(weights=True):
        return metrics, {name: weight.detach().clone() for name, weight in engine.parameters_by_name().items()}


def test_memory_is_freed_and_each_byte_counted_once(world: World, tiny_model: Any) -> None:
    """Of P bfloat16 weights 2 P bytes leave with the weights, 4 P with the gradients, 12 P with the optimizer."""
    model = tiny_model("qwen2")
    for count, held, left in world(2, _measure, model, {"dtype": torch.bfloat16}):
        assert held == {"weights": 2 * count, "gradients": 4 * count, "optimizer": 12 * count // 2}
        assert left == {"weights": 0, "gradients": 0, "optimizer": 0}
    for count, held, left in world(1, _measure, model, {"dtype": torch.float32}):  # main parameters are the weights
        assert held == {"weights": 4 * count, "gradients": 4 * count, "optimizer": 8 * count}
        assert left == {"weights": 0, "gradients": 0, "optimizer": 0}


def _measure(folder: Path, options: dict[str, Any]) -> tuple[int, dict[str, int], dict[str, int]]:
    """Elements of the buffers, bytes of each part after a step, and what is left of each when it is away."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer
    from rlflow.roles.residency import PARTS, EngineMover, Residency, storages_of

    engine = make_engine(folder, Case("", 1, {}, options), Optimizer())
    engine.train_step(random_batch(), PolicyObjective(), lr=1e-6)
    storages = {part: storages_of(engine, part) for part in PARTS}
    held = {part: sum(storage.nbytes() for storage in storages[part]) for part in PARTS}
    Residency(engine, offload=True, mover=EngineMover(engine)).offload()
    left = {part: sum(storage.nbytes() for storage in storages[part]) for part in PARTS}
    return sum(buffer.numel for buffer in engine.training.ddp[0].buffers), held, left


def test_a_frozen_model_comes_back(world: World, tiny_model: Any) -> None:
    world(1, _leave_and_come_back, tiny_model("qwen2"))


def _leave_and_come_back(folder: Path) -> None:
    from rlflow.roles.residency import EngineMover, Residency

    engine = make_engine(folder, Case("", 1))
    before = engine.log_probs(random_batch(), 1.0)
    role = Residency(engine, offload=True, mover=EngineMover(engine))
    role.offload()
    assert all(weight.untyped_storage().nbytes() == 0 for weight in engine.chunks[0].parameters())
    role.load("weights")
    assert torch.equal(engine.log_probs(random_batch(), 1.0), before)


def test_storages_lie_across_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory of 64-byte slabs: 100 and 60 bytes and none lie in three of them, the last one partly used."""
    from rlflow.roles import host_memory

    monkeypatch.setattr(host_memory, "SLAB_BYTES", 64)
    tensors = [torch.arange(100, dtype=torch.uint8), torch.empty(0), torch.arange(15, dtype=torch.float32)]
    expected, storages = [tensor.clone() for tensor in tensors], [tensor.untyped_storage() for tensor in tensors]
    host = host_memory.HostMemory(torch.device("cpu"))
    for _ in range(2):
        sizes = host.take(storages)
        assert sizes == [100, 0, 60]
        assert [storage.nbytes() for storage in storages] == [0, 0, 0]
        host.give_back(storages, sizes)
        assert all(torch.equal(tensor, due) for tensor, due in zip(tensors, expected, strict=True))
    assert [len(slab) for slab in host._slabs] == [64, 64, 32]
