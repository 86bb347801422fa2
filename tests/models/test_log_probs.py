"""Log-probs and entropies: the numbers of algorithms.md, whole and cut over ranks, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.models.log_probs import VocabShard, token_log_probs

Case = tuple[list[float], list[float], list[float], list[float], list[float]]


def scores(logits: Tensor, target: int, size: int | None = None, **options: Any) -> tuple[float, float]:
    """Log-prob and entropy of one token whose logits are the head's first column."""
    shard = VocabShard(0, len(logits) if size is None else size)
    log_probs, entropy = token_log_probs(
        torch.ones(1, 1), logits[:, None], torch.tensor([target]), shard, with_entropy=True, **options
    )
    assert entropy is not None
    return log_probs.item(), entropy.item()


def test_padding_takes_no_part() -> None:  # cases.md A08: −ln 5, not −ln 8
    assert scores(torch.zeros(8), 0, size=5) == pytest.approx((-1.609438, 1.609438), abs=1e-6)


def test_temperature_divides_the_logits() -> None:  # cases.md B19
    logits = torch.tensor([2.0, 1.0, 0.0])
    assert scores(logits, 0, temperature=0.5)[0] == pytest.approx(-0.142932, abs=1e-6)
    assert scores(logits, 0)[0] == pytest.approx(-0.407606, abs=1e-6)


def test_large_logits_stay_finite() -> None:
    log_prob, entropy = scores(torch.tensor([3e4, 0.0, -3e4]), 0)
    assert log_prob == pytest.approx(0.0)
    assert entropy == pytest.approx(0.0)


def on_two_shards(shard_size: int, real: int) -> list[tuple[float, list[float]]]:
    """Log-prob and entropy of target 1 under logits [1, 2 | 3, 4], and their gradients for this rank's logits."""
    rank = dist.get_rank()
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0, 99.0, 99.0])[rank * shard_size : (rank + 1) * shard_size]
    shard = VocabShard(rank * shard_size, min(max(real - rank * shard_size, 0), shard_size), dist.group.WORLD)
    found = []
    for wanted in (0, 1, 1, 0):
        weight = logits[:, None].clone().requires_grad_()
        scored = token_log_probs(torch.ones(1, 1), weight, torch.tensor([1]), shard, with_entropy=True)[wanted]
        assert scored is not None
        scored.sum().backward()
        assert weight.grad is not None
        found.append((scored.item(), weight.grad[:, 0].tolist()))
    return found


@pytest.mark.parametrize("shard_size", [2, 3], ids=["even", "padded"])
def test_a_vocabulary_on_two_ranks(world: Callable[..., Any], shard_size: int) -> None:  # cases.md B23, B24
    ranks = world(2, on_two_shards, shard_size, 4)
    gradients = {
        0: [-0.032059, 0.912856, -0.236883, -0.643914, 0.0, 0.0],
        1: [0.079911, 0.130076, 0.116701, -0.326688, 0.0, 0.0],
    }
    for place, wanted in enumerate((0, 1, 1, 0)):
        value = (-2.440190, 0.947537)[wanted]
        assert [rank[place][0] for rank in ranks] == pytest.approx([value, value], abs=1e-6)
        gradient = ranks[0][place][1] + ranks[1][place][1]
        assert gradient == pytest.approx(gradients[wanted][: 2 * shard_size], abs=1e-6)


def test_a_rank_may_hold_padding_only(world: Callable[..., Any]) -> None:
    for found in world(2, on_two_shards, 4, 4):
        assert found[0][0] == pytest.approx(-2.440190, abs=1e-6)


