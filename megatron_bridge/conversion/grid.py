"""The Megatron grid that a checkpoint is written for: its options, and which sizes a model allows."""

import argparse
from typing import Any

from megatron_bridge.conversion.options import count
from megatron_bridge.errors import UserError
from megatron_bridge.families import Architecture
from megatron_bridge.layouts import MegatronLayout
from megatron_bridge.layouts.grid import fewest_replicas, valid_sizes

LARGEST_SIZE = 1024  # of a parallel dimension, where valid ones are listed


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Sizes of the Megatron grid that is to load the checkpoint."""
    for name, meaning in (
        ("tp", "tensor parallel size"),
        ("pp", "pipeline parallel size"),
        ("vpp", "virtual pipeline chunks a rank"),
        ("cp", "context parallel size"),
        ("ep", "expert parallel size"),
    ):
        parser.add_argument(f"--{name}", type=count, default=1, metavar="N", help=f"{meaning}; default 1")
    parser.add_argument("--etp", type=count, metavar="N", help="expert tensor parallel size; default that of --tp")
    parser.add_argument(
        "--stages", type=stages, default=(), metavar="N-N-…",
        help="layers of each pipeline stage, where they are not even: 10-11-11",
    )  # fmt: skip
    parser.add_argument(
        "--vocab-multiple", type=count, metavar="N",
        help="pad the vocabulary to a multiple of N × tp, Megatron's --make-vocab-size-divisible-by; default: of 64",
    )  # fmt: skip


def stages(text: str) -> tuple[int, ...]:
    """Numbers of layers between hyphens."""
    if not all(part.isdecimal() for part in text.split("-")):
        raise argparse.ArgumentTypeError(f"must be numbers of layers such as 10-11-11, not {text!r}")
    return tuple(int(part) for part in text.split("-"))


def read_grid(arch: Architecture, args: argparse.Namespace) -> MegatronLayout:
    """The layout of the grid's options; UserError names each size that the model does not allow, and those it does."""
    sizes = {key: getattr(args, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "stages", "vocab_multiple")}
    if arch.experts is None and (args.ep > 1 or args.etp is not None):
        raise UserError("--ep" if args.ep > 1 else "--etp", f"this {arch.family} model has no experts to spread")
    try:
        return _layout(arch, **sizes)
    except UserError as error:
        faults = [
            f"--{key} {sizes[key]}: {fault}" for key in ("tp", "ep", "etp", "pp") if (fault := _fault(arch, key, sizes))
        ]
        raise UserError("the grid", "; ".join(faults) or error.message) from error


def _layout(
    arch: Architecture, *, tp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, **rest: Any
) -> MegatronLayout:
    """A layout with as many replicas as its experts need."""
    replicas = fewest_replicas(tp * cp, ep, tp if etp is None else etp)
    return MegatronLayout(arch, tp=tp, cp=cp, ep=ep, etp=etp, dp=replicas, **rest)


def _fault(arch: Architecture, key: str, sizes: dict[str, Any]) -> str:
    """What is wrong with one size alone, and which would be right; empty if nothing is."""
    if sizes[key] is None or (key == "pp" and sizes["stages"]):
        return ""
    beside = {"vpp": sizes["vpp"]} if key == "pp" else {}
    if not (fault := _refusal(arch, **{key: sizes[key]}, **beside)):
        return ""
    valid = valid_sizes(lambda size: _refusal(arch, **{key: size}, **beside), LARGEST_SIZE)
    return f"{fault}; valid sizes are {valid}" if valid else f"{fault}; with --vpp {sizes['vpp']} no size is valid"


def _refusal(arch: Architecture, **sizes: int) -> str:
    """Why there is no layout of these sizes; empty if there is."""
    try:
        _layout(arch, **sizes)
    except UserError as error:
        return error.message
    return ""
