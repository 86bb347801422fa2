"""What each rank of a distributed test runs: an engine on a grid, asked for log-probs and optimizer steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.roles.samples import random_batch


@dataclass(frozen=True)
class Case:
    """A grid and how the engine computes on it."""

    name: str
    ranks: int
    grid: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    layers: int = 2  # of the model, in the parity matrix
    responses: int = 2  # to each prompt, there


def make_engine(folder: Path, case: Case, optimizer: Any = None) -> Any:
    from megatron_bridge.families import load_architecture
    from rlflow import parallel
    from rlflow.roles import Engine

    parallel.initialize(60, 0)
    options = {"dtype": torch.float32, "micro_batch_tokens": 150, "optimizer": optimizer} | case.options
    engine = Engine(load_architecture(folder), parallel.Grid(**case.grid), **options)
    engine.load_hf(folder)
    return engine


def log_probs(folders: Sequence[Path], case: Case, temperature: float) -> list[Tensor]:
    """Log-probs of the random batch under each model, on every replica."""
    return [make_engine(folder, case).log_probs(random_batch(), temperature) for folder in folders]


@dataclass
class Learned:
    """What one or more optimizer steps did, as rank 0 sees it."""

    metrics: list[dict[str, float]]
    before: dict[str, Tensor]  # canonical tensors
    after: dict[str, Tensor]
    log_probs: Tensor


def learn(folder: Path, case: Case, settings: dict[str, Any], steps: int, objective: dict[str, Any]) -> Learned:
    """Optimizer steps on the random batch, dealt to the replicas in turn."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    engine = make_engine(folder, case, Optimizer(**settings))
    grid, batch = engine.grid, random_batch()
    own = batch.select(list(range(grid.replica(grid.rank), len(batch), grid.dp)))
    before = canonical(engine)
    metrics = [
        engine.train_step(
            own, PolicyObjective(**objective), temperature=0.8, lr=settings["lr"],
            with_entropy=bool(objective.get("entropy_coef")),
        )
        for _ in range(steps)
    ]  # fmt: skip
    after = canonical(engine)
    return Learned(engine.tell(metrics), before, after, engine.log_probs(own, 1.0))


def learn_both_ways(folder: Path, case: Case) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    """Two steps of a loss per token, and of the same one that does not say so: metrics and the weights behind them."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    objective, found = PolicyObjective(entropy_coef=0.1, clip_high=0.01), []
    for each in (objective, lambda *given: objective(*given)):
        engine, batch = make_engine(folder, case, Optimizer(lr=1e-3)), random_batch()
        own = batch.select(list(range(engine.grid.replica(engine.grid.rank), len(batch), engine.grid.dp)))
        own.tokens["old_log_probs"] = engine.log_probs(own, 0.8)
        steps = [engine.train_step(own, each, temperature=0.8, lr=1e-3, with_entropy=True) for _ in range(2)]
        found.append((engine.tell(steps), canonical(engine)))
    return found


def threads_after_an_engine(folder: Path) -> int:
    """Train a step, let go of the engine, and count what threads the process has left."""
    import gc

    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    engine = make_engine(folder, Case("", 1), Optimizer(lr=1e-3))
    engine.train_step(random_batch(), PolicyObjective(), temperature=1.0, lr=1e-3)
    del engine
    gc.collect()
    torch.distributed.destroy_process_group()
    return len(list(Path("/proc/self/task").iterdir()))


def canonical(engine: Any) -> dict[str, Tensor]:
    """The whole model under Hugging Face names, on rank 0."""
    from megatron_bridge.execute import connect
    from megatron_bridge.layouts import HFLayout

    layout = HFLayout(engine.architecture, (0,))
    whole = {name: torch.empty(param.shape) for name, param in layout.parameters(engine.grid.rank).items()}
    connect(engine.layout, engine.parameters_by_name(), layout, whole, rank=engine.grid.rank, dtype=torch.float32).run()
    return whole


def with_nan_outside_the_mask(folder: Path) -> list[dict[str, float]]:
    """Metrics of a step on the random batch, as it is and with NaN in every field outside its mask."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    engine = make_engine(folder, Case("", 1), Optimizer(lr=0.0))
    metrics = []
    for hole in (0.0, torch.nan):
        batch = random_batch()
        outside = ~batch.tokens["mask"]
        batch.tokens["weights"][outside] = 0.0
        batch.tokens["advantages"][outside] = hole
        batch.tokens["old_log_probs"] = engine.log_probs(batch, 0.8).masked_fill_(outside, hole)
        metrics.append(engine.train_step(batch, PolicyObjective(), temperature=0.8, lr=0.0))
    return metrics


def with_an_infinite_advantage(folder: Path) -> str:
    """What the engine says of a step that one token spoils."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    engine, batch = make_engine(folder, Case("", 1), Optimizer()), random_batch()
    batch.tokens["advantages"][batch.tokens["mask"].nonzero()[0]] = torch.inf
    try:
        engine.train_step(batch, PolicyObjective(), temperature=1.0, lr=1e-6)
    except FloatingPointError as error:
        return str(error)
    return ""


def outside(folder: Path, case: Case) -> tuple[Tensor, list[dict[str, float]], int]:
    """Log-probs, metrics and number of parameters of a rank that may be outside the grid."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    engine = make_engine(folder, case, Optimizer(lr=1e-3))
    batch = random_batch() if engine.grid.is_member else random_batch().select([])
    metrics = engine.tell([engine.train_step(batch, PolicyObjective(), temperature=1.0, lr=1e-3)])
    return engine.log_probs(batch, 1.0), metrics, len(engine.parameters_by_name())


def names_of(folder: Path, case: Case) -> list[str]:
    """Parameter names of this rank's GPTModel, after the layout's were bound to them."""
    engine = make_engine(folder, case)
    assert list(engine.parameters_by_name()) == list(engine.layout.parameters(engine.grid.rank))
    return [name for chunk in engine.chunks for name, _ in chunk.named_parameters()]
