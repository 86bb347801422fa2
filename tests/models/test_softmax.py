"""The softmax's kernels in Triton's interpreter, and shards put together, against plain float64 softmax."""

from itertools import pairwise, product

import torch
from torch import Tensor

from rlflow.models import softmax
from rlflow.models.softmax import Slopes, Sums, VocabShard
from tests.interpreter import interpret

ROWS, SIZE, START = 5, 70, 10
TARGETS = torch.tensor([10, 33, 79, 9, 80])  # the shard's first, one within, its last, one before and one behind it


def drawn() -> tuple[Tensor, Tensor]:
    """Logits of a shard, and gradients of log-probs and entropies."""
    draw = torch.Generator().manual_seed(0)
    return 5 * torch.randn(ROWS, SIZE, generator=draw), torch.randn(2, ROWS, generator=draw)


def test_shards_sum_up_to_the_whole() -> None:
    logits, _ = drawn()
    whole = torch.log_softmax(logits.double(), -1)
    cuts = (0, 30, 30, SIZE)  # one shard is empty: of a vocabulary so padded that a rank holds nothing else
    shards = [VocabShard(START + first, last - first) for first, last in pairwise(cuts)]
    parts = []
    for shard in shards:
        parts.append(torch.full((4, ROWS), torch.nan))
        own = logits[:, shard.start - START : shard.start - START + shard.size]
        softmax.sum_up(own, TARGETS, shard, 1.0, parts[-1], with_entropy=True)
    peak = torch.stack([part[0] for part in parts]).amax(0)
    total, weighted, target = torch.stack([Sums(*part)._relative_to(peak) for part in parts]).sum(0)
    assert torch.allclose(total.log() + peak, logits.double().logsumexp(-1).float())
    assert torch.allclose(total.log() - weighted / total, -(whole.exp() * whole).sum(-1).float(), rtol=1e-5)
    assert torch.equal(target[:3], logits[range(3), TARGETS[:3] - START])
    assert not target[3:].any()


def check_kernels() -> None:
    """Run the kernels on host memory in blocks of which a row has several, the last not full."""
    from rlflow.models import softmax_kernel

    softmax_kernel.SUM_BLOCK, softmax_kernel.GRADIENT_BLOCK = 16, 32
    shard = VocabShard(START, SIZE)
    logits, grads = drawn()
    for temperature, with_entropy, dtype in product((1.0, 0.7), (False, True), (torch.float32, torch.bfloat16)):
        own = logits.to(dtype)
        expected, found = torch.zeros(4, ROWS), torch.full((4, 2 * ROWS), torch.nan)
        softmax.sum_up(own, TARGETS, shard, temperature, expected, with_entropy=with_entropy)
        softmax_kernel.sum_up(own, TARGETS, START, temperature, found[:, ROWS:], with_entropy=with_entropy)
        assert torch.allclose(found[:, ROWS:], expected, rtol=1e-5, atol=1e-6)
        sums = Sums(*expected)
        entropy = sums.total.log() - sums.weighted / sums.total if with_entropy else torch.empty(0)
        slopes = Slopes(grads[0], grads[1] if with_entropy else None, sums.total.log() + sums.peak, entropy)
        gradient = torch.full((ROWS, SIZE), torch.nan)
        softmax_kernel.turn_into_gradient(own, TARGETS, START, temperature, slopes, gradient)
        softmax.turn_into_gradient(exact := own.float(), TARGETS, shard, temperature, slopes, torch.float32)
        assert torch.allclose(gradient, exact, rtol=1e-5, atol=1e-6)


def test_the_kernels_in_the_interpreter() -> None:
    interpret(check_kernels)
