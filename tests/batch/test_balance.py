"""Balancing and micro-batch plans are complete, within budget, even, and the same wherever they are made."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import Sizes, assign, balance, plan_micro_batches

costs_strategy = st.lists(st.integers(1, 100), max_size=30)


@st.composite
def sizes_strategy(draw: st.DrawFn) -> Sizes:
    groups = draw(st.lists(st.integers(0, 4), max_size=20))
    prompt_of_group = draw(st.lists(st.integers(1, 30), min_size=5, max_size=5))
    responses = draw(st.lists(st.integers(0, 40), min_size=len(groups), max_size=len(groups)))
    return Sizes([prompt_of_group[group] for group in groups], responses, groups)


def test_karmarkar_karp_example():
    """Differencing gives 8+6 | 7+5+4, difference 2; greedy (longest first to the emptiest) gives 8+5+4 | 7+6, 4."""
    parts = balance([4, 5, 6, 7, 8], 2)
    assert sorted(sum([4, 5, 6, 7, 8][item] for item in part) for part in parts) == [14, 16]


@settings(max_examples=50, deadline=None)
@given(costs_strategy, st.integers(1, 6), st.booleans())
def test_balance_uses_every_item_once(costs: list[int], parts: int, equal_counts: bool):
    split = balance(costs, parts, equal_counts=equal_counts)
    assert len(split) == parts
    assert sorted(item for part in split for item in part) == list(range(len(costs)))
    if equal_counts:
        assert max(map(len, split)) - min(map(len, split)) <= 1


def test_balance_is_close_to_even_on_realistic_lengths():
    random.seed(0)
    costs = [random.lognormvariate(5, 0.8) for _ in range(256)]
    totals = [sum(costs[item] for item in part) for part in balance(costs, 8)]
    assert max(totals) < 1.001 * sum(costs) / 8


@settings(max_examples=50, deadline=None)
@given(sizes_strategy(), st.integers(1, 60), st.booleans())
def test_micro_batches_hold_every_sample_once_within_the_budget(sizes: Sizes, budget: int, share: bool):
    plan = plan_micro_batches(sizes, budget, share_prompts=share)
    assert sorted(sample for members in plan for sample in members) == list(range(len(sizes)))
    for members in plan:
        assert len(members) == 1 or sizes.rows(members, share) <= budget
    longer = plan_micro_batches(sizes, budget, share_prompts=share, count=len(plan) + 2)
    assert len(longer) == len(plan) + 2
    assert sorted(sample for members in longer for sample in members) == list(range(len(sizes)))


def test_rows_leave_out_the_last_response_token_and_repeated_prompts():
    sizes = Sizes([5, 5, 3], [4, 2, 1], [0, 0, 1])
    assert sizes.rows([0, 1, 2], share_prompts=False) == (5 + 3) + (5 + 1) + 3
    assert sizes.rows([0, 1, 2], share_prompts=True) == 5 + 3 + 1 + 3


def test_cost_counts_attention_pairs():
    """Hidden 1: a row is worth 6 pairs. A sequence of 4 rows has 8; a prompt of 2 with responses of 2: 2 + 6 + 6."""
    assert Sizes([2], [3], [0]).cost([0], False, 1) == 4 + 8 / 6
    assert Sizes([2, 2], [3, 3], [0, 0]).cost([0, 1], True, 1) == 6 + 14 / 6


def test_sharing_prompts_saves_micro_batches():
    sizes = Sizes([30] * 8, [5] * 8, [0] * 8)
    assert len(plan_micro_batches(sizes, 64, share_prompts=False)) == 8
    assert len(plan_micro_batches(sizes, 64, share_prompts=True)) == 1


def test_too_few_micro_batches_are_refused():
    with pytest.raises(ValueError, match="need 2 micro-batches of 10 tokens, not 1"):
        plan_micro_batches(Sizes([5, 5], [5, 5], [0, 1]), 10, share_prompts=False, count=1)


def test_a_rank_with_less_work_fills_up_with_empty_micro_batches():
    plan = plan_micro_batches(Sizes([5], [6], [3]), 10, share_prompts=False, count=3)
    assert sorted(map(len, plan)) == [0, 0, 1]


def test_groups_stay_together_where_that_is_even():
    sizes = Sizes([20] * 16, [8] * 16, [number // 4 for number in range(16)])
    parts = assign(sizes, 2, hidden=64, share_prompts=True)
    assert [len(part) for part in parts] == [8, 8]
    assert all(len({sizes.groups[sample] for sample in part}) == 2 for part in parts)


def test_a_group_is_cut_where_one_rank_would_idle():
    sizes = Sizes([4] * 8, [50] * 8, [0] * 8)
    parts = assign(sizes, 2, hidden=64, share_prompts=True)
    assert [len(part) for part in parts] == [4, 4]


@settings(max_examples=30, deadline=None)
@given(sizes_strategy(), st.integers(1, 4), st.booleans())
def test_assignment_is_complete(sizes: Sizes, ranks: int, share: bool):
    parts = assign(sizes, ranks, hidden=64, share_prompts=share)
    assert len(parts) == ranks
    assert sorted(sample for part in parts for sample in part) == list(range(len(sizes)))
