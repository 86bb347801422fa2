"""Aggregation: one number whatever the cut, because the denominators are global."""

import pytest
import torch
import torch.distributed as dist

from rlflow.algorithms import Totals, aggregation_weights


def aggregate(mode: str, losses: list[list[float]], length: int | None = None) -> float:
    flat = torch.tensor([loss for row in losses for loss in row])
    lengths = torch.tensor([len(row) for row in losses])
    mask = torch.ones(len(flat), dtype=torch.bool)
    weights = aggregation_weights(mode, mask, lengths, Totals.count(mask, lengths), length=length)
    return float((weights * flat).sum())


@pytest.mark.parametrize(
    ("mode", "length", "expected"),
    [("token-mean", None, 0.5), ("seq-mean-token-mean", None, 0.0), ("seq-mean-token-sum", None, 1.0),
     ("seq-mean-token-sum-norm", 4, 0.25)],
)  # fmt: skip
def test_modes(mode: str, length: int | None, expected: float):
    """cases.md B08: one token with A = +1, three with A = −1, at ratio 1 (loss −A)."""
    assert aggregate(mode, [[-1.0], [1.0, 1.0, 1.0]], length) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
def test_micro_batches_change_nothing(split: list[int]):
    """cases.md B09 and B11: one token with loss 4 and three with 0 give 1.0; the gradient is not divided again."""
    parameter = torch.tensor(1.0, requires_grad=True)
    mask, lengths = torch.ones(4, dtype=torch.bool), torch.tensor([1, 3])
    weights = aggregation_weights("token-mean", mask, lengths, Totals.count(mask, lengths))
    losses = torch.tensor([4.0, 0.0, 0.0, 0.0])
    total = 0.0
    for part_weights, part_losses in zip(weights.split(split), losses.split(split), strict=True):
        loss = (part_weights * part_losses * parameter).sum()
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(1.0)
    assert parameter.grad is not None
    assert parameter.grad.item() == pytest.approx(1.0)


def loss_of_rank(mode: str) -> tuple[float, float]:
    def reduce(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(values)
        return values

    rank = dist.get_rank()
    losses = torch.tensor([1.0] * 5 if rank == 0 else [7.0])
    mask, lengths = torch.ones(len(losses), dtype=torch.bool), torch.tensor([len(losses)])
    parameter = torch.tensor(1.0, requires_grad=True)
    weights = aggregation_weights(mode, mask, lengths, Totals.count(mask, lengths, reduce))
    loss = (weights * losses * parameter).sum()
    loss.backward()
    assert parameter.grad is not None
    return float(reduce(loss.detach())), float(reduce(parameter.grad))


def test_ranks_count_together(world):
    """cases.md B10: five tokens of loss 1 and one of loss 7 give 12/6; a mean of means would give 4."""
    for loss, gradient in world(2, loss_of_rank, "token-mean"):
        assert loss == pytest.approx(2.0)
        assert gradient == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_nothing_to_learn_from_gives_zero_weights(mode: str):
    """cases.md B02: all masked; the count of trainable tokens says so."""
    mask, lengths = torch.zeros(3, dtype=torch.bool), torch.tensor([1, 2])
    totals = Totals.count(mask, lengths)
    assert totals == Totals(tokens=0, sequences=0)
    assert aggregation_weights(mode, mask, lengths, totals, length=4).tolist() == [0, 0, 0]


def test_masked_tokens_and_empty_rows_do_not_count():
    mask = torch.tensor([True, False, True, True])
    lengths = torch.tensor([2, 0, 2])
    totals = Totals.count(mask, lengths)
    assert totals == Totals(tokens=3, sequences=2)
    weights = aggregation_weights("seq-mean-token-mean", mask, lengths, totals)
    assert weights.tolist() == pytest.approx([1 / 2, 0, 1 / 4, 1 / 4])


def test_the_norm_mode_needs_its_constant():
    """cases.md B13: never a width of padding in its place."""
    with pytest.raises(ValueError, match="aggregation_length"):
        aggregate("seq-mean-token-sum-norm", [[1.0]])


def test_unknown_mode_is_refused():
    """cases.md B08."""
    with pytest.raises(ValueError, match="did you mean 'token-mean'"):
        aggregate("token_mean", [[1.0]])
