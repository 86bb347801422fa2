"""What each GPU of these tests runs; the tests judge what comes back. Results lie on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bridge.checkpoints import load_hf
from megatron_bridge.execute import Traffic, connect
from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import Layout
from megatron_bridge.score import with_score_head
from rlflow import parallel
from rlflow.algorithms import PolicyObjective
from rlflow.batch import Batch, Prompt, Sample
from rlflow.config.schema import Optimizer, Rollout
from rlflow.roles import Engine
from rlflow.rollout.engine import NotReady
from rlflow.rollout.vllm_engine import VLLMRollout
from tests.roles import runs
from tests.roles.samples import random_batch

TEMPERATURE = 0.8


def make_engine(folder: Path, dtype: torch.dtype, *, grid: dict[str, Any] | None = None, **options: Any) -> Engine:
    parallel.initialize(60, 0)
    options = {"micro_batch_tokens": 4096} | options
    engine = Engine(load_architecture(folder), parallel.Grid(**(grid or {})), dtype=dtype, **options)
    engine.load_hf(folder)
    return engine


def make_critic(folder: Path, dtype: torch.dtype, **options: Any) -> Engine:
    """A critic of a policy's layers with a random head."""
    parallel.initialize(60, 0)
    architecture = with_score_head(load_architecture(folder))
    engine = Engine(architecture, parallel.Grid(), dtype=dtype, micro_batch_tokens=4096, **options)
    engine.load_language_model(folder, head="random", seed=3)
    return engine


def long_batch() -> Batch:
    """16 responses, in several micro-batches of sequences that differ much in length."""
    return random_batch(prompt_lengths=(20, 700, 130, 1), responses=4, longest=900)


def log_probs(folder: Path, dtype: torch.dtype, batch: Batch, **options: Any) -> Tensor:
    return make_engine(folder, dtype, **options).log_probs(batch, TEMPERATURE).cpu()


@dataclass
class Lesson:
    """Steps on one batch: metrics of each, and Σ weight · advantage · log-prob before and after."""

    metrics: list[dict[str, float]]
    before: float
    after: float


def learn(folder: Path, dtype: torch.dtype, batch: Batch, steps: int, **options: Any) -> Lesson:
    engine = make_engine(folder, dtype, optimizer=Optimizer(lr=1e-4, weight_decay=0.0), **options)

    def value() -> float:
        found = engine.log_probs(batch, TEMPERATURE).cpu()
        tokens = batch.tokens
        return float((found * tokens["weights"] * tokens["advantages"] * tokens["mask"]).sum())

    before = value()
    metrics = [engine.train_step(batch, PolicyObjective(), temperature=TEMPERATURE, lr=1e-4) for _ in range(steps)]
    return Lesson(metrics, before, value())


def learn_on_grid(folder: Path, case: runs.Case, settings: dict[str, Any]) -> runs.Learned:
    learned = runs.learn(folder, case, settings, 1, {"entropy_coef": 0.01})
    return replace(learned, log_probs=learned.log_probs.cpu())


