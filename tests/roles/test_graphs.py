"""What micro-batches are padded to for CUDA graphs; the graphs themselves are tested on a GPU."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.batch import Batch, MicroBatch, pack
from rlflow.roles.graphs import LENGTHS, Captured, Shape, _fill, _padded, row_multiple
from tests.roles.samples import random_batch


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_a_budget_has_few_lengths(budget: int, multiple: int) -> None:
    part = row_multiple(budget, multiple)
    assert part % multiple == 0
    assert -(-budget // part) <= LENGTHS
    assert part < budget / LENGTHS + multiple + 1


def packed(batch: Batch, rows: int, *, with_last: bool = False) -> MicroBatch:
    members = [list(range(len(batch)))]
    return pack(batch, members, share_prompts=False, multiple=rows, with_last=with_last)[0]


def test_shapes_hold_their_micro_batches() -> None:
    """24 responses to prompts of 20, 130 and 1 tokens: rows as they come, the rest in steps."""
    batch = random_batch(prompt_lengths=(20, 130, 1), responses=8, longest=90)
    micro_batch = packed(batch, 512, with_last=True)
    shape = Shape.of(micro_batch)
    assert shape.rows == len(micro_batch.token_ids)
    assert shape.rows % 512 == 0
    assert shape.sequences == 32  # 24 and padding
    assert shape.longest == 256
    assert len(micro_batch.targets) <= shape.scored < len(micro_batch.targets) + shape.rows // LENGTHS + 1
    assert shape.samples == 32


def test_an_empty_micro_batch_has_a_shape() -> None:
    batch = random_batch(prompt_lengths=(5,), responses=1, longest=4)
    (micro_batch,) = pack(batch, [[]], share_prompts=False, multiple=64)
    assert Shape.of(micro_batch) == Shape(
        rows=64, sequences=8, longest=256, scored=8, samples=0, seen=0, longest_seen=0
    )


def test_sequences_that_share_prompts_see_these_too() -> None:
    """Two prompts of 20 and 30 tokens, two responses each: rows 0-19 are seen by the prompt and both responses."""
    batch = random_batch(prompt_lengths=(20, 30), responses=2, longest=40)
    (micro_batch,) = pack(batch, [[0, 1, 2, 3]], share_prompts=True, multiple=256)
    assert micro_batch.seen_rows is not None
    assert micro_batch.cu_seen is not None
    segments, bounds = micro_batch.segments, micro_batch.cu_seen.tolist()
    assert len(segments) == len(bounds) - 1
    for (prefix_start, prefix_end, start, end), first, last in zip(segments, bounds, bounds[1:], strict=False):
        seen = micro_batch.seen_rows[first:last].tolist()
        assert seen == [*range(prefix_start, prefix_end), *range(start, end)]
    shape = Shape.of(micro_batch)
    assert len(micro_batch.seen_rows) <= shape.seen < len(micro_batch.seen_rows) + 32
    held = _padded(micro_batch, shape)
    _fill(Captured(None, held, {}, {}), micro_batch, {})  # type: ignore[arg-type]
    assert held.cu_seen.tolist() == bounds + [bounds[-1]] * (9 - len(bounds))


def test_what_is_padded_counts_for_nothing() -> None:
    batch = random_batch(prompt_lengths=(20, 30), responses=2, longest=40)
    micro_batch = packed(batch, 256)
    shape, count = Shape.of(micro_batch), len(micro_batch.targets)
    fields = {"weights": torch.rand(count), "mask": torch.ones(count, dtype=torch.bool)}
    held = {name: torch.ones(shape.scored, dtype=values.dtype) for name, values in fields.items()}
    captured = Captured(None, _padded(micro_batch, shape), held, {})  # type: ignore[arg-type]
    _fill(captured, micro_batch, fields)
    found = captured.micro_batch
    assert torch.equal(found.token_ids, micro_batch.token_ids)
    assert torch.equal(found.targets[:count], micro_batch.targets)
    assert not found.targets[count:].any()
    assert not held["weights"][count:].any()
    assert not held["mask"][count:].any()
    assert torch.equal(held["weights"][:count], fields["weights"])
    assert found.cu_seqlens.tolist() == micro_batch.cu_seqlens.tolist() + [256] * (9 - len(micro_batch.cu_seqlens))
    assert found.max_seqlen == shape.longest
