"""Rules of one role's grid: its sizes against each other, against its ranks and against the model.

Pure, of a role by itself: which roles there are, and whether their ranks exist, is left to `check_roles`, which grids
would do instead to `nearest_grids`.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from megatron_bridge.families import Architecture
from megatron_bridge.layouts.grid import expert_sizes, gathers_in_order, shares_stages
from rlflow.config.faults import Fault
from rlflow.config.roles import data_parallel_size, replica_size
from rlflow.config.schema import Role

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
SIZES = (
    "tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size", "virtual_pipeline_parallel_size",
    "expert_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
TP, CP, PP, VP, EP, ETP = SIZES

GRAPHS_NEED = {
    PP: (1, "stages wait for each other's messages"),
    CP: (1, "which rows a rank has is decided on the host"),
    "sequence_parallel": (False, "the rows of all ranks go to a buffer that moves when a micro-batch is longer"),
    "recompute": ("none", "computing activations again asks the host for random states"),
    "offload": (False, "a graph reads weights where they lay when it was captured"),
}
"""What `cuda_graphs` needs of other keys, and why."""


def grid_faults(section: str, role: Role, arch: Architecture | None, ranks: int | None) -> Iterator[Fault]:
    """What is wrong with the grid of the role in `section`, on so many ranks; unknowns leave out their rules."""
    if ranks is not None:
        yield from _block_faults(section, role, ranks)
    if not has_order(role):
        yield Fault(f"{section}.order", role.order, f"must name each of {', '.join(DIMENSIONS)} once", Role.order)
    if role.sequence_parallel and role.tensor_parallel_size == 1:
        rule = f"needs {section}.{TP} above 1"
        yield Fault(f"{section}.sequence_parallel", "true", rule, "false", (f"{section}.{TP}",))
    if role.virtual_pipeline_parallel_size > 1 and role.pipeline_parallel_size == 1:
        rule = f"needs {section}.{PP} above 1: a rank that has all layers has nothing to interleave"
        yield Fault(f"{section}.{VP}", role.virtual_pipeline_parallel_size, rule, "1", (f"{section}.{PP}",))
    yield from _graph_faults(section, role, arch)
    if arch is not None:
        yield from _tensor_faults(section, role, arch)
        yield from _pipeline_faults(section, role, arch)
        yield from _expert_faults(section, role, arch, ranks)


def sizes_of(role: Role) -> tuple[int | None, ...]:
    """The values of `SIZES`."""
    return tuple(getattr(role, name) for name in SIZES)


def has_order(role: Role) -> bool:
    """Whether a role's order names every dimension."""
    return sorted(role.order.split("-")) == sorted(DIMENSIONS)


def tensor_sizes(arch: Architecture) -> list[int]:
    """Numbers of ranks over which a layer's attention and its dense feed-forward part can be cut."""
    ffn = arch.ffn if arch.has_dense_layers else 0  # experts have rules of their own
    even = [size for size in divisors(arch.heads) if ffn % size == 0]
    return [size for size in even if arch.kv_heads % size == 0 or size % arch.kv_heads == 0]


def uneven(key: str, size: int, name: str, count: int, valid: Sequence[int]) -> Iterator[Fault]:
    """A fault where `size` does not divide `count` things, with the nearest of the `valid` sizes."""
    if size > 0 and count % size:
        rule = f"{count} {name} do not divide over {size}: divisors are {in_words(divisors(count))}"
        yield Fault(key, size, rule, closest(size, valid))


def uneven_heads(key: str, tp: int, arch: Architecture) -> Iterator[Fault]:
    """Faults where `tp` ranks cannot share the heads and dense feed-forward channels of a layer."""
    valid = tensor_sizes(arch)
    counts = {"attention heads": arch.heads, "feed-forward channels": arch.ffn if arch.has_dense_layers else 0}
    for name, count in counts.items():
        yield from uneven(key, tp, name, count, valid)
    if tp > 0 and not any(count % tp for count in counts.values()) and tp not in valid:
        rule = f"{arch.kv_heads} key-value heads neither divide over {tp} ranks nor are divided by them"
        yield Fault(key, tp, f"{rule}: valid are {in_words(valid)}", closest(tp, valid))


