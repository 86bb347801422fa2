"""Ragged rows and the batch: lengths come from the engine, prompts are held once, groups go by prompt id."""

import math

import pytest
import torch

from rlflow.batch import Batch, Ragged
from rlflow.batch.ragged import spans
from tests.batch.samples import make_batch, make_sample


def test_spans_concatenates_ranges():
    assert spans(torch.tensor([5, 9, 0]), torch.tensor([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]


def test_ragged_selects_rows_in_order_and_repeatedly():
    rows = Ragged.from_rows([[1, 2], [], [3, 4, 5]])
    assert rows.offsets.tolist() == [0, 2, 2, 5]
    assert rows.row(2).tolist() == [3, 4, 5]
    assert rows.row_ids().tolist() == [0, 0, 2, 2, 2]
    chosen = rows.select(torch.tensor([2, 0, 0]))
    assert chosen.values.tolist() == [3, 4, 5, 1, 2, 1, 2]
    assert chosen.lengths.tolist() == [3, 2, 2]


def test_ragged_refuses_lengths_that_do_not_fit():
    with pytest.raises(ValueError, match="3 values for rows of 4"):
        Ragged(torch.arange(3), torch.tensor([1, 3]))
    with pytest.raises(IndexError):
        Ragged.from_rows([[1]]).row(1)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [([11, 12, 13], [1, 1, 1, 0, 0]), ([11, 12, 2], [1, 1, 1, 0, 0]), ([2], [1, 0, 0, 0, 0])],
)
def test_mask_follows_engine_lengths_not_pad_ids(ids: list[int], expected: list[int]):
    """cases.md B07: no EOS, EOS that is also the pad id, and EOS alone; five wide because a neighbour is."""
    samples = [make_sample([1], ids), make_sample([1], [7] * 5, index=1)]
    batch = Batch.from_samples(samples, {"p/0": 0})
    mask = Ragged(batch.tokens["mask"], batch.responses.lengths).padded()
    assert mask[0].int().tolist() == expected


def test_prompts_are_held_once_and_select_keeps_only_those_needed():
    batch = make_batch(([1, 2], [[3], [4, 5]]), ([6], [[7, 8, 9]]))
    assert len(batch) == 3
    assert batch.prompts.values.tolist() == [1, 2, 6]
    assert batch.prompt_of.tolist() == [0, 0, 1]
    chosen = batch.select([2, 1])
    assert chosen.responses.values.tolist() == [7, 8, 9, 4, 5]
    assert [chosen.prompts.row(row).tolist() for row in chosen.prompt_of.tolist()] == [[6], [1, 2]]
    assert chosen.tokens["rollout_log_probs"].tolist() == pytest.approx([-0.07, -0.08, -0.09, -0.04, -0.05])
    assert chosen.samples["rewards"].tolist() == [0, 1]
    assert len(batch.select([2]).prompts) == 1


def test_concat_joins_the_prompt_of_a_group_that_both_parts_hold():
    batch = make_batch(([1, 2], [[3], [4, 5]]), ([6], [[7]]))
    joined = Batch.concat([batch.select([0, 2]), batch.select([1])])
    assert joined.prompts.values.tolist() == [1, 2, 6]
    assert joined.prompt_of.tolist() == [0, 1, 0]
    assert joined.responses.values.tolist() == [3, 7, 4, 5]


def test_equal_prompts_of_two_rows_are_two_groups():
    """cases.md C12: groups go by prompt id."""
    batch = make_batch(([1, 2], [[3]]), ([1, 2], [[4]]))
    assert batch.samples["group"].tolist() == [0, 1]
    assert len(batch.prompts) == 2


def test_unscorable_and_empty_responses_have_no_reward():
    """cases.md B17 and B27: neither a missing score nor an empty response may enter the statistics."""
    unscored, empty = make_sample([1], [2]), make_sample([1], [], index=1)
    unscored.reward, empty.reward = None, 10.0
    rewards = Batch.from_samples([unscored, empty], {"p/0": 0}).samples["rewards"].tolist()
    assert all(math.isnan(reward) for reward in rewards)


def test_ids_and_log_probs_must_be_as_many():
    """cases.md C07."""
    sample = make_sample([1], [5, 6, 2])
    sample.log_probs.pop()
    with pytest.raises(ValueError, match="3 response tokens, 2 log-probs"):
        Batch.from_samples([sample], {"p/0": 0})


def test_no_samples_make_an_empty_batch_with_all_fields():
    batch = Batch.from_samples([], {})
    assert len(batch) == 0
    assert batch.samples["rewards"].dtype == torch.float32
    assert batch.tokens["mask"].dtype == torch.bool


def test_per_token_repeats_each_samples_value():
    batch = make_batch(([1], [[3, 4], [5]]))
    assert batch.per_token(torch.tensor([0.5, -1.0])).tolist() == [0.5, 0.5, -1.0]
