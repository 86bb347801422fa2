"""Micro-batches as pipelines and context-parallel ranks need them: whole rounds of them, padded sequences counted."""

import time
from dataclasses import replace

import pytest
import torch

from rlflow.batch import Sizes, pack, plan_micro_batches
from tests.batch.samples import make_batch

TWELVE = Sizes([2] * 12, [3] * 12, list(range(12)))  # 4 rows each


@pytest.mark.parametrize(("count", "multiple_of", "expected"), [
    (None, 1, 3), (None, 2, 4), (None, 4, 4), (None, 5, 5), (4, 4, 4), (5, 4, 8), (9, 8, 16),
])  # fmt: skip
def test_pipelines_of_virtual_stages_get_whole_rounds(count: int | None, multiple_of: int, expected: int) -> None:
    """48 rows fill 3 micro-batches of 16; a count that all replicas agreed on is rounded up as well."""
    plan = plan_micro_batches(TWELVE, 16, share_prompts=False, count=count, multiple_of=multiple_of)
    assert len(plan) == expected
    assert sorted(sample for members in plan for sample in members) == list(range(12))
    assert max(map(len, plan)) - min(len(members) for members in plan if members) <= 1
    assert [bool(members) for members in plan] == [True] * min(expected, 12) + [False] * (expected - 12)


def test_no_samples_make_no_round_unless_asked_for() -> None:
    nothing = TWELVE.select([])
    assert plan_micro_batches(nothing, 16, share_prompts=False, multiple_of=4) == []
    assert plan_micro_batches(nothing, 16, share_prompts=False, count=1, multiple_of=4) == [[]] * 4


def test_the_padding_of_each_sequence_is_counted() -> None:
    """Two context-parallel ranks pad 5 rows to 8: two such sequences do not fit 15 rows, though 10 rows would."""
    batch = make_batch(([1, 2, 3], [[4, 5, 6]]), ([1, 2, 3], [[4, 5, 6]]))
    sizes = batch.sizes()
    assert len(plan_micro_batches(sizes, 15, share_prompts=False)) == 1
    padded = replace(sizes, context=2)
    assert len(plan_micro_batches(padded, 15, share_prompts=False)) == 2
    assert padded.rows([0, 1], False) == len(pack(batch, [[0, 1]], share_prompts=False, context=2)[0].token_ids) == 16


def test_the_last_token_is_counted_where_it_is_a_row() -> None:
    with_last = replace(TWELVE, with_last=True)
    assert (TWELVE.rows([0, 1], False), with_last.rows([0, 1], False)) == (8, 10)
    assert with_last.select([3]).rows([0], False) == 5


def test_planning_thousands_of_samples_takes_no_time_to_speak_of() -> None:
    """2,048 responses of 1,500 tokens to shared prompts, in a hundred micro-batches: half a second of one core."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randn(2048, generator=random).mul(0.8).add(7).exp().clamp(1, 8000).int().tolist()
    sizes = Sizes([200] * 2048, lengths, [sample // 16 for sample in range(2048)])
    start = time.process_time()
    plan = plan_micro_batches(sizes, 32768, share_prompts=True, hidden=4096)
    assert time.process_time() - start < 4
    assert sorted(sample for members in plan for sample in members) == list(range(2048))
    assert max(sizes.rows(members, True) for members in plan) <= 32768


@pytest.mark.parametrize(("share_prompts", "expected"), [(False, 86), (True, 69)])
def test_as_few_micro_batches_as_like_samples_allow(share_prompts: bool, expected: int) -> None:
    """1,024 samples of 256 + 1,023 rows: 12 fit into 16,384, and 15 beside a shared prompt.

    By rows alone 80 and 66 would do, and trying those would take most of the time.
    """
    alike = Sizes([256] * 1024, [1024] * 1024, [number // 8 for number in range(1024)])
    begin = time.process_time()
    plan = plan_micro_batches(alike, 16384, share_prompts=share_prompts, hidden=896)
    assert len(plan) == expected
    assert time.process_time() - begin < 0.25  # .08 and .01 s on an idle core


def test_responses_of_one_token_take_no_rows_beside_a_shared_prompt() -> None:
    alike = Sizes([5] * 100, [1] * 100, [0] * 100)
    assert len(plan_micro_batches(alike, 10, share_prompts=True)) == 1
