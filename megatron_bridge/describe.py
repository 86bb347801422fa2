"""What a sync from a training grid into vLLM engines moves, rank by rank, without processes or GPUs.

    python -m megatron_bridge plan --model Qwen3-8B --train tp=4,pp=2 --rollout tp=8

Nothing is read of the model but its config.json. Who sends what is `plan`'s, which order is best `placement`'s, what
the options mean `layout_options`'; this module adds up and prints.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any

from megatron_bridge.command_line import dtype, path, say
from megatron_bridge.families import Architecture
from megatron_bridge.layout_options import ROLLOUT_KEYS, TRAIN_KEYS, read_layouts, read_model
from megatron_bridge.layouts import HFLayout, MegatronLayout
from megatron_bridge.layouts.megatron import DEFAULT_ORDER
from megatron_bridge.placement import Placement, align, natural
from megatron_bridge.plan import Plan
from megatron_bridge.streams import rounds

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
SHOWN_PAIRS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `plan`."""
    parser.add_argument(
        "--model", required=True, type=path, metavar="PATH", help="a folder with config.json, such a file, or its text"
    )
    parser.add_argument(
        "--train", required=True, metavar="tp=4,pp=2",
        help=f"the trainer's sizes, of {', '.join(TRAIN_KEYS)}; stages=20-20 are the layers of each stage",
    )  # fmt: skip
    parser.add_argument(
        "--rollout", required=True, metavar="tp=8",
        help=f"an engine's sizes, of {', '.join(ROLLOUT_KEYS)}; dp engines, by default on all of the trainer's ranks",
    )  # fmt: skip
    parser.add_argument(
        "--order", default=DEFAULT_ORDER, help="order of the trainer's dimensions, fastest first; default %(default)s"
    )
    parser.add_argument(
        "--placement", choices=("natural", "aligned"), default="natural",
        help="aligned: choose the order, and the engines' numbering of their ranks, by what is moved",
    )  # fmt: skip
    parser.add_argument("--ranks-per-node", type=_count, default=8, metavar="N", help="default %(default)s")
    parser.add_argument("--bucket-mib", type=_count, default=256, metavar="N", help="default %(default)s")
    parser.add_argument("--dtype", type=dtype, default="bfloat16", help="as sent, such as fp32; default %(default)s")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Plan, and print what the plan moves."""
    arch = read_model(args.model)
    train, rollout = read_layouts(arch, args.train, args.rollout, args.order)
    itemsize = DTYPE_BYTES[args.dtype]
    placement = natural(train, rollout, itemsize=itemsize)
    if args.placement == "aligned":
        placement = align(train, rollout, ranks_per_node=args.ranks_per_node, itemsize=itemsize)
    report = describe(placement, itemsize, args.ranks_per_node, args.bucket_mib << 20)
    say(json.dumps(report) if args.json else table(report, placement))
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


# ---------------------------------------------------------------- numbers
def describe(placement: Placement, itemsize: int, ranks_per_node: int, bucket_bytes: int) -> dict[str, Any]:
    """The figures of the plan of a placement, lists by rank from 0 on, all in bytes but counts and seconds.

    `lower_bound_received_bytes` is what all ranks together need and do not hold, counted from the layouts and not from
    the plan; `least_received_bytes` is what would be left of it in any placement. `transfers` are pairs of ranks of
    which one sends to the other, `buckets` the rounds of each phase, and `peak_extra_bytes` the memory for buckets of
    the rank that takes most. `node_bytes` lists [from node, to node, bytes].
    """
    begin = time.perf_counter()
    plan = Plan(placement.train, placement.rollout, itemsize, ranks_per_node)
    seconds = time.perf_counter() - begin
    ranks = range(1 + max(*placement.train.ranks, *placement.rollout.ranks))
    buckets = [rounds(plan, bucket_bytes, phase, digests=False) for phase in range(plan.phases)]
    needed = dict(zip(sorted(placement.rollout.ranks), placement.needed_bytes, strict=True))
    return {
        "model_bytes": model_elements(placement.train.arch) * itemsize,
        "needed_bytes": [needed.get(rank, 0) for rank in ranks],
        "local_bytes": [plan.local_bytes(rank) for rank in ranks],
        "received_bytes": [plan.received_bytes(rank) for rank in ranks],
        "sent_bytes": [plan.sent_bytes(rank) for rank in ranks],
        "lower_bound_received_bytes": sum(placement.received_bytes),
        "least_received_bytes": sum(placement.least_bytes),
        "peak_extra_bytes": max(_extra_bytes(plan, rank, buckets) for rank in ranks),
        "transfers": sum(s != t for traffic in plan.phase_traffic for s, t in traffic),
        "buckets": buckets,
        "node_bytes": _between_nodes(plan),
        "order": placement.train.order,
        "train_ranks": list(placement.train.ranks),
        "rollout_ranks": list(placement.rollout.ranks),
        "plan_seconds": round(seconds, 4),
    }


def model_elements(arch: Architecture) -> int:
    """Weights of a model."""
    whole = HFLayout(arch, (0,))
    kinds = {
        kind: sum(prod(param.shape) for param in whole.params(kind, 0)) for kind in {u.kind for u in whole.units(0)}
    }
    return sum(kinds[unit.kind] for unit in whole.units(0))


def _extra_bytes(plan: Plan, rank: int, buckets: Sequence[int]) -> int:
    """Bytes of a rank's buckets: two a direction, as large as its largest round, no more than all that goes through."""
    largest = [0, 0]
    for phase, count in enumerate(buckets):
        for side, size in enumerate((plan.sent_bytes(rank, phase), plan.received_bytes(rank, phase))):
            largest[side] = max(largest[side], min(size, 2 * ceil(size / max(1, count))))
    return sum(largest)


