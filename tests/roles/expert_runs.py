"""What ranks run in tests of routed experts: optimizer steps whose gradients can be read off, and replayed routing."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlflow.batch import Batch
from rlflow.batch.routing import ROUTING
from tests.roles.runs import Case, canonical, make_engine
from tests.roles.samples import random_batch

# With so large an epsilon the first step of Adam is lr·g/(|g| + eps): nearly the gradient, and never amplified noise.
READ_OFF = {"lr": 1.0, "eps": 1.0, "clip_grad": 0.0, "weight_decay": 0.0}


def routed_batch(experts: int = 4, per_token: int = 2, layers: int = 3) -> Batch:
    """The random batch, each token with random experts in each layer."""
    batch, draw = random_batch(), torch.Generator().manual_seed(5)
    for fields, tokens in ((batch.prompt_tokens, batch.prompts.values), (batch.tokens, batch.responses.values)):
        chosen = torch.rand(len(tokens), layers, experts, generator=draw).topk(per_token).indices
        fields[ROUTING] = chosen.flatten(1).to(torch.uint8)
    return batch


def step(folder: Path, case: Case, objective: dict[str, Any] | None, routed: bool) -> tuple[dict[str, Tensor], Any]:
    """By how much an optimizer step moves the weights, on rank 0, and its metrics. No objective: one that is zero."""
    from rlflow.algorithms import PolicyObjective
    from rlflow.config.schema import Optimizer

    engine = make_engine(folder, case, Optimizer(**READ_OFF))
    grid, batch = engine.grid, routed_batch() if routed else random_batch()
    if objective is None:
        batch.tokens["weights"].zero_()
    own = batch.select(list(range(grid.replica(grid.rank), len(batch), grid.dp)))
    before = canonical(engine)
    metrics = engine.train_step(own, PolicyObjective(**(objective or {})), temperature=1.0, lr=READ_OFF["lr"])
    after = canonical(engine)
    return {name: after[name] - before[name] for name in before}, engine.tell([metrics])[0]


def steps(folder: Path, cases: list[Case], routed: bool = False) -> list[tuple[dict[str, Tensor], Any]]:
    return [step(folder, case, {}, routed) for case in cases]


def replayed(folder: Path, case: Case, batches: list[Batch]) -> list[Tensor]:
    """Log-probs of batches with routing, on every rank."""
    engine = make_engine(folder, case)
    return [engine.log_probs(batch, 1.0) for batch in batches]
