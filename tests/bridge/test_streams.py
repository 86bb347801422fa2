"""How streams are cut: aligned, in order, never more than a bucket, and in rounds enough to overlap."""

from math import prod

import pytest

from megatron_bridge.families import load_architecture
from megatron_bridge.layouts import MegatronLayout, VLLMLayout
from megatron_bridge.plan import Copy, Place, Plan, make_plan
from megatron_bridge.streams import ALIGNMENT, BUCKET, DIGEST_BYTES, compact, messages, rounds, slots
from tests.bridge.toys import toy


def test_messages_are_cut_at_multiples_and_keep_the_order() -> None:
    rows = Copy((3, 10), Place(0, "a", 5, (20, 1)), Place(1, "b", 0, (10, 1)))
    tail = Copy((7,), Place(0, "c", 0, (1,)), Place(1, "d", 0, (1,)))
    sent = messages([rows, tail], 3, "source", 8)
    assert [message.elements for message in sent] == [16, 16, 5]
    assert [(copy.shape, copy.source.offset, copy.target.offset) for copy in sent[0].copies] == [
        ((10,), 5, 0),
        ((6,), 25, 10),
    ]
    assert [(copy.shape, copy.source.offset, copy.target.offset) for copy in sent[1].copies] == [
        ((4,), 31, 0),
        ((10,), 45, 4),
        ((2,), 0, 14),
    ]
    assert sent[1].parameters == ["a", "c"]
    assert {copy.target.parameter for message in sent for copy in message.copies} == {BUCKET}
    received = messages([rows, tail], 3, "target", 8)
    assert [(copy.source.offset, prod(copy.shape)) for copy in received[1].copies] == [(0, 14), (14, 2)]
    assert received[1].copies[0].target == Place(1, "b", 16, (1,))


def _largest(plan: Plan, count: int, digests: bool) -> tuple[int, int]:
    """Bytes of the largest bucket and, of all payload, how much one rank receives at most."""
    multiple, ranks = ALIGNMENT // plan.itemsize, {*plan.source.ranks, *plan.target.ranks}
    largest = payload = 0
    for rank in ranks:
        receives = {
            peer: messages(compact(plan.into(rank, peer)), count, "target", multiple) for peer in plan.sources(rank)
        }
        for k in range(count):
            largest = max(largest, sum(slot.nbytes for slot in slots(receives, k, plan.itemsize, digests)))
        payload = max(payload, plan.received_bytes(rank))
    return largest, payload


@pytest.mark.parametrize("digests", [False, True])
@pytest.mark.parametrize("cap", [700, 1000, 4096])
def test_a_bucket_holds_messages_alignment_and_digests(cap: int, digests: bool) -> None:
    plan = make_plan(
        MegatronLayout(toy(num_attention_heads=8, num_key_value_heads=4), 4, pp=2), VLLMLayout(toy(
            num_attention_heads=8, num_key_value_heads=4), 1, (8, 9)), ranks_per_node=1
    )  # fmt: skip
    count = rounds(plan, cap, 0, digests)
    largest, payload = _largest(plan, count, digests)
    assert largest <= cap
    slack = 9 * (ALIGNMENT + DIGEST_BYTES * digests)  # of eight peers, and what is left of the bucket
    assert count <= payload / (cap - slack) + 1


def test_rounds_overlap_where_that_pays() -> None:
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    arch = load_architecture(
        {"model_type": "llama", "num_hidden_layers": 80, "intermediate_size": 4096, "vocab_size": 1024, **sizes}
    )
    layers, mib = 80 * (4 * 1024 * 1024 + 3 * 1024 * 4096) * 2, 1 << 20
    plan = make_plan(MegatronLayout(arch), VLLMLayout(arch, 1, (1,)))
    assert layers == 2560 * mib
    assert rounds(plan, 4096 * mib, 0, False) == 4  # one bucket would do
    assert rounds(plan, 256 * mib, 0, False) == 11
    assert rounds(make_plan(MegatronLayout(toy()), VLLMLayout(toy(), 1, (1,))), 256 * mib, 0, False) == 1
