"""Decoding in bulk on a GPU samples what vLLM's own scheduler has it sample."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlflow import parallel
from rlflow.batch import Prompt, Sample
from tests.gpu.devices import needs_gpus
from tests.gpu.ranks import prompts, start_rollout
from tests.workers import World

pytestmark = needs_gpus(1)

Response = tuple[list[int], list[float]]
STOPS = 2000  # ids that end a response: one in 76 of the vocabulary's


def both_ways(folder: Path, ignore_eos: bool, **options: Any) -> tuple[list[Response], list[Response]]:
    """The same step sampled in bulk and by vLLM's scheduler, from the same weights without a cached prefix."""
    parallel.initialize(60, 0)
    rollout = start_rollout(folder, ignore_eos=ignore_eos, stop_token_ids=tuple(range(STOPS)), **options)
    asked: list[Prompt] = prompts()

    def sample() -> list[Response]:
        rollout.sync_from_hf(str(folder))
        found: list[Sample] = rollout.generate(asked, n=6, temperature=1.0, step=0)
        return [(one.response_ids, one.log_probs) for one in found]

    in_bulk = sample()
    assert rollout._llm is not None
    del rollout._llm.llm_engine.engine_core.get_output  # the decoder's, in the place of the class's own
    by_vllm = sample()
    rollout.shutdown()
    return in_bulk, by_vllm


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_bulk_and_scheduler_sample_the_same(fresh_gpus: World, qwen: Path, ignore_eos: bool) -> None:
    """To the bit where all responses are of one length, so that no batch differs; else as far as bfloat16 allows."""
    in_bulk, by_vllm = fresh_gpus(1, both_ways, qwen, ignore_eos)[0]
    if ignore_eos:
        assert in_bulk == by_vllm
    else:
        check_endings(in_bulk, by_vllm)


def test_requests_that_wait_for_places_and_cache(fresh_gpus: World, qwen: Path) -> None:
    """48 requests, 16 places and a cache of some 870 tokens, each sample with a seed of its own.

    Who waits is computed beside others, which moves logits by some .03: that many of a flat model's tokens change.
    """
    sample = partial(both_ways, max_num_seqs=16, kv_cache_gib=0.01, deterministic=True)
    check_endings(*fresh_gpus(1, sample, qwen, False)[0], first=2)


def check_endings(in_bulk: list[Response], by_vllm: list[Response], first: int = 8) -> None:
    """Each response ends where it should, and most begin with the same tokens."""
    assert all(len(ids) == len(log_probs) for ids, log_probs in in_bulk)
    assert all(ids[-1] < STOPS or len(ids) == 128 for ids, _ in in_bulk)
    assert all(min(ids[:-1], default=STOPS) >= STOPS for ids, _ in in_bulk)
    alike = sum(one[0][:first] == other[0][:first] for one, other in zip(in_bulk, by_vllm, strict=True))
    assert alike > 0.8 * len(in_bulk)
