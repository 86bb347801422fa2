"""What the conversion commands have in common: their options, the processes that torchrun started, a grid's sizes."""

import argparse
import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_bridge.contents import DEFAULT_FILE_BYTES
from megatron_bridge.conversion.checkpoint import Checkpoint
from megatron_bridge.conversion.convert import Target, convert, describe
from megatron_bridge.conversion.memory import DEFAULT_MEMORY, parse_bytes
from megatron_bridge.errors import UserError
from megatron_bridge.families import FAMILIES, Architecture
from megatron_bridge.folders import together
from megatron_bridge.layouts import HFLayout, MegatronLayout

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LARGEST_SIZE = 1024  # of a parallel dimension, where valid ones are listed


# ---------------------------------------------------------------- options
def add_output(parser: argparse.ArgumentParser) -> None:
    """Options of every command that writes a folder."""
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES),
        help="cast to this; without it each tensor keeps its own. A router's bias is float32 in any case",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is at the target")
    parser.add_argument(
        "--max-memory", type=size, default=DEFAULT_MEMORY, metavar="SIZE",
        help="what a process may take in all, such as 2G or 900M; default 2G",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and touch nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def add_files(parser: argparse.ArgumentParser) -> None:
    """Options that shape Hugging Face's files."""
    parser.add_argument(
        "--max-shard-size", type=size, default=DEFAULT_FILE_BYTES, metavar="SIZE", help="of a file; default 4G"
    )
    parser.add_argument(
        "--experts", choices=("separate", "stacked"),
        help="routed experts as tensors of their own, or those of a layer in one; by default as in the source",
    )  # fmt: skip


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


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)


def size(text: str) -> int:
    """A number of bytes, with or without a unit."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a size such as 2G, 900M or 4GiB, not {text!r}") from None


def stages(text: str) -> tuple[int, ...]:
    """Numbers of layers between hyphens."""
    if not all(part.isdecimal() for part in text.split("-")):
        raise argparse.ArgumentTypeError(f"must be numbers of layers such as 10-11-11, not {text!r}")
    return tuple(int(part) for part in text.split("-"))


# ---------------------------------------------------------------- what they mean
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
    experts = (tp if etp is None else etp) * ep
    return MegatronLayout(arch, tp=tp, cp=cp, ep=ep, etp=etp, dp=lcm(tp * cp, experts) // (tp * cp), **rest)


def _fault(arch: Architecture, key: str, sizes: dict[str, Any]) -> str:
    """What is wrong with one size alone, and which would be right; empty if nothing is."""
    given = sizes[key]
    if given is None or (key == "pp" and sizes["stages"]):
        return ""

    def fault(value: int) -> str:
        try:
            _layout(arch, **{key: value, **({"vpp": sizes["vpp"]} if key == "pp" else {})})
        except UserError as error:
            return error.message
        return ""

    if not (message := fault(given)):
        return ""
    valid = [value for value in range(1, LARGEST_SIZE + 1) if not fault(value)]
    return f"{message}; valid sizes are {', '.join(map(str, valid))}"


def read_names(source: Checkpoint, experts: str | None) -> HFLayout:
    """How the target's files are to name tensors: as the source does, but for the experts if that is asked for."""
    if experts == "stacked" and not FAMILIES[source.arch.family].stacked:
        raise UserError("--experts stacked", f"{source.arch.family} checkpoints have no such form")
    return source.names if experts is None else replace(source.names, stacked=experts == "stacked")


# ---------------------------------------------------------------- running
@contextlib.contextmanager
def processes() -> Iterator[tuple[int, tuple[int, ...]]]:
    """This process's rank and all ranks: of the group that there is, of those that torchrun started, or it alone."""
    started = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if started:
        # Who has written its share waits for all others, however long that takes.
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=7))
    try:
        yield (dist.get_rank(), tuple(range(dist.get_world_size()))) if dist.is_initialized() else (0, (0,))
    finally:
        if started:
            dist.destroy_process_group()


def carry_out(args: argparse.Namespace, open_source: Callable[[tuple[int, ...]], tuple[Checkpoint, Target]]) -> int:
    """Convert as the options say, or say what that would do."""
    with processes() as (rank, ranks):
        source, target = together(lambda: open_source(ranks), None)
        text = together(lambda: describe(source, target), None) if args.dry_run else convert(source, target, rank)
        if rank == 0:
            print(text)
    return 0


def target_of(
    args: argparse.Namespace, folder: str, kind: str, source: Checkpoint, like: MegatronLayout | None = None
) -> Target:
    """The target that the common options describe."""
    return Target(
        folder=Path(folder),
        kind=kind,
        names=read_names(source, getattr(args, "experts", None)),
        like=like or MegatronLayout(source.arch),
        dtype=DTYPES[args.dtype] if args.dtype else None,
        file_bytes=getattr(args, "max_shard_size", DEFAULT_FILE_BYTES),
        overwrite=args.overwrite,
        max_memory=args.max_memory,
        quiet=args.quiet,
    )
