"""From scored samples to mini-batches: each sample is learned from once, whichever ranks train."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from rlflow.batch import Batch, Prompt, Sample
from rlflow.config import Algorithm
from rlflow.parallel import Grid
from rlflow.trainers.experience import add_advantages, collect, mini_batch

PROMPTS = [Prompt(f"train/{number}", [7] * (number + 2), {}, None) for number in range(4)]
N = 2
KL = 0.5  # Δ = lp − ref of every token


class Learned(NamedTuple):
    """What a rank learns from in one mini-batch."""

    samples: list[tuple[int, int]]  # (prompt, index)
    advantages: list[float]  # of each sample's first token
    weight: float  # sum over tokens


def respond(number: int, index: int) -> Sample:
    """`number` + 1 tokens with log-probs of −1; the first response is worth 1, the second 0, prompt 3's alike."""
    length = number + 1
    return Sample(
        PROMPTS[number], index, [5] * length, [-1.0] * length, truncated=False, text="", weights_version=1,
        reward=float(index == 0 or number == 3),
    )  # fmt: skip


def run_step(actor_ranks: tuple[int, ...], settings: dict[str, Any]) -> list[Learned]:
    """Rank r samples prompt r, and rank 0 the fourth too; the ranks of `actor_ranks` learn, in two mini-batches."""
    grid = Grid(actor_ranks)
    world = dist.get_world_size()
    mine = [respond(number, index) for number in range(4) for index in range(N) if number % world == dist.get_rank()]
    actor: Any = SimpleNamespace(grid=grid, architecture=SimpleNamespace(hidden=8), share_prompts=True, routing=None)
    experience = collect(mine, PROMPTS, {"actor": actor}, mini_batches=2)
    share = experience.shares["actor"]
    tokens = share.batch.tokens
    tokens["old_log_probs"] = tokens["rollout_log_probs"].clone()
    tokens["ref_log_probs"] = tokens["rollout_log_probs"] - KL
    algorithm = Algorithm(mini_batches=2, normalize_std=False, skip_zero_advantage=False, **settings)
    add_advantages(experience, algorithm, grid, kl_coef=algorithm.kl_coef)
    return [learned(mini_batch(share, number, algorithm, grid)) for number in range(2)]


def learned(batch: Batch) -> Learned:
    first = batch.responses.offsets[:-1]
    return Learned(
        list(zip(batch.samples["group"].tolist(), batch.samples["index"].tolist(), strict=True)),
        batch.tokens["advantages"][first].tolist(),
        float(batch.tokens["weights"].sum()),
    )


@pytest.mark.parametrize("actor_ranks", [(0, 1, 2), (0, 1), (1, 2), (2,)])
def test_every_sample_is_learned_from_once_and_ranks_outside_the_grid_do_not_wait(world, actor_ranks):
    by_rank = world(3, run_step, actor_ranks, {})
    for number, groups in enumerate([(0, 1), (2, 3)]):  # runs of equally many prompts
        parts = [steps[number] for steps in by_rank]
        assert sorted(sample for part in parts for sample in part.samples) == [(g, i) for g in groups for i in range(N)]
        assert all(not part.samples for rank, part in enumerate(parts) if rank not in actor_ranks)
        assert sum(part.weight for part in parts) == pytest.approx(1)  # the denominators count all replicas


@pytest.mark.parametrize("actor_ranks", [(0, 1, 2), (0, 1), (2,)])
def test_advantages_compare_responses_wherever_they_were_sampled(world, actor_ranks):
    """R − mean of the group: ±1/2, and 0 where both responses are worth the same."""
    by_rank = world(3, run_step, actor_ranks, {})
    found = {
        sample: advantage
        for steps in by_rank for part in steps for sample, advantage in zip(part.samples, part.advantages, strict=True)
    }  # fmt: skip
    assert found == {**{(g, i): 0.5 - i for g in range(3) for i in range(N)}, (3, 0): 0.0, (3, 1): 0.0}


def test_a_kl_penalty_lowers_the_reward_of_each_token(world):
    """With `reinforce` the first token's advantage is R − kl_coef · 0.5 · tokens, k1 being Δ = 0.5 for each."""
    settings = {"advantage": "reinforce", "kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}
    for steps in world(3, run_step, (0, 1), settings):
        for part in steps:
            for (group, index), advantage in zip(part.samples, part.advantages, strict=True):
                reward = float(index == 0 or group == 3)
                assert advantage == pytest.approx(reward - 0.1 * KL * (group + 1), abs=1e-6)
