"""The parity matrix: its rows, what a run of a row computes, and how far that is from one process.

A row is a model on a grid. Everything that must not depend on the grid is computed in one go, because starting
processes and making models is most of the time. `test_parity` asserts the bound, `tools/parity_table.py` writes the
differences down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.roles.runs import Case, canonical
from tests.roles.samples import random_batch

BOUND = 1e-5
COLUMNS = ("loss", "log-probs", "entropy", "gradients", "values", "optimizer step")

ONE = Case("one process", 1)
SP = {"sequence_parallel": True}
ALL_MODELS = [
    ONE,
    Case("TP2 × SP", 2, {"tensor": 2}, SP),
    Case("PP2", 2, {"pipeline": 2}, layers=4),
    Case("PP2 × VP2", 2, {"pipeline": 2}, {"virtual_pipeline": 2}, layers=4),
    Case("PP4 × VP2", 4, {"pipeline": 4}, {"virtual_pipeline": 2}, layers=8, responses=4),
    Case("CP2", 2, {"context": 2}),
    Case("CP2 × TP2 × SP", 4, {"context": 2, "tensor": 2}, SP),
    Case("DP2, collectives overlapped", 2),
    Case("DP2, collectives not overlapped", 2, {}, {"overlap": False}),
]
DENSE = [
    Case("TP2", 2, {"tensor": 2}),
    Case("CP2 × TP2", 4, {"context": 2, "tensor": 2}),
    Case("CP2 × PP2 × VP2", 4, {"context": 2, "pipeline": 2}, {"virtual_pipeline": 2}, layers=4),
    Case("PP2 × VP2 × DP2", 4, {"pipeline": 2}, {"virtual_pipeline": 2}, layers=4),
    Case("TP2 × SP × PP2 × DP2", 8, {"tensor": 2, "pipeline": 2}, SP, layers=4),
]
EXPERTS = [
    Case("EP2", 2, {"expert": 2}),
    Case("EP2 × TP2 × SP", 4, {"expert": 2, "tensor": 2}, SP),
    Case("ETP1 × TP2 × SP", 2, {"tensor": 2, "expert_tensor": 1}, SP),
    Case("ETP1 × EP2 × TP2 × SP", 2, {"tensor": 2, "expert": 2, "expert_tensor": 1}, SP),
    Case("EP2 × CP2", 2, {"context": 2, "expert": 2}),
    Case("EP2 × TP2 × SP × PP2 × DP2", 8, {"tensor": 2, "pipeline": 2, "expert": 2}, SP, layers=4),
]
MATRIX = [("llama", case) for case in ALL_MODELS + DENSE] + [("qwen3_moe", case) for case in ALL_MODELS + EXPERTS]

MODEL = {"hidden_size": 64, "intermediate_size": 96}
TEMPERATURE = 4.0  # brings the logits of test models to the size of a trained one's

ROWS = 80  # of a micro-batch: two or more of the samples
PACKINGS = {"packed": (ROWS, False), "prompts shared": (ROWS, True), "one sequence": (1, False)}
"""Rows of a micro-batch at most, and whether a prompt is computed once for several responses."""

GRADIENT = {"lr": 1e6, "eps": 1e4, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "clip_grad": 0.0}
"""AdamW whose every step is a hundred gradients: lr · g / (|g| + eps), with g far below eps."""

ADAMW = {"lr": 0.3, "eps": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}


@dataclass
class Found:
    """What a rank found, by column and name, in each packing; fields of tokens are NaN where it knows nothing."""

    results: dict[tuple[str, str], list[Tensor]] = field(default_factory=dict)

    def add(self, column: str, name: str, value: Tensor) -> None:
        self.results.setdefault((column, name), []).append(value)


def compute(folder: Path, case: Case, recompute: Sequence[str] = ("none", "full", "selective")) -> Found:
    """All columns of a row, on each of its ranks, with one kind of recomputation for each of its three engines."""
    from rlflow.algorithms import PolicyObjective, ValueObjective

    objective = PolicyObjective(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.1)
    row = Row(folder, case)
    policy = row.engine(GRADIENT, recompute=recompute[0])
    for _ in row.packings(policy):
        row.add_tokens("log-probs", policy.log_probs(row.own, TEMPERATURE))
        row.add_step("gradients", policy, objective, GRADIENT["lr"])
    learner = row.engine(ADAMW, recompute=recompute[1], moe_aux_loss_coef=0.1)
    row.add_step("optimizer step", learner, objective, ADAMW["lr"])
    critic = row.engine(GRADIENT, head="score", recompute=recompute[2])
    for _ in row.packings(critic):
        values = critic.values(row.own)
        row.add_tokens("values", values.tokens)
        row.add_tokens("values", row.own.per_token(values.last.cpu()), name="last")
    row.add_step("gradients", critic, ValueObjective(), GRADIENT["lr"])
    return row.found


class Row:
    """A row on this rank: its grid, the samples of its replica, and what was found so far."""

    def __init__(self, folder: Path, case: Case) -> None:
        from rlflow import parallel

        parallel.initialize(60, 0)
        self.folder, self.case = folder, case
        self.grid = parallel.Grid(**case.grid)
        batch = matrix_batch(case.responses)
        self.tokens = len(batch.responses.values)
        # Whole groups, as far as they go: a replica can then share their prompts.
        self.own = batch.select(torch.arange(len(batch)).tensor_split(self.grid.dp)[self.grid.replica(self.grid.rank)])
        self.found = Found()

    def engine(self, optimizer: Mapping[str, Any], *, head: str = "lm", **options: Any) -> Any:
        """A policy, or with the head "score" a value model, with the weights of the folder."""
        from megatron_bridge.families import load_architecture
        from megatron_bridge.score import with_score_head
        from rlflow.config.schema import Optimizer
        from rlflow.roles import Engine

        architecture = load_architecture(self.folder)
        engine = Engine(
            architecture if head == "lm" else with_score_head(architecture), self.grid, dtype=torch.float32,
            micro_batch_tokens=ROWS, optimizer=Optimizer(**optimizer), **options, **self.case.options,
        )  # fmt: skip
        self._load(engine)
        return engine

    def _load(self, engine: Any) -> None:
        if engine.architecture.head == "lm":
            engine.load_hf(self.folder)
        else:
            engine.load_language_model(self.folder, head="random", seed=5)

    def packings(self, engine: Any) -> Iterator[str]:
        """Let the engine pack in one way after the other, each time with the weights of the folder."""
        can_share = engine.share_prompts
        for name, (budget, shared) in PACKINGS.items():
            if can_share or not shared:
                engine.micro_batch_tokens, engine.share_prompts = budget, shared
                self._load(engine)
                yield name

    def add_step(self, column: str, engine: Any, objective: Any, lr: float) -> None:
        """By how much an optimizer step moves the weights, and the losses, entropies and gradient norm of it."""
        head = engine.architecture.head
        before = canonical(engine)
        entropies = torch.full((self.tokens,), torch.nan)

        def watched(scored: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor]) -> Any:
            if entropy is not None:
                entropies[fields["place"].cpu()] = entropy.detach().cpu()
            return objective(scored, entropy, fields)

        found = engine.train_step(self.own, watched, temperature=TEMPERATURE, lr=lr, with_entropy=head == "lm")
        for name, after in canonical(engine).items():
            self.found.add(column, f"{head}: {name}", after - before[name])
        metrics = engine.tell([found])[0]
        for kind, name in (("loss", "loss"), ("loss", "engine/moe_aux_loss"), ("gradients", "engine/grad_norm")):
            if name in metrics:
                self.found.add(kind, f"{head}, {column}: {name}", torch.tensor(metrics[name]))
        if head == "lm":
            self.found.add("entropy", "tokens", entropies)

    def add_tokens(self, column: str, values: Tensor, name: str = "tokens") -> None:
        """Values of this replica's tokens, at their places among all."""
        assert values.isfinite().all()
        whole = torch.full((self.tokens,), torch.nan)
        self.found.add(column, name, whole.index_copy_(0, self.own.tokens["place"], values.cpu()))