@dataclass(frozen=True)
class Gap:
    """Between vLLM's log-probs of its samples and Megatron's."""

    largest: float
    mean: float
    k3: float  # mean of exp(Δ) − Δ − 1

    @classmethod
    def between(cls, engine: Engine, samples: Sequence[Sample], temperature: float) -> "Gap":
        """Collective over the job: every rank passes the samples that it holds, all ranks score all of them."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(samples))
        gathered = [sample for part in everyone for sample in part]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(one.prompt.id for one in gathered))}
        batch = Batch.from_samples(gathered, numbers)
        delta = batch.tokens["rollout_log_probs"] - engine.log_probs(batch, temperature).cpu()
        return cls(delta.abs().max().item(), delta.abs().mean().item(), (delta.exp() - delta - 1).mean().item())


def start_rollout(
    folder: Path, *, tensor: int = 1, ranks: Any = "all", prove: bool = False, **options: Any
) -> VLLMRollout:
    from transformers import AutoTokenizer

    options = {"kv_cache_gib": 1.0, "max_num_seqs": 64} | options
    config = Rollout(
        ranks=ranks, tensor_parallel_size=tensor, max_prompt_length=256, max_response_length=128, **options
    )  # fmt: skip
    return VLLMRollout(
        load_architecture(folder), str(folder), config, AutoTokenizer.from_pretrained(folder), dtype="bfloat16",
        seed=7, timeout_seconds=60, prove=prove,
    )  # fmt: skip


def prompts(count: int = 8) -> list[Prompt]:
    draw = torch.Generator().manual_seed(1)
    return [
        Prompt(f"train/{number}", torch.randint(4, 400, (5 + 30 * number,), generator=draw).tolist(), {}, None)
        for number in range(count)
    ]


@dataclass
class Rolled:
    """What one engine on one GPU showed through two syncs and a night between them."""

    in_place: bool = False
    gaps: list[Gap] = field(default_factory=list)
    repeats: bool = False
    freed_bytes: int = 0
    refused: list[str] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)


def roll(folder: Path) -> Rolled:
    """Prove, sync, sample, sleep, learn, wake, sync and sample again."""
    parallel.initialize(60, 0)
    rollout, seen = start_rollout(folder, prove=True), Rolled()
    engine = make_engine(folder, torch.bfloat16, optimizer=Optimizer(lr=1e-4))
    seen.in_place = rollout._weights.in_place
    _refused(seen, rollout)
    seen.traffic.append(rollout.sync(engine.layout, engine.parameters_by_name()))
    samples = rollout.generate(prompts(), n=4, temperature=TEMPERATURE, step=0)
    rollout.sync(engine.layout, engine.parameters_by_name())  # a cached prefix is computed in another shape
    again = rollout.generate(prompts(), n=4, temperature=TEMPERATURE, step=0)
    seen.repeats = [one.response_ids for one in samples] == [one.response_ids for one in again]
    seen.gaps.append(Gap.between(engine, samples, TEMPERATURE))
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    rollout.sleep()
    seen.freed_bytes = torch.cuda.mem_get_info()[0] - free
    _refused(seen, rollout)
    engine.train_step(long_batch(), PolicyObjective(), temperature=TEMPERATURE, lr=1e-4)
    rollout.wake_weights()
    seen.traffic.append(rollout.sync(engine.layout, engine.parameters_by_name()))
    _refused(seen, rollout)
    rollout.wake_kv_cache()
    samples = rollout.generate(prompts(), n=4, temperature=TEMPERATURE, step=1)
    seen.gaps.append(Gap.between(engine, samples, TEMPERATURE))
    rollout.shutdown()
    return seen


def _refused(seen: Rolled, rollout: VLLMRollout) -> None:
    try:
        rollout.generate(prompts(), n=1, temperature=1.0, step=0)
    except NotReady as error:
        seen.refused.append(str(error))


def roll_from_grids(folder: Path, tensor: int, grids: Sequence[dict[str, Any]]) -> list[tuple[Gap, Traffic]]:
    """One kind of rollout, filled from actors on several grids, each with weights of its own."""
    parallel.initialize(60, 0)
    rollout, found = start_rollout(folder, tensor=tensor), []
    for number, grid in enumerate(grids):
        engine = make_engine(folder, torch.bfloat16, grid=grid)
        with torch.no_grad():
            for parameter in engine.parameters_by_name().values():
                parameter.mul_(1 - 0.125 * number)
        traffic = rollout.sync(engine.layout, engine.parameters_by_name())
        samples = rollout.generate(prompts(), n=4, temperature=TEMPERATURE, step=number)
        found.append((Gap.between(engine, samples, TEMPERATURE), traffic))
        rollout.sleep()
        rollout.wake_weights()
        rollout.wake_kv_cache()
    rollout.shutdown()
    return found


def roll_on_one_of(folder: Path, rank: int) -> Gap:
    """A rollout on a single rank of the job, filled from an actor on all of them."""
    parallel.initialize(60, 0)
    rollout = start_rollout(folder, ranks=(rank,))
    engine = make_engine(folder, torch.bfloat16, grid={"tensor": dist.get_world_size()})
    rollout.sync(engine.layout, engine.parameters_by_name())
    samples = rollout.generate(prompts(), n=4, temperature=TEMPERATURE, step=0)
    gap = Gap.between(engine, samples, TEMPERATURE)
    rollout.shutdown()
    return gap


def transfer(folder: Path, pairs: Sequence[tuple[Layout, Layout]]) -> list[tuple[bool, Traffic]]:
    """Whether what arrives in each target layout equals what is read from the files, and the second run's traffic."""
    rank = dist.get_rank()
    found = []
    for source, target in pairs:
        held, expected, filled = (_empty(layout, rank) for layout in (source, target, target))
        load_hf(folder, source, held, rank=rank)
        load_hf(folder, target, expected, rank=rank)
        bound = connect(source, held, target, filled, rank=rank, dtype=torch.bfloat16)
        bound.run()
        traffic = bound.run()
        found.append((all(torch.equal(filled[name], expected[name]) for name in expected), traffic))
    return found


def _empty(layout: Layout, rank: int) -> dict[str, Tensor]:
    return {
        name: torch.empty(param.shape, dtype=torch.bfloat16, device=parallel.device())
        for name, param in layout.parameters(rank).items()
    }