def _between_nodes(plan: Plan) -> list[list[int]]:
    """[from node, to node, bytes], largest first."""
    pairs: Counter[tuple[int, int]] = Counter()
    for (source, target), elements in plan.traffic.items():
        pairs[source // plan.ranks_per_node, target // plan.ranks_per_node] += elements * plan.itemsize
    across = [[source, target, size] for (source, target), size in pairs.items() if source != target]
    return sorted(across, key=lambda pair: (-pair[2], pair[:2]))


# ---------------------------------------------------------------- words
def table(report: Mapping[str, Any], placement: Placement) -> str:
    """A report for people."""
    train, rollout = placement.train, placement.rollout
    engines = len(rollout.ranks) // (rollout.tp * rollout.pp)
    sizes = " ".join(f"{name.upper()}{size}" for name, size in grid_sizes(train).items())
    lines = [
        f"{train.arch.family} of {_amount(report['model_bytes'])}: {sizes} on {len(train.ranks)} ranks, order "
        f"{train.order}, to {engines} {'engine' if engines == 1 else 'engines'} of "
        f"TP{rollout.tp}{f' PP{rollout.pp}' if rollout.pp > 1 else ''} in vLLM",
        "",
        f"{'a rank':<16}{'least':>12}{'mean':>12}{'most':>12}",
    ]
    for name in ("needed", "local", "received", "sent"):
        values = report[f"{name}_bytes"]
        row = (min(values), sum(values) / len(values), max(values))
        lines.append(f"{name:<16}" + "".join(f"{_amount(value):>12}" for value in row))
    lines += ["", *_totals(report)]
    if report["node_bytes"]:
        lines += ["", *_node_lines(report["node_bytes"])]
    if list(rollout.ranks) != sorted(rollout.ranks):
        lines += ["", f"engines take ranks in this order: {_some(rollout.ranks)}"]
    if list(train.ranks) != sorted(train.ranks):
        lines += ["", f"the grid takes ranks in this order: {_some(train.ranks)}"]
    return "\n".join(lines)


def grid_sizes(train: MegatronLayout) -> dict[str, int]:
    """The sizes of a grid that are not 1."""
    sizes = {"tp": train.tp, "cp": train.cp, "pp": train.pp, "vpp": train.vpp, "ep": train.ep, "dp": train.dp}
    if train.expert_tp != train.tp and train.arch.experts is not None:
        sizes["etp"] = train.expert_tp
    return {name: size for name, size in sizes.items() if size > 1 or name in ("tp", "etp")}


def _totals(report: Mapping[str, Any]) -> list[str]:
    received, bound = sum(report["received_bytes"]), report["lower_bound_received_bytes"]
    ratio = received / bound if bound else 1.0
    buckets = " + ".join(map(str, report["buckets"]))
    return [
        f"received in all  {_amount(received)}; needed and not there: {_amount(bound)}, ratio {ratio:.3f}",
        f"any placement    {_amount(report['least_received_bytes'])} at least",
        f"transfers        {report['transfers']} between ranks, in {buckets} buckets",
        f"extra memory     {_amount(report['peak_extra_bytes'])} on the rank that takes most",
        f"planned in       {report['plan_seconds']:.3f} s",
    ]


def _node_lines(pairs: Sequence[Sequence[int]]) -> list[str]:
    total = sum(size for _, _, size in pairs)
    lines = [f"between nodes    {_amount(total)} on {len(pairs)} ways, of which"]
    lines += [f"  node {source} to {target}: {_amount(size)}" for source, target, size in pairs[:SHOWN_PAIRS]]
    return lines + ([f"  and {len(pairs) - SHOWN_PAIRS} ways with less"] if len(pairs) > SHOWN_PAIRS else [])


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (", …" if len(ranks) > 16 else "")


def _amount(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3f} {name}"
    return f"{size:.0f} B"
