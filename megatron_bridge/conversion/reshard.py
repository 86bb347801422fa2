"""Any model folder → any other: another size of files, another dtype, experts stacked or not, other chunks.

    rlflow-convert reshard --from Qwen3-30B-A3B --to Qwen3-30B-A3B-stacked --experts stacked --max-shard-size 8G
    rlflow-convert reshard --from iter_0001000 --to smaller --hf Qwen3-8B --tp 8 --dtype bf16

The target is of the source's kind unless --format says otherwise. Weights alone are written.
"""

import argparse

from megatron_bridge.command_line import path
from megatron_bridge.conversion.checkpoint import HUGGING_FACE, MEGATRON, Checkpoint, open_checkpoint
from megatron_bridge.conversion.convert import Target
from megatron_bridge.conversion.grid import add_grid, read_grid
from megatron_bridge.conversion.options import add_files, add_output, carry_out, target_of

FORMATS = {"hf": HUGGING_FACE, "megatron": MEGATRON}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `reshard`."""
    parser.add_argument(
        "--from", required=True, type=path, metavar="DIR", dest="source", help="the folder to read, of any kind"
    )
    parser.add_argument("--to", required=True, type=path, metavar="DIR", dest="out", help="the folder to be made")
    parser.add_argument("--format", choices=tuple(FORMATS), help="what to write; by default what is read")
    parser.add_argument(
        "--hf", type=path, metavar="DIR", help="a folder with config.json, for a Megatron source that has none"
    )
    add_grid(parser)
    add_files(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Convert."""

    def prepare(ranks: tuple[int, ...]) -> tuple[Checkpoint, Target]:
        source = open_checkpoint(args.source, config=args.hf, ranks=ranks)
        kind = FORMATS[args.format] if args.format else source.kind
        return source, target_of(args, args.out, kind, source, read_grid(source.arch, args))

    return carry_out(args, prepare)
