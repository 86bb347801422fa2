"""The head on one GPU: log-probs, entropies and gradients against float64, in place, in float32 sums and in graphs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from rlflow.models import softmax
from rlflow.models.log_probs import token_log_probs
from rlflow.models.products import add_product
from rlflow.models.softmax import Slopes, Sums, VocabShard
from tests.gpu.devices import needs_gpus

pytestmark = needs_gpus(1)

ROWS, HIDDEN, TEMPERATURE = 257, 128, 0.7


def drawn(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight with 40 rows of padding, targets, and gradients of log-probs and entropies."""
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, device="cuda", generator=draw).to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(vocab + 40, HIDDEN, device="cuda", generator=draw)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (ROWS,), device="cuda", generator=draw)
    return hidden, weight, targets, torch.randn(2, ROWS, device="cuda", generator=draw)


def exact(vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Log-probs, entropies and both gradients in float64."""
    hidden, weight, targets, upstream = drawn(vocab, dtype)
    hidden, weight = (one.detach().double().requires_grad_() for one in (hidden, weight))
    whole = torch.log_softmax(hidden @ weight[:vocab].t() / TEMPERATURE, -1)
    log_probs = whole.gather(1, targets[:, None])[:, 0]
    entropy = -(whole.exp() * whole).sum(-1)
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def gap(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in the backward pass"])
@pytest.mark.parametrize("vocab", [5003, 151_936], ids=["odd", "large"])
@pytest.mark.parametrize("chunk_tokens", [100, 1024], ids=["chunks", "whole"])
@pytest.mark.parametrize(
    ("dtype", "exact_logits", "largest", "gradients"),
    [
        pytest.param(torch.float32, False, 1e-5, 1e-5, id="float32"),
        pytest.param(torch.bfloat16, False, 1e-2, 2e-2, id="bfloat16"),
        pytest.param(torch.bfloat16, True, 1e-5, 1e-2, id="exact logits"),
    ],
)
def test_all_is_that_of_float64(
    vocab: int, chunk_tokens: int, dtype: torch.dtype, exact_logits: bool, largest: float, gradients: float,
    at_once: bool,
) -> None:  # fmt: skip
    hidden, weight, targets, upstream = drawn(vocab, dtype)
    log_probs, entropy = token_log_probs(
        hidden, weight, targets, VocabShard(0, vocab),
        temperature=TEMPERATURE, chunk_tokens=chunk_tokens, with_entropy=True, exact_logits=exact_logits,
        slopes_of=(lambda rows, *_: (upstream[0][rows], upstream[1][rows])) if at_once else None,
    )  # fmt: skip
    assert entropy is not None
    (log_probs * upstream[0] + entropy * upstream[1]).sum().backward()
    expected = exact(vocab, dtype)
    gaps = [gap(one, other) for one, other in zip((log_probs, entropy), expected[:2], strict=True)]  # type: ignore[arg-type]
    assert max(gaps) < largest
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not weight.grad[vocab:].any()
    assert max(gap(hidden.grad, expected[2]), gap(weight.grad, expected[3])) < gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 777, 9000])
def test_a_shard_is_read_as_on_a_cpu(size: int, dtype: torch.dtype) -> None:
    shard, draw = VocabShard(500, size), torch.Generator().manual_seed(size)
    logits = (4 * torch.randn(33, size, generator=draw)).to(dtype)
    targets = torch.randint(400, 600 + size, (33,), generator=draw)
    sums, expected = torch.empty(4, 33, device="cuda"), torch.empty(4, 33)
    softmax.sum_up(logits.cuda(), targets.cuda(), shard, TEMPERATURE, sums, with_entropy=True)
    softmax.sum_up(logits, targets, shard, TEMPERATURE, expected, with_entropy=True)
    assert torch.allclose(sums.cpu(), expected, rtol=1e-5, atol=1e-5)
    log_norm = Sums(*expected).total.log() + expected[0]
    slopes = Slopes(*torch.randn(2, 33, generator=draw), log_norm, torch.rand(33, generator=draw))
    on_gpu = Slopes(*(one.cuda() for one in vars(slopes).values()))
    found = softmax.turn_into_gradient(logits.cuda(), targets.cuda(), shard, TEMPERATURE, on_gpu, torch.float32)
    on_cpu = softmax.turn_into_gradient(logits.float(), targets, shard, TEMPERATURE, slopes, torch.float32)
    assert torch.allclose(found.cpu(), on_cpu, rtol=1e-4, atol=1e-5)


def test_more_logits_than_an_int32_counts() -> None:
    rows, size = 16_384, 151_936
    logits = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16)
    targets = torch.arange(rows, device="cuda")
    last = logits[-3:].double()
    sums = torch.empty(4, rows, device="cuda")
    softmax.sum_up(logits, targets, VocabShard(0, size), 1.0, sums, with_entropy=False)
    log_norm = sums[1].log() + sums[0]
    assert torch.allclose(log_norm[-3:].double(), last.logsumexp(-1), atol=1e-5)
    ones = torch.ones(rows, device="cuda")
    slopes = Slopes(ones, None, log_norm, ones[:0])
    gradient = softmax.turn_into_gradient(logits, targets, VocabShard(0, size), 1.0, slopes, torch.bfloat16)
    assert gradient.data_ptr() == logits.data_ptr()
    expected = torch.nn.functional.one_hot(targets[-3:], size) - last.softmax(-1)
    assert torch.allclose(gradient[-3:].double(), expected, atol=1e-6, rtol=1e-2)


def test_products_are_added_in_float32() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    left, right = (torch.randn(size, device="cuda", generator=draw).bfloat16() for size in ((300, 64), (64, 96)))
    total = torch.randn(400, 96, device="cuda", generator=draw)
    expected = total.double()
    for _ in range(3):
        add_product(total[:300], left, right)
        expected[:300] += left.double() @ right.double()
    assert torch.allclose(total.double(), expected, atol=1e-4)


@contextmanager
def without_waiting() -> Iterator[None]:
    """Fail where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in the backward pass"])
@pytest.mark.parametrize("exact_logits", [False, True], ids=["rounded", "exact"])
@pytest.mark.parametrize("chunk_tokens", [100, 1024], ids=["chunks", "whole"])
def test_a_graph_does_the_same_again(chunk_tokens: int, exact_logits: bool, at_once: bool) -> None:
    hidden, weight, targets, upstream = drawn(5003, torch.bfloat16)
    weight.adds_to_main_grad, weight.main_grad = True, torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def compute() -> tuple[Tensor, Tensor]:
        log_probs, _ = token_log_probs(
            hidden, weight, targets, VocabShard(0, 5003), chunk_tokens=chunk_tokens, exact_logits=exact_logits,
            slopes_of=(lambda rows, *_: (upstream[0][rows], None)) if at_once else None,
        )  # fmt: skip
        (found,) = torch.autograd.grad((log_probs * upstream[0]).sum(), [hidden])
        return log_probs, found

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compute()
        weight.main_grad.zero_()  # type: ignore[attr-defined]
        with without_waiting():
            eager = compute()
        grad_weight = weight.main_grad.clone()  # type: ignore[attr-defined]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = compute()
        weight.main_grad.zero_()  # type: ignore[attr-defined]
        for one in captured:
            one.detach().fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))
    assert torch.equal(weight.main_grad, grad_weight)  # type: ignore[attr-defined]