@cache
def divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def in_words(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (", …" if len(numbers) > 16 else "")


def closest(size: int, valid: Sequence[int]) -> str:
    return str(min(valid, key=lambda other: (abs(other - size), -other)))


def _block_faults(section: str, role: Role, ranks: int) -> Iterator[Fault]:
    size = replica_size(role)
    if size > 0 and ranks % size:
        dimensions = "TP × CP × PP" if role.context_parallel_size > 1 else "TP × PP"
        rule = f"{ranks} ranks do not divide into blocks of {dimensions} = {size}"
        if role.ranks == "all" and ranks < size:
            rule += f": start at least {size} processes, for example with --nproc {size}"
        # The key is one that does not fit by itself, if there is such.
        name = next((name for name in (TP, CP, PP) if ranks % getattr(role, name)), TP)
        also = tuple(f"{section}.{other}" for other in (TP, CP, PP, "ranks") if other != name)
        yield Fault(f"{section}.{name}", getattr(role, name), rule, None, also)


def _graph_faults(section: str, role: Role, arch: Architecture | None) -> Iterator[Fault]:
    if not role.cuda_graphs:
        return
    key = f"{section}.cuda_graphs"
    for name, (wanted, reason) in GRAPHS_NEED.items():
        if getattr(role, name) != wanted:
            words = str(wanted).lower()
            yield Fault(key, "true", f"needs {section}.{name} = {words}: {reason}", "false", (f"{section}.{name}",))
    if arch is not None and arch.experts is not None:
        rule = "how many tokens an expert gets is known on the host only after its router has chosen"
        yield Fault(key, "true", rule, "false")


def _tensor_faults(section: str, role: Role, arch: Architecture) -> Iterator[Fault]:
    key, tp = f"{section}.{TP}", role.tensor_parallel_size
    yield from uneven_heads(key, tp, arch)
    rows, parts = (arch.heads // arch.kv_heads + 2) * arch.head_dim, max(1, tp // arch.kv_heads)
    valid = tensor_sizes(arch)
    if tp in valid and arch.latent is None and rows % parts:
        rule = f"{rows} rows of a key-value head's projections do not divide over the {parts} ranks that share it"
        yield Fault(key, tp, rule, closest(tp, [size for size in valid if size <= arch.kv_heads]))


def _pipeline_faults(section: str, role: Role, arch: Architecture) -> Iterator[Fault]:
    pp, vp = role.pipeline_parallel_size, role.virtual_pipeline_parallel_size
    yield from uneven(f"{section}.{PP}", pp, "layers", arch.layers, divisors(arch.layers))
    if min(pp, vp) > 1 and arch.layers % pp == 0 and arch.layers % (pp * vp):
        valid = divisors(arch.layers // pp)
        rule = f"{arch.layers} layers do not divide over PP {pp} × VP {vp} = {pp * vp} chunks: with PP {pp} valid are"
        yield Fault(f"{section}.{VP}", vp, f"{rule} {in_words(valid)}", closest(vp, valid), (f"{section}.{PP}",))


def _expert_faults(section: str, role: Role, arch: Architecture, ranks: int | None) -> Iterator[Fault]:
    ep, given = role.expert_parallel_size, role.expert_tensor_parallel_size
    if (experts := arch.experts) is None:
        values = ((EP, ep, 1, "1"), (ETP, given, None, "null"))
        yield from (Fault(f"{section}.{name}", value, f"{arch.family} has no experts", word)
                    for name, value, none, word in values if value != none)  # fmt: skip
        return
    tp, etp = role.tensor_parallel_size, role.tensor_parallel_size if given is None else given
    yield from uneven(f"{section}.{EP}", ep, "experts", experts.count, divisors(experts.count))
    yield from uneven(f"{section}.{ETP}", etp, "channels of an expert", experts.ffn, divisors(experts.ffn))
    if tp > 1 and not role.sequence_parallel:
        rule = f"experts need it where {section}.{TP} is above 1"
        yield Fault(f"{section}.sequence_parallel", "false", rule, "true")
    if (dp := data_parallel_size(role, ranks)) is not None and min(ep, etp) > 0:
        yield from _spread_faults(section, role, {"tp": tp, "cp": role.context_parallel_size, "dp": dp}, etp)


def _spread_faults(section: str, role: Role, stage: dict[str, int], etp: int) -> Iterator[Fault]:
    """Whether the experts' grid fits the ranks of a pipeline stage, and lies in it as megatron-core wants."""
    ep, sizes = role.expert_parallel_size, {**stage, "pp": role.pipeline_parallel_size}
    also = tuple(f"{section}.{name}" for name in (ETP, TP, CP, PP, "ranks"))
    if (spread := expert_sizes(sizes, ep, etp)) is None:
        count = stage["tp"] * stage["cp"] * stage["dp"]
        rule = f"{ep} × {section}.{ETP} {etp} does not divide the {count} ranks of a pipeline stage"
        yield Fault(f"{section}.{EP}", ep, rule, closest(ep, divisors(max(1, count // etp))), also)
    elif has_order(role):
        order = role.order.split("-")
        rules = {
            "pp first or last": shares_stages(order, sizes, spread), "tp before ep": gathers_in_order(order, spread)
        }  # fmt: skip
        keys = (f"{section}.{EP}", f"{section}.{ETP}")
        yield from (Fault(f"{section}.order", role.order, f"experts need {rule}", Role.order, keys)
                    for rule, holds in rules.items() if not holds)  # fmt: skip
