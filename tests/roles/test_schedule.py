"""Learning rates by step."""

import pytest

from rlflow.config.schema import Optimizer
from rlflow.roles import learning_rate


def test_cosine() -> None:  # cases.md F06
    settings = Optimizer(lr=1e-3, schedule="cosine")
    assert learning_rate(settings, 0, 100) == 1e-3
    assert learning_rate(settings, 50, 100) == pytest.approx(5e-4)
    assert learning_rate(settings, 75, 100) == pytest.approx(1.464466e-4)
    assert learning_rate(settings, 100, 100) == pytest.approx(0.0)


def test_linear_ends_at_its_minimum() -> None:
    settings = Optimizer(lr=1.0, min_lr=0.2, schedule="linear")
    assert [learning_rate(settings, step, 4) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_warm_up_starts_above_zero_and_ends_at_the_peak() -> None:
    settings = Optimizer(lr=1.0, warmup_steps=3)
    assert [learning_rate(settings, step, 9) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_decay_begins_after_the_warm_up() -> None:
    settings = Optimizer(lr=1.0, warmup_steps=2, schedule="linear")
    assert learning_rate(settings, 2, 10) == 1.0
    assert learning_rate(settings, 6, 10) == pytest.approx(0.5)
