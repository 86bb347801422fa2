"""Masked statistics: nothing outside the mask reaches a result or a gradient."""

import math

import pytest
import torch

from rlflow.algorithms import Totals, aggregation_weights
from rlflow.algorithms.masked import masked, whiten


def test_nan_outside_the_mask_reaches_neither_result_nor_gradient():
    """cases.md B01: x = [1, nan, 3], mask = [1, 0, 1]: sum 4, mean 2."""
    values = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    mask, lengths = torch.tensor([True, False, True]), torch.tensor([3])
    assert masked(values, mask).sum() == 4
    weights = aggregation_weights("token-mean", mask, lengths, Totals.count(mask, lengths))
    mean = (weights * masked(values, mask)).sum()
    assert mean == 2
    mean.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0, 0.5]


def test_whitening_uses_the_sample_variance_inside_the_mask():
    """cases.md B03; the population variance would give ±1.224745."""
    whitened = whiten(torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False]))
    assert whitened.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-6)


def test_whitening_one_value_only_shifts_it():
    """cases.md B03."""
    assert whiten(torch.tensor([5.0, math.nan]), torch.tensor([True, False])).tolist() == [0, 0]
