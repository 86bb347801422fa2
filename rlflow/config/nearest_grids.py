"""Grids that hold a model on a given number of ranks, nearest first to one that does not.

A pure search over the rules of `check_grid`, for messages: nothing is chosen here.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import log2

from megatron_bridge.families import Architecture
from rlflow.config.check_grid import divisors, grid_faults, has_order, sizes_of, tensor_sizes
from rlflow.config.roles import data_parallel_size, replica_size
from rlflow.config.schema import Role


def nearest_grids(
    asked: Role, arch: Architecture, ranks: int, *, most: int = 3, suits: Callable[[int], bool] = lambda dp: True
) -> list[Role]:
    """At most `most` roles like `asked` whose grids the rules allow on `ranks` ranks, nearest first.

    Distance is the number of doublings and halvings of sizes; of equally near grids those that leave other keys alone
    come first, and then the larger replica, which needs less memory. What was not asked for is not suggested: context,
    virtual pipeline and expert parallelism stay off where they were. `suits` says of a number of replicas whether the
    batch divides over it; grids that it refuses are taken only if there are no others.
    """
    suitable: list[Role] = []
    others: list[Role] = []
    for role in sorted(_candidates(asked, arch, ranks), key=partial(_nearness, asked)):
        if not any(grid_faults("role", role, arch, ranks)):
            (suitable if suits(ranks // replica_size(role)) else others).append(role)
        if len(suitable) == most:  # of thousands of ranks there are very many grids
            break
    return suitable or others[:most]


def grid_words(role: Role, ranks: int | None) -> str:
    """The sizes of a role's grid in a few letters; its replicas only where the number of its ranks is known."""
    cp, vp = role.context_parallel_size, role.virtual_pipeline_parallel_size
    dp = data_parallel_size(role, ranks)
    sizes = {"TP": role.tensor_parallel_size, "CP": cp if cp > 1 else None, "PP": role.pipeline_parallel_size,
             "VP": vp if vp > 1 else None, "DP": dp}  # fmt: skip
    words = " × ".join(f"{name}{size}" for name, size in sizes.items() if size is not None)
    ep, etp = role.expert_parallel_size, role.expert_tensor_parallel_size
    experts = " × ".join([f"EP{ep}", *([] if etp is None else [f"ETP{etp}"])])
    return f"{words} with {experts}" if ep > 1 or etp is not None else words


def change_words(asked: Role, other: Role, ranks: int) -> str:
    """The grid of `other` and the keys beside its sizes in which it must differ from `asked`."""
    changed = [f"{name} {str(value).lower()}" for name in ("sequence_parallel", "order")
               if (value := getattr(other, name)) != getattr(asked, name)]  # fmt: skip
    return grid_words(other, ranks) + (f" ({', '.join(changed)})" if changed else "")


def _candidates(asked: Role, arch: Architecture, ranks: int) -> Iterator[Role]:
    """Every role of sizes that divide what they must by themselves; rules between sizes are not looked at."""
    order = asked.order if has_order(asked) else Role.order
    for tp in (size for size in tensor_sizes(arch) if ranks % size == 0):
        sequence_parallel = tp > 1 and (asked.sequence_parallel or arch.experts is not None)
        for pp in (size for size in divisors(ranks // tp) if arch.layers % size == 0):
            for cp in _unless_off(asked.context_parallel_size, ranks // (tp * pp)):
                for vp in _unless_off(asked.virtual_pipeline_parallel_size if pp > 1 else 1, arch.layers // pp):
                    for ep, etp in _expert_sizes(asked, arch, ranks // pp):
                        yield replace(
                            asked, tensor_parallel_size=tp, context_parallel_size=cp, pipeline_parallel_size=pp,
                            virtual_pipeline_parallel_size=vp, expert_parallel_size=ep, expert_tensor_parallel_size=etp,
                            sequence_parallel=sequence_parallel, order=order,
                        )  # fmt: skip


def _expert_sizes(asked: Role, arch: Architecture, stage: int) -> Iterator[tuple[int, int | None]]:
    """Sizes of the experts' grid that may fit `stage` ranks; expert tensor parallelism stays unset where it is."""
    if arch.experts is None:
        yield 1, None
        return
    for ep in _unless_off(asked.expert_parallel_size, stage):
        if arch.experts.count % ep == 0:
            given = asked.expert_tensor_parallel_size
            fitting = (size for size in divisors(stage // ep) if arch.experts.ffn % size == 0)
            yield from ((ep, size) for size in ((None,) if given is None else fitting))


def _unless_off(asked: int, number: int) -> tuple[int, ...]:
    return divisors(number) if asked > 1 else (1,)


def _nearness(asked: Role, other: Role) -> tuple[float, ...]:
    return (_distance(asked, other), *_preference(asked, other))


def _distance(asked: Role, other: Role) -> float:
    pairs = zip(sizes_of(asked), sizes_of(other), strict=True)
    return sum(abs(log2((there or 1) / (here or 1))) for here, there in pairs)


def _preference(asked: Role, other: Role) -> tuple[int, ...]:
    sizes = (replica_size(other), *sizes_of(other))
    return (asked.sequence_parallel != other.sequence_parallel, *(-(size or 1) for size in sizes))
