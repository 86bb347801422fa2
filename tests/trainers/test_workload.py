"""What the tracker hears of how a step's work was shared, from ranks that each know only their part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlflow.batch import Prompt, catalogue, exchange
from rlflow.config import Rollout
from rlflow.rollout.timing import Generation
from rlflow.trainers.experience import Experience, Share
from rlflow.trainers.workload import workload_metrics
from tests.batch.samples import make_batch


def run_workload() -> dict[str, float]:
    """Two replicas roll out; the actor is DP2 on ranks 0 and 1, and learns in two steps of one prompt each."""
    rank = dist.get_rank()
    # Prompts of 2 and 1 tokens with two responses each: rank 0 holds all.
    sampled = make_batch(([1, 2], [[3] * 5, [4] * 5]), ([5], [[6] * 8, [7] * 4]))
    sampled = sampled if rank == 0 else sampled.select(torch.empty(0, dtype=torch.int64))
    known = catalogue(sampled)
    placement = ((0, 2), (1, 3), ())
    share = Share(placement, exchange(sampled, known, placement), [[0], [1]] if rank < 2 else [[], []])
    grid = SimpleNamespace(is_member=rank < 2, here={"tp": 0, "cp": 0, "dp": rank, "pp": 0}, cp=1)
    actor: Any = SimpleNamespace(
        grid=grid, architecture=SimpleNamespace(hidden=1 << 20), micro_batch_tokens=10, share_prompts=False,
        row_multiple=4, micro_batch_multiple=1,
    )  # fmt: skip
    rollout: Any = SimpleNamespace(generation=[Generation(4.0, 10), Generation(2.0, 12), None][rank])
    prompts = [Prompt("p/0", [1, 2], {}, None), Prompt("p/1", [5], {}, None)]
    config = Rollout(n=2, max_response_length=8)
    return workload_metrics(Experience(known, {"actor": share}), actor, rollout, prompts, [5.0, 3.0], config)


def test_all_ranks_know_how_the_work_was_shared(world):
    """Step 1: 6 rows on both ranks, padded to 8. Step 2: 8 and 4 rows, no padding, 4/3 of the mean on the busiest.

    Expected 5 and 3 tokens, found 5 and 6: an error of 0 and 3 over the mean of 5.5.
    """
    metrics, *others = world(3, run_workload)
    assert others == [metrics, metrics]
    assert metrics["balance/rank_imbalance"] == pytest.approx((0 + 1 / 3) / 2, abs=1e-4)
    assert metrics["balance/padding"] == pytest.approx((1 - 12 / 16 + 0) / 2)
    assert metrics["balance/unfilled"] == pytest.approx((1 - 12 / 20 + 1 - 12 / 20) / 2)
    assert metrics["rollout/idle_fraction"] == 1 - 3 / 4
    assert metrics["rollout/length_error"] == pytest.approx(1.5 / 5.5)
