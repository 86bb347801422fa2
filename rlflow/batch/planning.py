"""Plan micro-batches: which samples one forward takes.

That all data-parallel ranks make as many forwards is the engine's matter: it asks for the greatest count of any rank.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rlflow.batch.balance import balance
from rlflow.batch.sizes import Sizes

EVEN_ENOUGH = 1.01  # the busiest micro-batch over the mean, below which no prompt is computed twice for more evenness

Plan = list[list[int]]
# What each sample adds to a micro-batch: by itself, and beside another one of its group, whose prompt it shares.
Added = tuple[list[float], list[float]]


def plan_micro_batches(
    sizes: Sizes, budget_tokens: int, *, share_prompts: bool, hidden: int | None = None, count: int | None = None,
    multiple_of: int = 1,
) -> Plan:  # fmt: skip
    """Samples of each micro-batch, each at most `budget_tokens` rows; a sample longer than that gets its own.

    As few micro-batches as are found, of like work for a model of this hidden size (None: of like rows). With `count`
    exactly so many, the last ones empty where there are too few samples; ValueError if the budget needs more. The
    number is rounded up to a multiple of `multiple_of`, as pipelines of virtual stages need it.
    """
    if budget_tokens < 1:
        raise ValueError(f"a micro-batch of {budget_tokens} tokens holds nothing")
    task = _Task(sizes, budget_tokens, share_prompts, hidden)
    given = None if count is None else count + -count % multiple_of
    plan = None if given is None else task.split(given)
    if plan is None:
        # Ends where every unit has a micro-batch of its own, at the latest.
        numbers = itertools.count(task.least + -task.least % multiple_of, multiple_of)
        plan = next(found for number in numbers if (found := task.split(number)) is not None)
    if given is not None and len(plan) > given:
        rows = sum(map(task.rows, task.units))
        raise ValueError(f"{rows} rows need {len(plan)} micro-batches of {budget_tokens} tokens, not {count}")
    missing = (given or 0) - len(plan)
    return sorted(map(sorted, plan), key=lambda members: (not members, members)) + [[] for _ in range(missing)]


@dataclass(frozen=True)
class _Task:
    """What is to be split: the samples, and how much a micro-batch may hold."""

    sizes: Sizes
    budget: int
    share_prompts: bool
    hidden: int | None

    def rows(self, members: Sequence[int]) -> int:
        return self.sizes.rows(members, self.share_prompts)

    def cost(self, members: Sequence[int]) -> float:
        if self.hidden is None:
            return self.rows(members)
        return self.sizes.cost(members, self.share_prompts, self.hidden)

    @cached_property
    def least(self) -> int:
        """Fewer micro-batches cannot do: for all rows, or for so many samples if each were as short as the shortest.

        The second is the larger where samples are alike and the budget is no multiple of them.
        """
        rows = sum(min(self.rows(unit), self.budget) for unit in self.units)
        return max(math.ceil(rows / self.budget), math.ceil(len(self.sizes) / self._most_samples()))

    def _most_samples(self) -> int:
        """No micro-batch can hold more."""
        numbers = range(len(self.sizes))
        shortest = min((self.sizes.grown(i) if self.share_prompts else self.rows([i]) for i in numbers), default=0)
        prompt = min(self.sizes.prompts, default=0) if self.share_prompts else 0
        return max((self.budget - prompt) // shortest if shortest else len(self.sizes), 1)

    def is_overfull(self, members: Sequence[int]) -> bool:
        return len(members) > 1 and self.rows(members) > self.budget

    @cached_property
    def units(self) -> Plan:
        """What goes together: a sample each, or as many samples of a shared prompt as a micro-batch holds."""
        if not self.share_prompts:
            return [[sample] for sample in range(len(self.sizes))]
        units: Plan = []
        for group in self.sizes.by_group():
            rows = self.budget + 1  # no unit open yet
            for sample in group:
                if rows + self.sizes.grown(sample) > self.budget:
                    units.append([])
                    rows = self.sizes.prompts[sample]
                units[-1].append(sample)
                rows += self.sizes.grown(sample)
        return units

    @cached_property
    def added_rows(self) -> Added:
        return self._added(self.rows)

    @cached_property
    def added_cost(self) -> Added:
        return self._added(self.cost)

    def _added(self, load: Callable[[Sequence[int]], float]) -> Added:
        alone = [load([sample]) for sample in range(len(self.sizes))]
        return alone, [load([sample, sample]) - alone[sample] for sample in range(len(self.sizes))]

    def split(self, number: int) -> Plan | None:
        """`number` micro-batches within the budget, by the evenest of several ways that keeps to it; None: by none."""
        for plan in self._ways(number) if number else []:
            if self.share_prompts:
                _shift_samples(plan, self)
            if not any(map(self.is_overfull, plan)):
                return plan
        return None if self.units else [[] for _ in range(number)]

    def _ways(self, number: int) -> Iterator[Plan]:
        costs, rows = [self.cost(unit) for unit in self.units], [self.rows(unit) for unit in self.units]
        for bins in (
            lambda: balance(costs, number),
            lambda: _least_cost_first(costs, rows, number, self.budget),
            lambda: balance(rows, number),
            lambda: _first_fit_decreasing(rows, number, self.budget),
        ):
            yield [[sample for unit in members for sample in self.units[unit]] for members in bins()]


def _least_cost_first(costs: Sequence[float], rows: Sequence[int], number: int, budget: int) -> Plan:
    """Items by falling cost, each to the bin of least cost that has room for it, else to the one of least cost."""
    bins: Plan = [[] for _ in range(number)]
    cost, filled = [0.0] * number, [0] * number
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        place = min(range(number), key=lambda place: (filled[place] + rows[item] > budget, cost[place], place))
        bins[place].append(item)
        cost[place] += costs[item]
        filled[place] += rows[item]
    return bins


def _first_fit_decreasing(rows: Sequence[int], number: int, budget: int) -> Plan:
    """Items by falling rows, each to the first bin that has room for it, else to the last."""
    bins: Plan = [[] for _ in range(number)]
    room = [budget] * number
    for item in sorted(range(len(rows)), key=lambda item: (-rows[item], item)):
        place = next((place for place, free in enumerate(room) if rows[item] <= free), number - 1)
        bins[place].append(item)
        room[place] -= rows[item]
    return bins


def _shift_samples(plan: Plan, task: _Task) -> None:
    """Move single samples of shared prompts out of overfull micro-batches, then from the costliest to the cheapest.

    This cuts no more groups than it must, as each cut computes a prompt twice.
    """
    rows, costs = [float(task.rows(members)) for members in plan], [task.cost(members) for members in plan]
    for _ in range(4 * len(plan)):
        overfull = any(held > task.budget and len(members) > 1 for held, members in zip(rows, plan, strict=True))
        loads = rows if overfull else costs
        if not overfull and max(costs) <= EVEN_ENOUGH * sum(costs) / len(costs):
            return
        source, target = loads.index(max(loads)), loads.index(min(loads))
        added = task.added_rows if overfull else task.added_cost
        room = task.budget - rows[target]
        sample = _best_move(plan[source], plan[target], loads[source], loads[target], added, room, task)
        if sample is None:
            return
        plan[source].remove(sample)
        plan[target].append(sample)
        for place in (source, target):
            rows[place], costs[place] = task.rows(plan[place]), task.cost(plan[place])


def _best_move(
    source: list[int], target: list[int], present: float, other: float, added: Added, room: float, task: _Task
) -> int | None:
    """The sample of `source` after whose move the larger of both loads is least, if less than the `present` one.

    `other` is the load of `target`, which has `room` for so many rows.
    """
    group_of = task.sizes.groups
    here, there = Counter(group_of[sample] for sample in source), {group_of[sample] for sample in target}
    best, least = None, present
    for sample in source:
        group = group_of[sample]
        joins = group in there
        larger = max(present - added[here[group] > 1][sample], other + added[joins][sample])
        if larger < least and task.added_rows[joins][sample] <= room:
            best, least = sample, larger
    return best
