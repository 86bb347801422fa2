"""Which rank holds which samples, and who sends a sample to a rank that needs it.

Pure plans over numbers that every rank knows, so that they come out the same on each; `transfer` carries them out.
"""

from __future__ import annotations

from collections.abc import Sequence

# For every rank of the job the numbers of the samples that it holds, in its order, none twice. Numbers are places in
# the step's catalogue.
Placement = tuple[tuple[int, ...], ...]


def place(parts: Sequence[Sequence[int]], replica_of: Sequence[int | None]) -> Placement:
    """Give every rank the samples of its data-parallel replica; `replica_of[rank]` is None outside the grid."""
    return tuple(() if replica is None else tuple(parts[replica]) for replica in replica_of)


def senders(held: Placement, wanted: Placement, weights: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    """Who gives each rank each sample that it wants, in the order of `wanted[rank]`.

    A rank that holds the sample itself is its own sender. Otherwise it is a holder on its node, and of several the one
    that sends least so far, `weights[number]` being what a sample weighs. Samples with the same holders come from one
    sender, so that messages are few. Raises KeyError for a sample that no rank holds.
    """
    blocks, block_of = _blocks(held)
    load = [0] * len(held)
    chosen: list[list[int]] = []
    for rank, numbers in enumerate(wanted):
        own = set(held[rank])
        weight_of: dict[int, int] = {}
        for number in numbers:
            if number not in own:
                block = block_of[number]
                weight_of[block] = weight_of.get(block, 0) + weights[number]
        sender_of: dict[int, int] = {}
        for block, weight in weight_of.items():
            near = [holder for holder in blocks[block] if holder // ranks_per_node == rank // ranks_per_node]
            sender_of[block] = min(near or blocks[block], key=lambda holder: (load[holder], holder))
            load[sender_of[block]] += weight
        chosen.append([rank if number in own else sender_of[block_of[number]] for number in numbers])
    return chosen


def _blocks(held: Placement) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """The different sets of ranks that hold a sample, and for each sample the number of its set."""
    holders: dict[int, list[int]] = {}
    for rank, numbers in enumerate(held):
        for number in numbers:
            holders.setdefault(number, []).append(rank)
    block_numbers: dict[tuple[int, ...], int] = {}
    block_of = {number: block_numbers.setdefault(tuple(ranks), len(block_numbers)) for number, ranks in holders.items()}
    return list(block_numbers), block_of
