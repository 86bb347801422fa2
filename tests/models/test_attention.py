"""Packed attention equals plain attention of each sequence, with prompts held once or many times."""

import pytest
import torch
from torch import Tensor

from rlflow.batch.zigzag import Segment
from rlflow.models.attention import attend, plan_attention

PACKED: list[Segment] = [(0, 0, 0, 7), (7, 7, 7, 10), (10, 10, 10, 17), (17, 17, 17, 18)]
# a prompt of 5 with responses of 4, 1 and 6; a lone sequence; a prompt of 2 with two responses; padding
SHARED: list[Segment] = [
    (0, 0, 0, 5), (0, 5, 5, 9), (0, 5, 9, 10), (0, 5, 10, 16),
    (16, 16, 16, 19), (19, 19, 19, 21), (19, 21, 21, 24), (19, 21, 24, 28), (28, 28, 28, 32),
]  # fmt: skip


def plain(query: Tensor, key: Tensor, value: Tensor, segments: list[Segment], window: int = 100) -> Tensor:
    rows = len(query)
    visible = torch.zeros(rows, rows, dtype=torch.bool)
    for prefix_start, prefix_end, start, end in segments:
        visible[start:end, prefix_start:prefix_end] = True
        visible[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
        positions = torch.cat([torch.arange(prefix_end - prefix_start), torch.arange(end - start)])
        positions[prefix_end - prefix_start :] += prefix_end - prefix_start
        seen = [*range(prefix_start, prefix_end), *range(start, end)]
        near = positions[:, None] - positions < window
        visible[start:end, seen] &= near[prefix_end - prefix_start :]
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value).flatten(1)


@pytest.mark.parametrize("segments", [PACKED, SHARED], ids=["packed", "shared"])
def test_output_and_gradient_of_each_sequence(segments: list[Segment]) -> None:
    rows = segments[-1][3]
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, heads, 8, generator=draw, requires_grad=True) for heads in (4, 2, 2)]
    upstream = torch.randn(rows, 32, generator=draw)
    plan = plan_attention(segments, torch.device("cpu"), torch.float32)
    found = attend(*inputs, plan, 0.3)
    expected = plain(*inputs, segments)
    assert torch.allclose(found, expected, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("segments", [PACKED, SHARED], ids=["packed", "shared"])
def test_rows_see_a_window_over_their_prompt_and_themselves(segments: list[Segment], window: int) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(segments[-1][3], heads, 8, generator=draw) for heads in (4, 2, 2)]
    plan = plan_attention(segments, torch.device("cpu"), torch.float32, window)
    assert torch.allclose(attend(*inputs, plan, 0.3), plain(*inputs, segments, window), atol=1e-5)
    assert all(batch.seen_rows.numel() <= 2 * window * batch.size for batch in plan.batches)


@pytest.mark.parametrize("segments", [PACKED, SHARED], ids=["packed", "shared"])
def test_short_bfloat16_segments_are_as_exact_as_their_inputs(segments: list[Segment]) -> None:
    rows = segments[-1][3]
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, heads, 8, generator=draw).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    upstream = torch.randn(rows, 32, generator=draw)
    plan = plan_attention(segments, torch.device("cpu"), torch.bfloat16)
    assert all(batch.is_short for batch in plan.batches)
    found, expected = attend(*inputs, plan, 0.3), plain(*(each.float() for each in inputs), segments)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected, atol=2e-2)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream.bfloat16()),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        assert torch.allclose(mine.float(), theirs.float(), atol=5e-2, rtol=2e-2)


def test_similar_lengths_share_a_call() -> None:
    segments, start = [], 0
    for length in (64, 60, 50, 20, 19, 18, 3):
        segments.append((start, start, start, start + length))
        start += length
    plan = plan_attention(segments, torch.device("cpu"), torch.float32)
    assert [batch.size for batch in plan.batches] == [3, 3, 1]


def test_empty_segments_are_no_segments() -> None:
    plan = plan_attention([(0, 0, 0, 3), (3, 3, 3, 3)], torch.device("cpu"), torch.float32)
    assert [batch.size for batch in plan.batches] == [1]
