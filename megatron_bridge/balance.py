"""Spreads what must be sent over the ranks that could send it, so that none sends much more than the others.

Integers only. Shares stay whole as long as the loads are near enough to each other without cutting: few large messages
are better than many small ones. What is sent, and to whom, is left to `plan`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 64  # elements; where a share is cut, so that its ends suit wide loads
TOLERANCE = 32  # loads that differ by less than one part in this many of their mean count as equal
SWEEPS = 8


class Task(NamedTuple):
    """Elements to send and the ranks that hold all of them, ascending."""

    elements: int
    holders: Sequence[int]


Cuts = list[tuple[int, int]]  # (rank, elements) in the order of the elements, the elements adding up to the task's


def split_evenly(elements: int, ways: int) -> list[int]:
    """Bounds of `ways` equal intervals of [0, elements), each but the last aligned."""
    inner = (elements * k // ways // ALIGNMENT * ALIGNMENT for k in range(1, ways))
    return [0, *inner, elements]


def spread(tasks: Sequence[Task], load: Counter[int]) -> list[Cuts]:
    """Who sends how much of each task; `load` counts elements sent so far and is brought up to date.

    Largest first, each to the least loaded holder, then those of overloaded ranks are levelled again, in parts. The sum
    of squares of the loads falls with each step, and where no step is left no holder of any task could be relieved.
    """
    cuts: list[Cuts] = [[] for _ in tasks]
    for number in sorted(range(len(tasks)), key=lambda number: -tasks[number].elements):
        elements, holders = tasks[number]
        chosen = min(holders, key=load.__getitem__)
        load[chosen] += elements
        cuts[number] = [(chosen, elements)]
    able = {holder for task in tasks for holder in task.holders}
    mean = sum(load[rank] for rank in able) // max(1, len(able))
    tolerance = max(ALIGNMENT, mean // TOLERANCE)
    movable = [number for number, task in enumerate(tasks) if len(task.holders) > 1 and task.elements > tolerance]
    for _ in range(SWEEPS):
        uneven = [n for n in movable if _is_uneven(cuts[n], tasks[n].holders, load, mean + tolerance, tolerance)]
        if not uneven:
            break
        for number in uneven:
            load.subtract(dict(cuts[number]))
            cuts[number] = _level(tasks[number], load, tolerance)
            load.update(dict(cuts[number]))
    return cuts


def _is_uneven(cuts: Cuts, holders: Sequence[int], load: Counter[int], most: int, tolerance: int) -> bool:
    highest = max(load[rank] for rank, _ in cuts)
    return highest > most and highest - min(map(load.__getitem__, holders)) > tolerance


def _level(task: Task, load: Counter[int], smallest: int) -> Cuts:
    """Fill the least loaded holders up to one level, as far as each gets at least `smallest`."""
    ranks = sorted(task.holders, key=lambda rank: (load[rank], rank))
    total, used = task.elements, 0
    while used < len(ranks):
        level = (total + load[ranks[used]]) // (used + 1)
        if used and level - load[ranks[used]] < smallest:
            break
        total += load[ranks[used]]
        used += 1
    level, left, cuts = total // used, task.elements, []
    for rank in sorted(ranks[1:used]):
        amount = min(left, (level - load[rank]) // ALIGNMENT * ALIGNMENT)
        cuts.append((rank, amount))
        left -= amount
    return [(ranks[0], left), *cuts] if left else cuts
