"""Share work out evenly: numbers into parts of like sum, and samples over data-parallel ranks.

Everything is a pure function of lengths that all ranks know, and so comes out the same on each of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from rlflow.batch.sizes import Sizes

EVEN_ENOUGH = 1.002  # the busiest rank over the mean, below which no group is cut for more evenness

_Part = tuple[float, list[int]]  # sum of costs, members


def balance(costs: Sequence[float], parts: int, *, equal_counts: bool = False) -> list[list[int]]:
    """Split items 0 … n−1 into `parts` lists of nearly equal cost (Karmarkar & Karp 1982, largest differencing).

    With `equal_counts` the numbers of items differ by at most one. Some lists are empty where n < parts.
    """
    if parts < 1:
        raise ValueError(f"cannot split into {parts} parts")
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    width = parts if equal_counts else 1
    heap: list[tuple[float, int, list[_Part]]] = []
    for number, first in enumerate(range(0, len(order), width)):
        split = [(costs[item], [item]) for item in order[first : first + width]]
        heap.append((-_difference(split, parts), number, split))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, left = heapq.heappop(heap)
        split = _merge(left, heap[0][2], parts)
        heapq.heapreplace(heap, (-_difference(split, parts), number, split))
    filled = sorted(sorted(members) for _, members in heap[0][2]) if heap else []
    return filled + [[] for _ in range(parts - len(filled))]


def _difference(split: list[_Part], parts: int) -> float:
    """Largest less smallest sum. A split lists its largest parts first and leaves out empty ones."""
    return split[0][0] - (split[-1][0] if len(split) == parts else 0.0)


def _merge(left: list[_Part], right: list[_Part], parts: int) -> list[_Part]:
    """Join two splits, the largest part of one with the smallest of the other, which may be empty; largest first."""
    shared = max(len(left) + len(right) - parts, 0)
    alone, also_alone = len(left) - shared, len(right) - shared
    pairs = zip(left[alone:], reversed(right[also_alone:]), strict=True)
    joined = [(a + b, x + y) for (a, x), (b, y) in pairs]
    return sorted(left[:alone] + right[:also_alone] + joined, key=lambda part: (-part[0], part[1][0]))


def assign(sizes: Sizes, ranks: int, *, hidden: int, share_prompts: bool) -> list[list[int]]:
    """Samples of each data-parallel rank, balanced by the work of a model of this hidden size.

    Where prompts are shared the samples of a prompt stay together; if that leaves the ranks uneven, groups are cut into
    halves, quarters, … and the cut whose busiest rank has least to do is taken, its repeated prompts included.
    """
    if not share_prompts:
        costs = [sizes.cost([sample], False, hidden) for sample in range(len(sizes))]
        return balance(costs, ranks)
    groups = sizes.by_group()
    largest = max((len(group) for group in groups), default=1)
    mean = sizes.cost(range(len(sizes)), True, hidden) / ranks
    best: list[list[int]] = []
    least = float("inf")
    pieces = 1
    while pieces < 2 * largest and least > EVEN_ENOUGH * mean:
        units = [group[a:b] for group in groups for a, b in even_runs(len(group), pieces)]
        parts = balance([sizes.cost(unit, True, hidden) for unit in units], ranks)
        plan = [sorted(sample for unit in part for sample in units[unit]) for part in parts]
        busiest = max(sizes.cost(members, True, hidden) for members in plan)
        if busiest < least:
            best, least = plan, busiest
        pieces *= 2
    return best


def even_runs(count: int, pieces: int) -> list[tuple[int, int]]:
    """Bounds of nearly equal runs of `count` items, at most `pieces` and none empty."""
    bounds = [count * number // pieces for number in range(pieces + 1)]
    return [(a, b) for a, b in pairwise(bounds) if a < b]
