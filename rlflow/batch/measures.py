"""How even a step's work lies on the ranks, and how full its micro-batches are: numbers for the tracker.

Plans are made again from the sizes that all ranks know, so that one rank can measure for all without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlflow.batch.planning import plan_micro_batches
from rlflow.batch.sizes import Sizes


def balance_metrics(
    sizes: Sizes, parts: Sequence[Sequence[int]], *, micro_batch_tokens: int, hidden: int, share_prompts: bool,
    multiple: int = 1, context: int = 1, rounds: int = 1,
) -> dict[str, float]:  # fmt: skip
    """Evenness and padding of one pass over samples that lie as `parts[rank]` on data-parallel ranks.

    Args:
        sizes: of all samples.
        parts: samples of each data-parallel rank.
        micro_batch_tokens, hidden, share_prompts: as in `plan_micro_batches`.
        multiple, context: what `pack` pads to.
        rounds: the number of micro-batches is a multiple of it.

    Returns:
        Under `balance/`: `rank_imbalance`, the busiest rank's cost over the mean less 1; `micro_batch_imbalance`, the
        same within a rank, of the worst rank; `padding`, the share of computed rows that is padding; `unfilled`, the
        share of the micro-batches' budget that holds no rows, with those that only keep step with another rank.
    """
    own = [sizes.select(part) for part in parts]
    plans = [
        plan_micro_batches(
            part, micro_batch_tokens, share_prompts=share_prompts, hidden=hidden, count=count, multiple_of=rounds
        )
        for part, count in zip(own, _counts(own, micro_batch_tokens, share_prompts, rounds), strict=True)
    ]
    costs = [
        [part.cost(members, share_prompts, hidden) for members in plan] for part, plan in zip(own, plans, strict=True)
    ]
    filled = [(part, members) for part, plan in zip(own, plans, strict=True) for members in plan]
    rows = sum(part.rows(members, share_prompts) for part, members in filled)
    computed = sum(_padded_rows(part, members, share_prompts, multiple, context) for part, members in filled)
    return {
        "balance/rank_imbalance": _excess([sum(of_rank) for of_rank in costs]),
        "balance/micro_batch_imbalance": max(map(_excess, costs)),
        "balance/padding": 1 - rows / computed,
        "balance/unfilled": 1 - rows / (len(filled) * micro_batch_tokens),
    }


def _counts(own: Sequence[Sizes], budget: int, share_prompts: bool, rounds: int) -> list[int]:
    """As many micro-batches for every rank as the one has that needs most."""
    most = max(len(plan_micro_batches(part, budget, share_prompts=share_prompts, multiple_of=rounds)) for part in own)
    return [max(most, rounds)] * len(own)


def _padded_rows(sizes: Sizes, members: Sequence[int], share_prompts: bool, multiple: int, context: int) -> int:
    """Rows of a micro-batch as `pack` lays it out."""
    if context == 1:
        rows = sizes.rows(members, share_prompts)
        return _up(rows, multiple) or multiple
    rows = sum(_up(sizes.prompts[member] + sizes.grown(member), 2 * context) for member in members)
    whole = context * math.lcm(2, multiple)
    return _up(rows, whole) or whole


def _up(rows: int, multiple: int) -> int:
    return rows + -rows % multiple


def _excess(costs: Sequence[float]) -> float:
    """The largest over the mean less 1, and 0 where there is no work."""
    return max(costs) * len(costs) / sum(costs) - 1 if any(costs) else 0.0
