"""How a step's work was shared out: by the rollout's replicas, and by the data-parallel ranks that learn.

What is measured is defined in `rollout.timing`, `rollout.lengths` and `batch.measures`; here it is brought together.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.batch import Load, balance_metrics, measure_load
from rlflow.batch.sample import Prompt
from rlflow.config.schema import Rollout
from rlflow.roles import Engine
from rlflow.rollout.engine import RolloutEngine
from rlflow.rollout.lengths import expectation_metrics
from rlflow.rollout.timing import generation_metrics
from rlflow.trainers.experience import Experience, Share
from rlflow.trainers.measure import from_all_ranks


def workload_metrics(
    experience: Experience, actor: Engine, rollout: RolloutEngine, prompts: Sequence[Prompt],
    expected: Sequence[float], config: Rollout,
) -> dict[str, float]:  # fmt: skip
    """`rollout/…` of the last `generate`, whose work was shared by `expected`, and `balance/…` of the actor's steps.

    The balance is the mean over the optimizer steps of an epoch, before samples without a gradient leave them.
    Collective over the job.
    """
    parts = from_all_ranks((rollout.generation, _loads(experience.shares["actor"], actor)))
    generations = [generation for generation, _ in parts if generation is not None]
    by_replica = [loads for _, loads in parts if loads]
    steps = [balance_metrics(loads, actor.micro_batch_tokens) for loads in zip(*by_replica, strict=True)]
    metrics = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    if not generations:
        return metrics
    return metrics | generation_metrics(generations) | expectation_metrics(
        expected, prompts, experience.known, n=config.n, limit=config.max_response_length, replicas=len(generations)
    )  # fmt: skip


def _loads(share: Share, engine: Engine) -> list[Load]:
    """What this rank's replica computes in each optimizer step; on one rank of each replica, elsewhere nothing."""
    grid = engine.grid
    if not grid.is_member or any(place for name, place in grid.here.items() if name != "dp"):
        return []
    sizes = share.batch.sizes()
    return [
        measure_load(
            sizes.select(rows), micro_batch_tokens=engine.micro_batch_tokens, hidden=engine.architecture.hidden,
            share_prompts=engine.share_prompts, multiple=engine.row_multiple, context=grid.cp,
            multiple_of=engine.micro_batch_multiple,
        )
        for rows in share.mini_batches
    ]  # fmt: skip
