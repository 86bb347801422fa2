"""Sampling seeds depend on what is sampled, and the trainer's random streams do not notice."""

import random

import numpy as np
import torch

from rlflow.rollout.seeds import engine_seed, response_seed, seeded_generators


def test_the_responses_to_a_prompt_have_seeds_of_their_own() -> None:
    """cases.md C03: 4 distinct seeds from seed 7, the same when asked again."""
    seeds = [response_seed(7, 0, "train/1", index) for index in range(4)]
    assert len(set(seeds)) == 4
    assert seeds == [response_seed(7, 0, "train/1", index) for index in range(4)]


def test_every_part_of_the_purpose_counts() -> None:
    seeds = {
        response_seed(run, step, prompt, index)
        for run in (0, 1) for step in (0, 1) for prompt in ("train/1", "train/11") for index in (0, 1)
    }  # fmt: skip
    seeds |= {engine_seed(run, step, replica) for run in (0, 1) for step in (0, 1) for replica in (0, 1)}
    assert len(seeds) == 16 + 8
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_sampling_leaves_the_trainers_streams_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    undisturbed = [draw(), draw()]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    first = draw()
    with seeded_generators(5):
        inside = draw()
    assert [first, draw()] == undisturbed
    with seeded_generators(5):
        assert draw() == inside
