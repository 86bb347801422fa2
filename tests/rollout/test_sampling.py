"""Requests and samples, with vLLM's outputs made by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlflow.batch.sample import Prompt
from rlflow.config.schema import Rollout
from rlflow.errors import UserError
from rlflow.rollout import sampling
from rlflow.rollout.shares import Share

PROMPTS = [Prompt("train/0", [5, 6], {}, None), Prompt("train/1", [7, 8, 9], {}, None)]


class Letters:
    """A tokenizer whose token 0 … 25 is a letter."""

    def batch_decode(self, sequences: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(chr(ord("a") + token) for token in sequence) for sequence in sequences]


def output(*completions: tuple[list[int], list[float], str]) -> Any:
    """A vLLM output: token ids, log-probs (the sampled token's before the likeliest's) and finish reason of each."""
    return SimpleNamespace(
        outputs=[
            SimpleNamespace(
                index=index, token_ids=tuple(ids), finish_reason=reason,
                logprobs=SimpleNamespace(logprobs=log_probs, start_indices=list(range(len(log_probs)))),
            )
            for index, (ids, log_probs, reason) in enumerate(completions)
        ]
    )  # fmt: skip


def test_a_sampled_end_of_sequence_is_kept_with_its_log_prob() -> None:
    """cases.md C07: [5, 6, eos] with three log-probs."""
    request = sampling.Request(PROMPTS[0], first=2, count=2, seed=None)
    out = output(([5, 6, 2], [-1.0, -2.0, -3.0], "stop"), ([5, 6, 7, 8], [-1.0] * 4, "length"))
    first, second = sampling.samples([request], [out], Letters(), version=4)
    assert (first.response_ids, first.log_probs, first.truncated) == ([5, 6, 2], [-1.0, -2.0, -3.0], False)
    assert (second.response_ids, second.truncated) == ([5, 6, 7, 8], True)
    assert [sample.index for sample in (first, second)] == [2, 3]
    assert first.text == "fgc"
    assert first.weights_version == 4


def test_log_probs_that_do_not_match_the_tokens_are_an_error() -> None:
    request = sampling.Request(PROMPTS[0], 0, 1, None)
    with pytest.raises(RuntimeError, match="2 log-probs for 3 tokens"):
        sampling.samples([request], [output(([5, 6, 2], [-1.0, -2.0], "stop"))], Letters(), 1)


def test_every_end_of_sequence_id_stops() -> None:
    """cases.md B30: all ids of generation_config and config, and the user's own."""
    how = sampling.choose(Rollout(stop_token_ids=(9, 3)), (151645, 151643), 1.0, greedy=False, min_tokens=0)
    assert how.stop == (151645, 151643, 9, 3)


def test_nothing_stops_a_response_of_a_benchmark() -> None:
    how = sampling.choose(Rollout(ignore_eos=True), (151645,), 1.0, greedy=False, min_tokens=0)
    assert how.stop == ()


def test_greedy_leaves_nothing_to_chance() -> None:
    how = sampling.choose(Rollout(top_p=0.9, top_k=20), (1,), 0.7, greedy=True, min_tokens=0)
    assert (how.temperature, how.top_p, how.top_k) == (0.0, 1.0, -1)
    how = sampling.choose(Rollout(top_p=0.9, top_k=20), (1,), 0.7, greedy=False, min_tokens=0)
    assert (how.temperature, how.top_p, how.top_k) == (0.7, 0.9, 20)


def test_fast_mode_asks_once_a_prompt_and_deterministic_mode_once_a_response() -> None:
    shares = [Share(0, 0, 2), Share(1, 2, 2)]
    fast = sampling.requests(PROMPTS, shares, run_seed=0, step=3, deterministic=False)
    assert [(request.prompt.id, request.first, request.count, request.seed) for request in fast] == [
        ("train/0", 0, 2, None), ("train/1", 2, 2, None),
    ]  # fmt: skip
    single = sampling.requests(PROMPTS, shares, run_seed=0, step=3, deterministic=True)
    assert [(request.prompt.id, request.first, request.count) for request in single] == [
        ("train/0", 0, 1), ("train/0", 1, 1), ("train/1", 2, 1), ("train/1", 3, 1),
    ]  # fmt: skip
    assert len({request.seed for request in single}) == 4


@pytest.mark.parametrize("ids", [[], [1] * 5])
def test_prompts_of_a_wrong_length_are_named(ids: list[int]) -> None:
    with pytest.raises(UserError, match=rf"prompt train/7: has {len(ids)} tokens, rollout.max_prompt_length is 4"):
        sampling.check_lengths([Prompt("train/7", ids, {}, None)], 4)
