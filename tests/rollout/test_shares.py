"""Every response is sampled once, and replicas get even work."""

from hypothesis import given
from hypothesis import strategies as st

from rlflow.rollout.shares import split


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20), n=st.integers(1, 9), replicas=st.integers(1, 5))
def test_every_response_has_one_replica(lengths: list[int], n: int, replicas: int) -> None:
    parts = split(lengths, n, response_length=40, replicas=replicas)
    assert len(parts) == replicas
    responses = [
        (share.prompt, index)
        for part in parts
        for share in part
        for index in range(share.first, share.first + share.count)
    ]
    assert sorted(responses) == [(prompt, index) for prompt in range(len(lengths)) for index in range(n)]
    for part in parts:
        assert [(share.prompt, share.first) for share in part] == sorted((share.prompt, share.first) for share in part)


def test_long_prompts_are_spread() -> None:
    parts = split([100, 1, 100, 1] * 8, n=2, response_length=10, replicas=2)
    assert [sum([100, 1][share.prompt % 2] for share in part) for part in parts] == [808, 808]


def test_responses_to_a_prompt_stay_together_where_prompts_suffice() -> None:
    assert {share.count for part in split([10] * 16, n=8, response_length=10, replicas=4) for share in part} == {8}


def test_a_single_prompt_still_employs_every_replica() -> None:
    parts = split([10], n=8, response_length=10, replicas=4)
    assert sorted((share.first, share.count) for part in parts for share in part) == [(0, 2), (2, 2), (4, 2), (6, 2)]
