"""What is measured on samples: means and counts over all of them, wherever they are, and pass@k.

A mean counts only samples that have the value: an unscorable one lowers no mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch.distributed as dist

from rlflow.batch import Sample

Value = TypeVar("Value")


def from_all_ranks(value: Value) -> list[Value]:
    """Every rank's value, in the order of ranks: for a few numbers, never for samples. Collective over the job."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(counts: Mapping[str, float]) -> dict[str, float]:
    """Counts that every rank has under the same names, added up. Collective over the job."""
    parts = from_all_ranks(counts)
    return {name: sum(part[name] for part in parts) for name in counts}


def mean_over_ranks(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of each name's values over all ranks; NaN values are not counted. Collective over the job."""
    sums: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for name, value in values:
        if not math.isnan(value):
            total, count = sums[name]
            sums[name] = total + value, count + 1
    gathered = from_all_ranks(dict(sums))
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
