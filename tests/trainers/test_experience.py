"""From scored samples to mini-batches: each sample is learned from once, whichever ranks train."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from rlflow.batch import Batch, Prompt, Sample
from rlflow.batch.routing import ROUTING, RoutingShape
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


def route(sample: Sample) -> Sample:
    """Each token that was computed goes to expert 10·prompt + index, on the only layer."""
    rows = len(sample.prompt.token_ids) + len(sample.response_ids) - 1
    number = 10 * int(sample.prompt.id.removeprefix("train/")) + sample.index
    sample.routing = torch.full((rows, 1, 1), number, dtype=torch.uint8)
    return sample


def collect_routed() -> tuple[list[tuple[int, int]], dict[str, torch.Tensor], bool]:
    """What the actor on rank 1 gets of routing that ranks 0 and 1 sampled, and whether the critic on rank 0 has any."""
    mine = [route(respond(number, index)) for number in range(4) for index in range(N) if number % 2 == dist.get_rank()]
    roles: dict[str, Any] = {
        name: SimpleNamespace(
            grid=Grid((rank,)), architecture=SimpleNamespace(hidden=8), share_prompts=True, routing=routing
        )
        for name, rank, routing in (("actor", 1, RoutingShape(1, 1, 64)), ("critic", 0, None))
    }
    shares = collect(mine, PROMPTS, roles, mini_batches=1).shares
    batch = shares["actor"].batch
    samples = list(zip(batch.samples["group"].tolist(), batch.samples["index"].tolist(), strict=True))
    found = {"response": batch.tokens[ROUTING][:, 0], "prompt": batch.prompt_tokens[ROUTING][:, 0]}
    return samples, found, ROUTING in shares["critic"].batch.tokens


def test_routing_goes_with_its_tokens_and_to_none_but_the_roles_that_replay(world):
    samples, found, given_to_critic = world(2, collect_routed)[1]
    assert len(samples) == 4 * N
    assert found["response"].tolist() == [10 * g + i for g, i in samples for _ in range(g + 1)]
    groups = list(dict.fromkeys(g for g, _ in samples))
    assert found["prompt"].tolist() == [10 * g for g in groups for _ in PROMPTS[g].token_ids]
    assert not given_to_critic


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
