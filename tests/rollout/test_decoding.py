"""Decoding in bulk gives what vLLM's own scheduler gives, whatever makes the two take turns."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.rollout.counting_engine import STOP, counting_engine
from tests.workers import World

Response = tuple[int, list[int], list[float], str, int | None]


@dataclass
class Sampled:
    """The same requests before and after the engine decodes in bulk."""

    by_vllm: list[Response]
    in_bulk: list[Response]
    again: list[Response]
    vllm_steps: int  # that vLLM scheduled while the engine decoded in bulk
    stays: int  # times that the engine went on by itself
    cache_is_free: bool


def sample(llm: Any, min_tokens: int) -> list[Response]:
    from vllm import SamplingParams

    params = SamplingParams(
        n=4, max_tokens=40, min_tokens=min_tokens, ignore_eos=True, stop_token_ids=[STOP], logprobs=0,
        flat_logprobs=True, detokenize=False,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": list(range(first, first + 20 + first))} for first in (1, 5, 11, 20)]
    outputs = llm.generate(prompts, [params] * len(prompts), use_tqdm=False)
    return [
        (one.index, list(one.token_ids), one.logprobs.logprobs, one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.outputs
    ]


def compare(folder: Path, places: int, blocks: int, min_tokens: int) -> Sampled:
    """Runs in a process that may import vLLM."""
    from rlflow.rollout.decoding import SteadyDecoder, install

    with counting_engine(folder, places=places, blocks=blocks) as llm:
        by_vllm = sample(llm, min_tokens)
        client = llm.llm_engine.engine_core
        with (
            patch.object(client, "get_output", wraps=client.get_output) as schedule,
            patch.object(SteadyDecoder, "_decode", autospec=True, side_effect=SteadyDecoder._decode) as stays,
        ):
            install(llm)
            in_bulk, again = sample(llm, min_tokens), sample(llm, min_tokens)
        return Sampled(by_vllm, in_bulk, again, schedule.call_count, stays.call_count, llm.reset_prefix_cache())


@pytest.mark.parametrize(
    ("places", "blocks", "most_vllm_steps", "most_stays"),
    [
        (32, 1000, 4, 2),  # all at once: vLLM computes the prompts alone
        (6, 1000, 20, 20),  # requests wait for places
        (32, 24, 24, 24),  # the cache is full again and again, requests are put off and computed anew
    ],
)
def test_all_responses_are_the_same(
    world: World, tiny_model: Callable[..., Path], places: int, blocks: int, most_vllm_steps: int, most_stays: int
) -> None:
    seen: Sampled = world(1, compare, tiny_model(), places, blocks, 3)[0]
    assert seen.in_bulk == seen.by_vllm
    assert seen.again == seen.by_vllm
    assert {response[3] for response in seen.by_vllm} == {"stop", "length"}
    assert seen.vllm_steps <= most_vllm_steps
    assert seen.stays <= most_stays
    assert seen.cache_is_free