def gradients(
    chunk_tokens: int, dtype: torch.dtype = torch.float32, exact_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(64, 16, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(0, 60, (37,), generator=draw)
    upstream = torch.randn(2, 37, generator=draw)
    log_probs, entropy = token_log_probs(
        hidden, weight, targets, VocabShard(0, 60),
        temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True, exact_logits=exact_logits,
    )  # fmt: skip
    assert entropy is not None
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return log_probs.detach(), hidden.grad, weight.grad


def test_gradients_are_those_of_log_softmax() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=draw).requires_grad_()
    weight = torch.randn(64, 16, generator=draw).requires_grad_()
    targets = torch.randint(0, 60, (37,), generator=draw)
    upstream = torch.randn(2, 37, generator=draw)
    predictions = torch.log_softmax(hidden @ weight[:60].t() / 0.7, -1)
    log_probs = predictions.gather(1, targets[:, None])[:, 0]
    entropy = -(predictions.exp() * predictions).sum(-1)
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    found = gradients(1024)
    for value, expected in zip(found, (log_probs, hidden.grad, weight.grad), strict=True):
        assert torch.allclose(value, expected, atol=2e-5)  # type: ignore[arg-type]
    assert torch.equal(found[2][60:], torch.zeros(4, 16))


def test_chunks_change_nothing() -> None:
    for whole, cut in zip(gradients(1024), gradients(10), strict=True):
        assert torch.allclose(whole, cut, atol=1e-6)


def test_bfloat16_models_get_exact_softmax() -> None:
    exact, _, weight_grad = gradients(1024)
    rounded, _, rounded_grad = gradients(10, torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert rounded_grad.dtype == torch.bfloat16
    assert (rounded - exact).abs().mean() < 0.05
    assert torch.allclose(rounded_grad.float(), weight_grad, atol=0.15)


def test_exact_logits_are_not_rounded() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 16, generator=draw).bfloat16() for size in (37, 64))
    targets = torch.randint(0, 60, (37,), generator=draw)
    expected = torch.log_softmax(hidden.double() @ weight[:60].double().t() / 0.7, -1).gather(1, targets[:, None])[:, 0]
    for chunk_tokens in (1024, 10):
        exact, hidden_grad, weight_grad = gradients(chunk_tokens, torch.bfloat16, exact_logits=True)
        assert torch.allclose(exact.double(), expected, atol=1e-5)
        assert (gradients(chunk_tokens, torch.bfloat16)[0] - expected).abs().max() > 1e-3
        assert hidden_grad.dtype == weight_grad.dtype == torch.bfloat16
        assert torch.allclose(hidden_grad.float(), gradients(1024)[1], atol=0.3, rtol=0.1)


Found = tuple[Tensor, Tensor, Tensor, Tensor]


def learn(chunk_tokens: int, dtype: torch.dtype, *, at_once: bool, in_place: bool, shard: VocabShard) -> Found:
    """Log-probs, entropies and both gradients of a loss that is not linear in them."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(64, 16, generator=draw)[: shard.size + 2].to(dtype).requires_grad_()
    targets, scale = torch.randint(0, 60, (37,), generator=draw), torch.randn(37, generator=draw)
    if in_place:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        weight.adds_to_main_grad = True  # type: ignore[attr-defined]

    def slopes_of(rows: slice, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert entropy is not None
        return scale[rows] * log_probs.exp(), 2 * scale[rows] * entropy

    log_probs, entropy = token_log_probs(
        hidden, weight, targets, shard, temperature=0.7, chunk_tokens=chunk_tokens, with_entropy=True,
        slopes_of=slopes_of if at_once else None,
    )  # fmt: skip
    assert entropy is not None
    (scale * (log_probs.exp() + entropy.square())).sum().backward()
    found = weight.main_grad if in_place else weight.grad  # type: ignore[attr-defined]
    assert hidden.grad is not None
    assert (weight.grad is None) == in_place
    return log_probs.detach(), entropy.detach(), hidden.grad, found


@pytest.mark.parametrize("in_place", [True, False], ids=["into main_grad", "through autograd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk_tokens", [10, 1024])
def test_gradients_that_are_known_at_once_are_the_same(chunk_tokens: int, dtype: torch.dtype, in_place: bool) -> None:
    how: dict[str, Any] = {"in_place": in_place, "shard": VocabShard(0, 60)}
    late, early = (learn(chunk_tokens, dtype, at_once=at_once, **how) for at_once in (False, True))
    for expected, found in zip(late, early, strict=True):
        assert torch.equal(found, expected)


def learn_on_two_shards(at_once: bool) -> Found:
    shard = VocabShard(30 * dist.get_rank(), 30, dist.group.WORLD)
    return learn(10, torch.float32, at_once=at_once, in_place=False, shard=shard)


def test_gradients_are_known_at_once_on_two_ranks(world: Callable[..., Any]) -> None:
    for expected, found in zip(world(2, learn_on_two_shards, False), world(2, learn_on_two_shards, True), strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


def test_nothing_is_learned_where_nothing_is_to_be() -> None:
    def slopes_of(rows: slice, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("there is no backward pass")

    with torch.no_grad():
        token_log_probs(torch.ones(2, 4), torch.ones(8, 4), torch.tensor([1, 2]), VocabShard(0, 8), slopes_of=slopes_of)


def test_no_tokens_give_no_gradient() -> None:
    hidden, weight = torch.zeros(0, 16, requires_grad=True), torch.ones(64, 16, requires_grad=True)
    for slopes_of in (None, lambda *of: (of[1], None)):
        weight.grad = None
        nothing = torch.zeros(0, dtype=torch.int64)
        log_probs, _ = token_log_probs(hidden, weight, nothing, VocabShard(0, 60), slopes_of=slopes_of)
        log_probs.sum().backward()
        assert weight.grad is not None
        assert not weight.grad.any()