def matrix_batch(responses: int = 2) -> Any:
    """Two prompts and what both objectives ask for of the responses to each."""
    batch, draw = random_batch((7, 13), responses), torch.Generator().manual_seed(1)
    tokens = len(batch.responses.values)
    batch.tokens["place"] = torch.arange(tokens)
    batch.tokens["ref_log_probs"] = -10 * torch.rand(tokens, generator=draw)
    batch.tokens["old_values"], batch.tokens["returns"] = torch.randn(2, tokens, generator=draw)
    return batch


class Matrix:
    """Measures rows; models, and what one process computes of them without recomputation, are made once."""

    def __init__(self, world: Callable[..., Any], make_model: Callable[..., Path]) -> None:
        self._world, self._make_model = world, make_model
        self._base: dict[tuple[Path, int], Found] = {}

    def measure(self, family: str, case: Case) -> dict[str, float]:
        """By column, the largest difference from one process, over the largest number there."""
        folder = self._make_model(family, tied=family == "llama", num_hidden_layers=case.layers, **MODEL)
        same = folder, case.responses
        if same not in self._base:
            alone = replace(ONE, responses=case.responses)
            self._base[same] = self._world(1, compute, folder, alone, ("none", "none", "none"))[0]
        return differences(self._world(case.ranks, compute, folder, case), self._base[same])


def differences(ranks: Sequence[Found], base: Found) -> dict[str, float]:
    """By column, the largest difference in any packing and tensor, relative to the tensor's largest number in `base`.

    All ranks that know a number are compared, and of each somebody must.
    """
    worst = dict.fromkeys(COLUMNS, 0.0)
    for (column, name), (expected, *_) in base.results.items():
        of_ranks = [rank.results[column, name] for rank in ranks if (column, name) in rank.results]
        for same_packing in zip(*of_ranks, strict=True):
            found = torch.stack(same_packing)
            assert not found.isnan().all(0).any(), f"{column}, {name}: nobody knows all of it"
            difference = (found - expected).abs().nan_to_num().max() / expected.abs().max().clamp(min=1e-30)
            worst[column] = max(worst[column], float(difference))
    return worst
