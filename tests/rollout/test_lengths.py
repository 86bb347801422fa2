"""Earlier responses tell which prompts take long, and replicas that share the work by it wait less for each other."""

import random

import pytest
import torch

from rlflow.batch import Catalogue, Prompt
from rlflow.rollout import lengths
from rlflow.rollout.lengths import ALL, expectation_metrics, expected_lengths, learn_lengths
from rlflow.rollout.shares import split
from rlflow.rollout.timing import Generation, generation_metrics


def prompts(*ids: str) -> list[Prompt]:
    return [Prompt(name, [1, 2, 3], {}, None) for name in ids]


def known(responses: list[list[int]]) -> Catalogue:
    """The catalogue of a step with response lengths by prompt and index."""
    places = [(group, index) for group, own in enumerate(responses) for index in range(len(own))]
    return Catalogue(
        owners=[0] * len(places),
        rows=list(range(len(places))),
        prompt_lengths=torch.full((len(places),), 3),
        response_lengths=torch.tensor([length for own in responses for length in own], dtype=torch.int64),
        samples={
            "group": torch.tensor([group for group, _ in places], dtype=torch.int64),
            "index": torch.tensor([index for _, index in places], dtype=torch.int64),
        },
        ranks_per_node=1,
    )


def test_without_any_response_the_limit_is_expected() -> None:
    assert expected_lengths({}, prompts("train/1", "train/2"), limit=64) == [64.0, 64.0]


def test_a_prompt_is_expected_to_answer_as_before_and_a_new_one_like_the_others() -> None:
    """Means 4 and 10, 7 over all six responses; the second visit of train/1 with mean 8 counts half: 6."""
    asked = prompts("train/1", "train/2")
    seen = learn_lengths({}, asked, known([[2, 4, 6], [9, 10, 11]]))
    assert expected_lengths(seen, prompts("train/2", "train/1", "train/3"), limit=64) == [10.0, 4.0, 7.0]
    seen = learn_lengths(seen, prompts("train/1"), known([[8, 8, 8]]))
    assert expected_lengths(seen, asked, limit=64) == [6.0, 10.0]
    assert seen[ALL] == 7.5


def test_a_step_without_samples_teaches_nothing() -> None:
    assert learn_lengths({"train/1": 3.0}, prompts("train/1"), known([[]])) == {"train/1": 3.0}


def test_what_is_remembered_is_bounded_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "REMEMBERED", 4)
    seen: dict[str, float] = {}
    for step in range(5):
        seen = learn_lengths(seen, prompts(f"train/{step}"), known([[step + 1]]))
    assert set(seen) == {"train/2", "train/3", "train/4", ALL}
    assert expected_lengths(seen, prompts("train/4"), limit=64) == [5.0]


def test_replicas_share_by_expected_tokens() -> None:
    """Two prompts of 30 tokens in all and four of 15: shared by number one replica could get 75 of 120."""
    parts = split([10, 10, 10, 10, 10, 10], n=1, response_length=[20, 5, 5, 20, 5, 5], replicas=2)
    assert (
        sorted(sorted([30, 15, 15, 30, 15, 15][share.prompt] for share in part) for part in parts) == [[15, 15, 30]] * 2
    )


def test_a_long_group_is_cut_where_a_replica_would_wait() -> None:
    parts = split([10, 10], n=8, response_length=[100, 10], replicas=2)
    tokens = [sum(10 + share.count * [100, 10][share.prompt] for share in part) for part in parts]
    assert max(tokens) <= 1.05 * sum(tokens) / 2


def test_every_response_is_sampled_once_whatever_is_expected() -> None:
    rng = random.Random(0)
    for _ in range(50):
        count, n, replicas = rng.randint(1, 12), rng.randint(1, 9), rng.randint(1, 5)
        expected = [rng.uniform(1, 100) for _ in range(count)]
        parts = split([rng.randint(1, 20) for _ in range(count)], n, expected, replicas)
        places = [(share.prompt, share.first + k) for part in parts for share in part for k in range(share.count)]
        assert sorted(places) == [(prompt, index) for prompt in range(count) for index in range(n)]


def drawn(rng: random.Random, typical: list[float]) -> list[list[int]]:
    """8 responses to each prompt, about as long as is typical of it."""
    return [[max(1, round(length * rng.lognormvariate(0, 0.4))) for _ in range(8)] for length in typical]


def test_expectations_lower_the_idle_share() -> None:
    """64 prompts whose typical lengths are log-normal, asked in 3 epochs, on 8 replicas: halved from then on."""
    rng = random.Random(0)
    asked = prompts(*(f"train/{number}" for number in range(64)))
    typical = [rng.lognormvariate(5, 0.8) for _ in asked]
    seen: dict[str, float] = {}
    for epoch in range(3):
        expected = expected_lengths(seen, asked, limit=2048)
        step = known(drawn(rng, typical))
        found = expectation_metrics(expected, asked, step, n=8, limit=2048, replicas=8)
        if epoch == 0:
            assert found["rollout/idle_tokens"] == found["rollout/idle_tokens_unforeseen"]
        else:
            assert found["rollout/idle_tokens"] < 0.5 * found["rollout/idle_tokens_unforeseen"]
            assert found["rollout/length_error"] < 0.25
        seen = learn_lengths(seen, asked, step)


def test_idle_time_is_counted_from_each_replicas_own_clock() -> None:
    """Replicas of 4, 2 and 3 s: 1 − 3/4; 90 tokens in 4 s."""
    found = generation_metrics([Generation(4.0, 30), None, Generation(2.0, 40), Generation(3.0, 20), None])
    assert found == {"rollout/idle_fraction": 0.25, "rollout/seconds_max": 4.0, "rollout/tokens_per_second": 22.5}
    assert generation_metrics([None, None]) == {}
