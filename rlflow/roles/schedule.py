"""The learning rate as a pure function of the step, so that nothing about it needs saving."""

from __future__ import annotations

import math

from rlflow.config.schema import Optimizer


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """The rate of a step, counted from 0: linear warm-up to `lr`, then constant, linear or cosine decay to `min_lr`.

    The decay reaches `min_lr` at step `total_steps`; cosine 1e-3 → 0 over 100 steps is 5e-4 at step 50.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / (settings.warmup_steps + 1)
    if settings.schedule == "constant":
        return settings.lr
    decay_steps = max(total_steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / decay_steps, 1.0)
    left = 1.0 - progress if settings.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * left
