"""What the measurement of the rollout counts, and how it talks to the engines that it times."""

import json

import pytest

from tools.gpu.rollout import LARGE, SMALL, memory_seconds, words
from tools.gpu.sampling import VARIANTS, N, Work, ask
from tools.gpu.shapes import SHAPES


def test_decoding_reads_weights_once_a_step_and_all_keys_and_values() -> None:
    """0.5b: 494 million weights of 2 bytes; 24 layers × 2 × 128 channels × 2 bytes a token; .8 of 4.8 TB/s."""
    weights, cached = 494_032_768 * 2, 24 * 2 * 128 * 2
    read = 1024 * (weights + 1024 * (256 + 512) * cached)
    assert memory_seconds(SHAPES["0.5b"], LARGE) == pytest.approx(read / 3.84e12, rel=1e-3)
    assert words(SMALL) == "256 × 64+256"


def test_each_call_has_prompts_of_its_own() -> None:
    first, again, other = (SMALL.prompts(151_936, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert [len(prompt) for prompt in first] == [64] * (256 // N)


def test_work_travels_as_a_line() -> None:
    line = ask(LARGE)
    assert line.count("\n") == 1
    assert Work(**json.loads(line)) == LARGE


def test_every_variant_that_is_timed_exists() -> None:
    from tools.gpu import rollout

    assert {name for names in rollout.VARIANTS.values() for name in names} <= VARIANTS.keys()
