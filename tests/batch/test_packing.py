"""Packing: a response token is predicted by the row before it in its own sequence, its prompt shared or not."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import Batch, MicroBatch, pack, plan_micro_batches
from rlflow.batch.zigzag import context_rows, context_segments
from tests.batch.samples import make_batch

PLAIN = make_batch(([10], [[11, 12]]), ([20], [[21]]))
TREE = make_batch(([1, 2, 3], [[4, 5, 6], [7], [8, 9]]))


def seen_by(micro_batch: MicroBatch, row: int) -> list[int]:
    """Ids that a row attends to, in order of their rows, as the segments say."""
    for prefix_start, prefix_end, start, end in micro_batch.segments:
        if start <= row < end:
            rows = [*range(prefix_start, prefix_end), *range(start, row + 1)]
            return micro_batch.token_ids[rows].tolist()
    raise AssertionError(f"row {row} lies in no segment")


def check_contexts(batch: Batch, micro_batches: list[MicroBatch]) -> None:
    """Every response token of the batch is predicted once, from its prompt and the tokens before it."""
    found = torch.zeros(len(batch.responses.values), dtype=torch.int64)
    for micro in micro_batches:
        sample_of = torch.searchsorted(batch.responses.offsets[1:], micro.token_index, right=True)
        assert torch.equal(micro.sample_index, torch.unique_consecutive(sample_of, return_inverse=True)[1])
        for row, target, token, sample in zip(
            micro.predict_at.tolist(), micro.targets.tolist(), micro.token_index.tolist(), sample_of.tolist(),
            strict=True,
        ):  # fmt: skip
            found[token] += 1
            position = token - int(batch.responses.offsets[sample])
            prompt = batch.prompts.row(int(batch.prompt_of[sample])).tolist()
            response = batch.responses.row(sample).tolist()
            assert target == response[position]
            assert seen_by(micro, row) == prompt + response[:position]
            assert micro.position_ids[row] == len(prompt) + position - 1
    assert found.tolist() == [1] * len(found)


def test_plain_packing_with_boundaries():
    """cases.md B22: [10,11,12 | 20,21] has the labels 11, 12, none, 21, none; rows without a label are not computed."""
    (micro,) = pack(PLAIN, [[0, 1]], share_prompts=False)
    assert micro.token_ids.tolist() == [10, 11, 20]
    assert micro.position_ids.tolist() == [0, 1, 0]
    assert micro.predict_at.tolist() == [0, 1, 2]
    assert micro.targets.tolist() == [11, 12, 21]
    assert micro.segments == [(0, 0, 0, 2), (2, 2, 2, 3)]
    assert micro.cu_seqlens.tolist() == [0, 2, 3]
    assert micro.cu_seqlens.dtype == torch.int32
    assert micro.max_seqlen == 2
    assert micro.padding == 0


def test_padding_is_a_last_segment_that_nothing_reads():
    """cases.md B22, padded form: no label lies in the padding."""
    (micro,) = pack(PLAIN, [[0, 1]], share_prompts=False, multiple=8)
    assert micro.token_ids.tolist() == [10, 11, 20, 0, 0, 0, 0, 0]
    assert micro.padding == 5
    assert micro.segments[-1] == (3, 3, 3, 8)
    assert micro.cu_seqlens.tolist() == [0, 2, 3, 8]
    assert micro.targets.tolist() == [11, 12, 21]
    assert int(micro.predict_at.max()) < 3


def test_padding_of_each_sequence_for_context_parallel_ranks():
    """cases.md B22: [10,11,12,p | 20,21,p,p] has the labels 11, 12, none, none, 21, none, none, none."""
    (micro,) = pack(PLAIN, [[0, 1]], share_prompts=False, context=2, with_last=True)
    assert micro.token_ids.tolist() == [10, 11, 12, 0, 20, 21, 0, 0]
    assert micro.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert micro.cu_seqlens.tolist() == [0, 4, 8]
    labels = [None] * 8
    for row, target in zip(micro.predict_at.tolist(), micro.targets.tolist(), strict=True):
        labels[row] = target
    assert labels == [11, 12, None, None, 21, None, None, None]
    assert micro.source.tolist() == [0, 2, 3, -1, 1, 4, -1, -1]  # among 10 20 | 11 12 21
    assert micro.samples_of_row.tolist() == [1, 1, 1, 0, 1, 1, 0, 0]
    assert micro.padding == 3


def test_a_context_parallel_rank_has_its_rows_and_what_they_predict():
    """Rank 0 of two has the first and the last of four chunks of each sequence, rank 1 the two in the middle."""
    (micro,) = pack(PLAIN, [[0, 1]], share_prompts=False, context=2, with_last=True)
    first, second = (micro.for_context_rank(rank, 2) for rank in range(2))
    assert first.token_ids.tolist() == [10, 0, 20, 0]
    assert (first.predict_at.tolist(), first.targets.tolist(), first.scored.tolist()) == ([0, 2], [11, 21], [0, 2])
    assert (first.last_rows.tolist(), first.last_scored.tolist()) == ([], [])
    assert second.token_ids.tolist() == [11, 12, 21, 0]
    assert (second.predict_at.tolist(), second.targets.tolist(), second.scored.tolist()) == ([0], [12], [1])
    assert (second.last_rows.tolist(), second.last_scored.tolist()) == ([1, 2], [0, 1])
    for part in (first, second):
        assert part.token_index.tolist() == [0, 1, 2]
        assert part.last_samples.tolist() == [0, 1]


def test_rows_of_each_rank_are_a_multiple():
    """Three sequence-parallel ranks divide the rows of each of two context-parallel ones: 12 rows hold both."""
    (micro,) = pack(PLAIN, [[0, 1]], share_prompts=False, context=2, multiple=3)
    assert len(micro.token_ids) == 12
    assert micro.segments == [(0, 0, 0, 4), (4, 4, 4, 8), (8, 8, 8, 12)]
    (empty,) = pack(PLAIN, [[]], share_prompts=False, context=2, multiple=3)
    assert len(empty.for_context_rank(1, 2).token_ids) == 6


def test_prompts_are_not_shared_by_context_parallel_ranks():
    with pytest.raises(ValueError, match="cannot be shared"):
        pack(TREE, [[0]], share_prompts=True, context=2)
    (micro,) = pack(TREE, [[0]], share_prompts=False)
    with pytest.raises(ValueError, match="not packed for 2"):
        micro.for_context_rank(0, 2)


@pytest.mark.parametrize("share", [True, False])
def test_the_last_token_is_a_row_where_it_is_asked_for(share: bool):
    batch = make_batch(([1, 2, 3], [[4, 5, 6], [7], []]))
    (micro,) = pack(batch, [[0, 1, 2]], share_prompts=share, with_last=True)
    assert micro.token_ids[micro.last_rows].tolist() == [6, 7, 3]  # an empty response: the end of its prompt
    assert micro.last_samples.tolist() == [0, 1, 2]
    check_contexts(batch, [micro])
    assert pack(batch, [[0, 1, 2]], share_prompts=share)[0].last_rows is None


def test_log_prob_belongs_to_the_masked_token():
    """cases.md B21: tokens [10,11,12,13], mask on 12: predicted from [10,11]; the first token is never predicted."""
    batch = make_batch(([10, 11], [[12, 13]]))
    (micro,) = pack(batch, [[0]], share_prompts=False)
    assert micro.targets[0] == 12
    assert seen_by(micro, int(micro.predict_at[0])) == [10, 11]


def test_shared_prompt_is_computed_once():
    (micro,) = pack(TREE, [[0, 1, 2]], share_prompts=True)
    assert micro.token_ids.tolist() == [1, 2, 3, 4, 5, 8]
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert micro.segments == [(0, 0, 0, 3), (0, 3, 3, 5), (0, 3, 5, 6)]
    assert micro.predict_at.tolist() == [2, 3, 4, 2, 2, 5]
    assert micro.targets.tolist() == [4, 5, 6, 7, 8, 9]


def test_a_lone_response_needs_no_prefix():
    (micro,) = pack(TREE, [[0]], share_prompts=True)
    assert micro.segments == [(0, 0, 0, 5)]


def test_contexts_are_right_however_the_batch_is_cut():
    batch = make_batch(([1, 2, 3], [[4, 5, 6], [7], [8, 9]]), ([1, 2, 3], [[10, 11], []]), ([12], [[13, 14, 15, 16]]))
    for bins in ([[0, 1, 2, 3, 4, 5]], [[5, 0, 3], [4, 2, 1]], [[number] for number in range(6)]):
        for share in (False, True):
            check_contexts(batch, pack(batch, bins, share_prompts=share, multiple=4))


def test_an_empty_bin_is_padding_alone():
    (micro,) = pack(PLAIN, [[]], share_prompts=True, multiple=4)
    assert micro.token_ids.tolist() == [0, 0, 0, 0]
    assert micro.padding == 4
    assert len(micro.targets) == len(micro.predict_at) == len(micro.sample_index) == 0
    assert micro.max_seqlen == 4


@st.composite
def any_batch(draw: st.DrawFn) -> Batch:
    ids = st.integers(1, 99)
    responses = st.lists(st.lists(ids, max_size=4), max_size=4)
    groups = st.lists(st.tuples(st.lists(ids, min_size=1, max_size=5), responses), min_size=1, max_size=4)
    return make_batch(*draw(groups))


@settings(max_examples=40, deadline=None)
@given(any_batch(), st.booleans(), st.booleans(), st.integers(1, 20), st.integers(1, 4))
def test_contexts_are_right_for_any_batch(batch: Batch, share: bool, with_last: bool, budget: int, multiple: int):
    sizes = replace(batch.sizes(), with_last=with_last)
    bins = plan_micro_batches(sizes, budget, share_prompts=share)
    micro_batches = pack(batch, bins, share_prompts=share, multiple=multiple, with_last=with_last)
    check_contexts(batch, micro_batches)
    rows = [sizes.rows(members, share) for members in bins]
    assert [len(micro.token_ids) - micro.padding for micro in micro_batches] == rows


@settings(max_examples=40, deadline=None)
@given(any_batch(), st.sampled_from([2, 4]), st.integers(1, 40), st.sampled_from([1, 2, 3, 4]), st.booleans())
def test_context_parallel_ranks_predict_every_token_once(
    batch: Batch, size: int, budget: int, multiple: int, with_last: bool
):
    sizes = replace(batch.sizes(), context=size, with_last=with_last)
    bins = plan_micro_batches(sizes, budget, share_prompts=False)
    micro_batches = pack(batch, bins, share_prompts=False, context=size, multiple=multiple, with_last=with_last)
    check_contexts(batch, micro_batches)
    for members, micro in zip(bins, micro_batches, strict=True):
        check_padding(micro, sizes.rows(members, False), size, multiple)
        check_parts(micro, size)


def check_padding(micro: MicroBatch, planned: int, size: int, multiple: int) -> None:
    """Each sequence is padded to 2·size rows and no further, the whole to what each rank's part must divide."""
    assert planned <= len(micro.token_ids) < planned + max(2, multiple) * 2 * size
    assert len(micro.token_ids) % (2 * size) == len(micro.token_ids) % (multiple * size) == 0
    is_padding = micro.source < 0
    assert micro.padding == int(is_padding.sum())
    assert not is_padding[micro.predict_at].any()
    assert torch.equal(micro.samples_of_row == 0, is_padding)
    for *_, start, end in micro.segments:
        assert end <= planned or start == planned
        assert int(is_padding[start:end].sum()) < 2 * size or start == planned


def check_parts(micro: MicroBatch, size: int) -> None:
    """The ranks' parts make up the whole, each row and each prediction once, and have equally many pairs to compute."""
    parts = [micro.for_context_rank(rank, size) for rank in range(size)]
    rows = [context_rows(micro.segments, rank, size) for rank in range(size)]
    assert sorted(torch.cat(rows).tolist()) == list(range(len(micro.token_ids)))
    assert sorted(torch.cat([part.scored for part in parts]).tolist()) == list(range(len(micro.targets)))
    for part, held in zip(parts, rows, strict=True):
        assert len(held) * size == len(micro.token_ids)
        assert torch.equal(part.token_ids, micro.token_ids[held])
        assert torch.equal(part.position_ids, micro.position_ids[held])
        assert torch.equal(held[part.predict_at], micro.predict_at[part.scored])
        assert torch.equal(part.targets, micro.targets[part.scored])
    pairs = {
        sum((end - start) * (start - prefix) * 2 + (end - start) ** 2 for prefix, _, start, end in chunks)
        for chunks in (context_segments(micro.segments, rank, size) for rank in range(size))
    }
    assert len(pairs) == 1
