"""Context parallelism: attention and predictions of rows on several ranks are those of one process, gradients too."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.batch import MicroBatch, pack
from rlflow.batch.zigzag import context_rows
from tests.roles.samples import random_batch

HEADS, GROUPS, SIZE, VALUE = 4, 2, 8, 6
WINDOW = 5


def packed_for(size: int) -> MicroBatch:
    batch = random_batch()
    return pack(batch, [list(range(len(batch)))], share_prompts=False, multiple=3, context=size)[0]


def core_attention(kind: str, size: int) -> tuple[Any, int, int]:
    """A core attention over so many ranks, its number of key heads and the size of its values."""
    from rlflow.models.attention import PackedAttention, WindowAttention

    groups = SimpleNamespace(cp=dist.group.WORLD) if size > 1 else None
    config = SimpleNamespace(kv_channels=SIZE)
    if kind == "latent":
        return PackedAttention(config, 0.3, groups), HEADS, VALUE
    return (WindowAttention if kind == "window" else PackedAttention)(config, 0.3, groups), GROUPS, SIZE


def attend_and_learn(kind: str, micro_batch: MicroBatch, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output of an attention, and the gradients of its inputs."""
    from rlflow.models import Scoring, pack_input
    from rlflow.models.rope import Rope, Ropes, inverse_frequencies

    rope = Rope(inverse_frequencies(1e4, SIZE))
    scoring = Scoring(micro_batch.predict_at, micro_batch.targets)
    packed = pack_input(micro_batch, Ropes(rope, rope, WINDOW), torch.float32, scoring)
    attention, _, _ = core_attention(kind, micro_batch.context_size)
    leaves = [states.clone().requires_grad_() for states in inputs]
    out = attention(*(leaf.unsqueeze(1) for leaf in leaves), None, packed_seq_params=packed)[:, 0]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def greatest_differences(kind: str) -> list[float]:
    """Of this rank's rows from one process's, relative to the greatest value: output, query, key, value."""
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = packed_for(size)
    _, groups, value = core_attention(kind, 1)
    draw = torch.Generator().manual_seed(0)
    total = len(whole.token_ids)
    shapes = ((HEADS, SIZE), (groups, SIZE), (groups, value), (HEADS * value,))
    *inputs, upstream = (torch.randn(total, *shape, generator=draw) for shape in shapes)
    rows = context_rows(whole.segments, rank, size)
    expected = attend_and_learn(kind, whole, inputs, upstream)
    found = attend_and_learn(kind, whole.for_context_rank(rank, size), [each[rows] for each in inputs], upstream[rows])
    return [
        float((mine - theirs[rows]).abs().max() / theirs.abs().max())
        for mine, theirs in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["packed", "window", "latent"])
def test_attention_over_ranks_is_that_of_one_process(world: Callable[..., Any], kind: str, size: int) -> None:
    for differences in world(size, greatest_differences, kind):
        assert max(differences) < 1e-5, differences


def predictions(scored: list[list[int]]) -> tuple[list[float], list[float]]:
    """What each rank knows after a gather of its own numbers, and the gradient of Σ i·x[i] for them."""
    from rlflow.models.context import gather_predictions

    places = torch.tensor(scored[dist.get_rank()], dtype=torch.int64)
    local = (places.float() + 10).requires_grad_()
    whole = gather_predictions(local, places, sum(map(len, scored)), dist.group.WORLD)
    (whole * torch.arange(len(whole))).sum().backward()
    assert local.grad is not None
    return whole.tolist(), local.grad.tolist()


def test_predictions_of_all_ranks_with_gradients_that_count_once(world: Callable[..., Any]) -> None:
    """cases.md B10: each rank computes the loss of all tokens, and learns from its own."""
    found = world(2, predictions, [[0, 3, 4], [2, 1]])
    assert [whole for whole, _ in found] == [[10.0, 11.0, 12.0, 13.0, 14.0]] * 2
    assert [gradient for _, gradient in found] == [[0.0, 3.0, 4.0], [2.0, 1.0]]


def test_a_rank_without_predictions_knows_the_others(world: Callable[..., Any]) -> None:
    assert world(2, predictions, [[], [1, 0]]) == [([10.0, 11.0], []), ([10.0, 11.0], [1.0, 0.0])]


@pytest.mark.parametrize("size", [2, 4])
def test_bounds_for_the_kernel_align_each_chunk_with_the_end_of_its_keys(size: int) -> None:
    """What CUDA's kernel computes, written out: query i of m sees the keys up to i + n − m of n."""
    from rlflow.models.packed import kernel_bounds, own_part

    micro_batch = packed_for(size)
    parts = [context_rows(micro_batch.segments, rank, size) for rank in range(size)]
    order = torch.cat(parts)
    for rank, rows in enumerate(parts):
        local = micro_batch.for_context_rank(rank, size)
        bounds = kernel_bounds(local, *own_part(local))
        queries, keys, seen = bounds["cu_seqlens_q"].tolist(), bounds["cu_seqlens_kv"].tolist(), bounds["seen_rows"]
        assert (queries[-1], keys[-1]) == (len(rows), len(seen))
        for chunk in range(len(queries) - 1):
            own = rows[queries[chunk] : queries[chunk + 1]].tolist()
            visible = order[seen[keys[chunk] : keys[chunk + 1]]].tolist()
            assert len(own) <= bounds["max_seqlen_q"]
            assert len(visible) <= bounds["max_seqlen_kv"]
            start = next(start for *_, start, end in micro_batch.segments if start <= own[0] < end)
            assert visible == list(range(start, own[0])) + own
