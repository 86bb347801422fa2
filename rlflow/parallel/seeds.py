"""Seeds: one run seed gives every purpose and every rank a seed of its own, the same on every machine and run."""

from __future__ import annotations

import hashlib
import random

import numpy
import torch


def derive_seed(run_seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2^31) for a purpose, such as `derive_seed(seed, "rollout", step, prompt_id, index)`.

    Different purposes give independent seeds; "1" and 1 are different.
    """
    text = "\x1f".join([repr(run_seed), *map(repr, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def seed_process(run_seed: int, rank: int) -> None:
    """Seed this process's Python, numpy and torch generators, each rank differently."""
    seed = derive_seed(run_seed, "process", rank)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
