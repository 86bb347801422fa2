"""How even a pass over samples lies on data-parallel ranks, and how full its micro-batches are: for the tracker.

Each rank measures its own part; the few numbers that make a `Load` are brought together by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlflow.batch.planning import plan_micro_batches
from rlflow.batch.sizes import Sizes, whole_multiple


@dataclass(frozen=True)
class Load:
    """One data-parallel rank's part of a pass."""

    costs: list[float]  # of each micro-batch, in rows of a model without attention (`Sizes.cost`)
    rows: int
    computed: int  # rows with their padding
    empty: int  # rows of a micro-batch that is padding alone


def measure_load(
    sizes: Sizes, *, micro_batch_tokens: int, hidden: int, share_prompts: bool, multiple: int = 1, context: int = 1,
    multiple_of: int = 1,
) -> Load:  # fmt: skip
    """What a rank computes for its samples.

    Args:
        sizes: of the rank's samples.
        micro_batch_tokens, hidden, share_prompts, multiple_of: as in `plan_micro_batches`.
        multiple, context: what `pack` pads to.
    """
    padded = replace(sizes, context=context)
    plan = plan_micro_batches(
        padded, micro_batch_tokens, share_prompts=share_prompts, hidden=hidden, multiple_of=multiple_of
    )  # fmt: skip
    empty = whole_multiple(multiple, context)
    return Load(
        costs=[padded.cost(members, share_prompts, hidden) for members in plan],
        rows=sum(sizes.rows(members, share_prompts) for members in plan),
        computed=sum(_up(padded.rows(members, share_prompts), empty) or empty for members in plan),
        empty=empty,
    )


def balance_metrics(loads: Sequence[Load], micro_batch_tokens: int) -> dict[str, float]:
    """Evenness and padding of a pass, from the loads of all data-parallel ranks.

    Under `balance/`: `rank_imbalance`, the busiest rank's cost over the mean less 1; `micro_batch_imbalance`, the same
    within a rank, of the worst rank; `padding`, the share of computed rows that is padding; `unfilled`, the share of
    the micro-batches' budget that holds no rows. Micro-batches that only keep step with another rank's count as padding
    and as unfilled.
    """
    count = max(len(load.costs) for load in loads)
    rows = sum(load.rows for load in loads)
    computed = sum(load.computed + (count - len(load.costs)) * load.empty for load in loads)
    return {
        "balance/rank_imbalance": _excess([sum(load.costs) for load in loads]),
        "balance/micro_batch_imbalance": max(_excess(load.costs) for load in loads),
        "balance/padding": 1 - rows / computed if computed else 0.0,
        "balance/unfilled": 1 - rows / (len(loads) * count * micro_batch_tokens) if count else 0.0,
    }


def _up(rows: int, multiple: int) -> int:
    return rows + -rows % multiple


def _excess(costs: Sequence[float]) -> float:
    """The largest over the mean less 1, and 0 where there is no work."""
    return max(costs) * len(costs) / sum(costs) - 1 if any(costs) else 0.0
