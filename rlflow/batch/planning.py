"""Plan micro-batches: which samples one forward takes.

That all data-parallel ranks make as many forwards is the engine's matter: it asks for the greatest count of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.batch.balance import balance
from rlflow.batch.sizes import Sizes


def plan_micro_batches(
    sizes: Sizes, budget_tokens: int, *, share_prompts: bool, count: int | None = None, multiple_of: int = 1
) -> list[list[int]]:
    """Samples of each micro-batch, each at most `budget_tokens` rows; a sample longer than that gets its own.

    As few micro-batches as first-fit-decreasing finds, then evened out. With `count` exactly so many, the last ones
    empty where there are too few samples; ValueError if the budget needs more. The number is rounded up to a multiple
    of `multiple_of`, as pipelines of virtual stages need it.
    """
    if budget_tokens < 1:
        raise ValueError(f"a micro-batch of {budget_tokens} tokens holds nothing")
    units = _units(sizes, budget_tokens, share_prompts)
    costs = [sizes.rows(unit, share_prompts) for unit in units]
    bins = _first_fit_decreasing(costs, budget_tokens)
    if count is not None and count < len(bins):
        raise ValueError(f"{sum(costs)} rows need {len(bins)} micro-batches of {budget_tokens} tokens, not {count}")
    wanted = len(bins) if count is None else count
    wanted += -wanted % multiple_of
    if bins:
        even = balance(costs, wanted)
        if all(len(members) <= 1 or sum(costs[unit] for unit in members) <= budget_tokens for members in even):
            bins = even
    bins = bins + [[] for _ in range(wanted - len(bins))]
    return [sorted(sample for unit in members for sample in units[unit]) for members in bins]


def _units(sizes: Sizes, budget_tokens: int, share_prompts: bool) -> list[list[int]]:
    """What is packed as a whole: a sample, or as many samples of a shared prompt as fit the budget."""
    if not share_prompts:
        return [[sample] for sample in range(len(sizes))]
    units: list[list[int]] = []
    for group in sizes.by_group():
        rows = budget_tokens + 1  # no unit open yet
        for sample in group:
            if rows + sizes.grown(sample) > budget_tokens:
                units.append([])
                rows = sizes.prompts[sample]
            units[-1].append(sample)
            rows += sizes.grown(sample)
    return units


def _first_fit_decreasing(costs: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        place = next((number for number, free in enumerate(room) if costs[item] <= free), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(budget)
        bins[place].append(item)
        room[place] -= costs[item]
    return bins
