"""What the conversion commands have in common: their options, and the processes that torchrun started."""

import argparse
import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_bridge.command_line import dtype, say
from megatron_bridge.contents import DEFAULT_FILE_BYTES
from megatron_bridge.conversion.checkpoint import Checkpoint
from megatron_bridge.conversion.convert import Target, convert, describe
from megatron_bridge.conversion.memory import DEFAULT_MEMORY, parse_bytes
from megatron_bridge.errors import UserError
from megatron_bridge.families import FAMILIES
from megatron_bridge.folders import together
from megatron_bridge.layouts import HFLayout, MegatronLayout

LARGEST_COUNT = 2**16


# ---------------------------------------------------------------- options
def add_output(parser: argparse.ArgumentParser) -> None:
    """Options of every command that writes a folder."""
    parser.add_argument(
        "--dtype", type=dtype, metavar="DTYPE",
        help="cast to this, such as bf16; without it each tensor keeps its own. A router's bias is float32 in any case",
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


def count(text: str) -> int:
    """A whole number of at least 1, and no more than a parallel size or a multiple of rows can mean."""
    if not text.isdecimal() or not 1 <= int(text) <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least 1 and at most {LARGEST_COUNT}, not {text}"
        )
    return int(text)


def size(text: str) -> int:
    """A number of bytes, with or without a unit."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a size such as 2G, 900M or 4GiB, not {text!r}") from None


# ---------------------------------------------------------------- what they mean
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


def carry_out(args: argparse.Namespace, prepare: Callable[[tuple[int, ...]], tuple[Checkpoint, Target]]) -> int:
    """Convert what `prepare` opens for all ranks, as the options say, or say what that would do."""
    with processes() as (rank, ranks):
        source, target = together(lambda: prepare(ranks), None)
        text = together(lambda: describe(source, target), None) if args.dry_run else convert(source, target, rank)
        if rank == 0:
            say("\n".join(filter(None, (source.remark, text))))
    return 0


def target_of(
    args: argparse.Namespace, folder: str, kind: str, source: Checkpoint, like: MegatronLayout | None = None
) -> Target:
    """The target that the common options describe; UserError for one inside of what is read."""
    for read in filter(None, (source.folder, args.hf)):
        if Path(read).resolve() in Path(folder).resolve().parents:
            raise UserError(folder, f"lies in {read}, which is read: give another target")
    return Target(
        folder=Path(folder),
        kind=kind,
        names=read_names(source, getattr(args, "experts", None)),
        like=like or MegatronLayout(source.arch),
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        file_bytes=getattr(args, "max_shard_size", DEFAULT_FILE_BYTES),
        overwrite=args.overwrite,
        max_memory=args.max_memory,
        quiet=args.quiet,
    )
