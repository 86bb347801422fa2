"""What is measured on samples: means over all of them, wherever they are, and accuracy on held-out prompts.

A mean counts only samples that have the value: an unscorable one lowers no mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from rlflow.batch import Sample


def mean_over_ranks(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of each name's values over all ranks; NaN values are not counted. Collective over the job."""
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for name, value in values:
        if not math.isnan(value):
            total, count = sums[name]
            sums[name] = total + value, count + 1
    gathered: list[dict[str, tuple[float, int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(sums))
    names = dict.fromkeys(name for part in gathered for name in part)
    means = {}
    for name in names:
        parts = [part[name] for part in gathered if name in part]
        means[name] = sum(total for total, _ in parts) / sum(count for _, count in parts)
    return means


def sample_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Means over all ranks' samples: reward, every score by name, lengths, and how many were cut off."""

    def values() -> Iterable[tuple[str, float]]:
        for sample in samples:
            yield f"{prefix}/reward", math.nan if sample.reward is None else sample.reward
            yield from ((f"{prefix}/{name}", score) for name, score in sample.scores.items())
            yield f"{prefix}/response_length", float(len(sample.response_ids))
            yield f"{prefix}/prompt_length", float(len(sample.prompt.token_ids))
            yield f"{prefix}/truncated", float(sample.truncated)

    return mean_over_ranks(values())


def pass_at(k: int, outcomes: Sequence[bool]) -> float:
    """The unbiased estimate of the chance that at least one of k samples is right, from n ≥ k outcomes.

    1 − C(n − c, k) / C(n, k) with c right ones (Chen et al. 2021, eq. 1).
    """
    n, right = len(outcomes), sum(outcomes)
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {n}")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)
