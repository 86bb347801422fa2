"""Which sizes and orders of Megatron's two grids on the same ranks go together: everything's, and the routed experts'.

Dimensions are named `tp cp ep dp pp`, an order lists them fastest first, and what is not given has size 1. What lies
where in a grid is left to the layouts, what a model allows to `cut_faults`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import lcm, prod

Sizes = Mapping[str, int]  # dimension -> size
LARGEST_WORLD = 2**20  # ranks: more are a slip, and would take minutes to count


def expert_sizes(sizes: Sizes, ep: int, etp: int) -> dict[str, int] | None:
    """Sizes of the experts' grid on the ranks of a pipeline stage, tp · cp · dp; None where it does not divide them."""
    replicas, rest = divmod(prod(sizes.get(name, 1) for name in ("tp", "cp", "dp")), ep * etp)
    return None if rest else {"tp": etp, "cp": 1, "ep": ep, "dp": replicas, "pp": sizes.get("pp", 1)}


def shares_stages(order: Sequence[str], sizes: Sizes, experts: Sizes) -> bool:
    """Whether a rank is on the same pipeline stage in both grids, as it always is where pp comes first or last."""
    before = order[: order.index("pp")]
    steps = {prod(grid.get(name, 1) for name in before) for grid in (sizes, experts)}
    return len(steps) == 1 or sizes.get("pp", 1) == 1


def gathers_in_order(order: Sequence[str], experts: Sizes) -> bool:
    """Whether tp comes before ep where experts are cut over both.

    megatron-core reads token counts that it gathers over both as [ep, tp], and groups are in the order of ranks.
    """
    return min(experts["ep"], experts["tp"]) == 1 or order.index("tp") < order.index("ep")


def fewest_replicas(stage: int, ep: int, etp: int) -> int:
    """How many times the `stage` = tp · cp ranks of a pipeline stage are needed to hold its experts in whole grids."""
    return lcm(stage, ep * etp) // stage


def valid_sizes(refusal: Callable[[int], object], largest: int) -> str:
    """The sizes up to the largest for which there is no refusal, as a list in words."""
    return ", ".join(str(size) for size in range(1, largest + 1) if not refusal(size))
