"""Masked statistics: nothing outside the mask reaches a result or a gradient."""

import math

import pytest
import torch

from rlflow.algorithms.masked import masked_mean, masked_sum, whiten


def test_nan_outside_the_mask_reaches_neither_result_nor_gradient():
    """cases.md B01."""
    values = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    assert masked_sum(values, mask) == 4
    mean = masked_mean(values, mask)
    assert mean == 2
    mean.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0, 0.5]


def test_mean_of_nothing_is_zero():
    """cases.md B02."""
    assert masked_mean(torch.tensor([math.nan]), torch.tensor([False])) == 0


def test_whitening_uses_the_sample_variance_inside_the_mask():
    """cases.md B03; the population variance would give ±1.224745."""
    whitened = whiten(torch.tensor([1.0, 2.0, 3.0, 99.0]), torch.tensor([True, True, True, False]))
    assert whitened.tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-6)


def test_whitening_one_value_only_shifts_it():
    """cases.md B03."""
    assert whiten(torch.tensor([5.0, math.nan]), torch.tensor([True, False])).tolist() == [0, 0]
