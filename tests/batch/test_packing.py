"""Packing: a response token is predicted by the row before it in its own sequence, its prompt shared or not."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.batch import Batch, MicroBatch, pack, plan_micro_batches
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
        for row, target, token, sample in zip(
            micro.predict_at.tolist(), micro.targets.tolist(), micro.token_index.tolist(), micro.sample_index.tolist(),
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


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_contexts_are_right_for_any_batch(data: st.DataObject):
    ids = st.integers(1, 99)
    groups = data.draw(
        st.lists(
            st.tuples(st.lists(ids, min_size=1, max_size=5), st.lists(st.lists(ids, max_size=4), max_size=4)),
            min_size=1, max_size=4,
        )
    )  # fmt: skip
    batch = make_batch(*groups)
    share, budget = data.draw(st.booleans()), data.draw(st.integers(1, 20))
    bins = plan_micro_batches(batch.sizes(), budget, share_prompts=share)
    micro_batches = pack(batch, bins, share_prompts=share, multiple=data.draw(st.integers(1, 4)))
    check_contexts(batch, micro_batches)
    rows = [batch.sizes().rows(members, share) for members in bins]
    assert [len(micro.token_ids) - micro.padding for micro in micro_batches] == rows
