"""Hugging Face folder → Megatron checkpoint (torch_dist), at iteration 0 in DIR/iter_0000000.

    rlflow-convert import --hf Qwen3-8B --out Qwen3-8B-megatron --tp 4 --pp 2

Any grid loads what is written: the sizes given here are checked against the model, and shape the chunks of the files so
that a grid of these sizes reads whole ones. Names, vocabulary, tying and head sizes are the config's. With torchrun
(`torchrun --nproc-per-node 8 -m megatron_bridge import …`) each process writes its share.
"""

import argparse

from megatron_bridge.command_line import path
from megatron_bridge.conversion.checkpoint import HUGGING_FACE, MEGATRON, Checkpoint, open_checkpoint
from megatron_bridge.conversion.convert import Target
from megatron_bridge.conversion.grid import add_grid, read_grid
from megatron_bridge.conversion.options import add_output, carry_out, target_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `import`."""
    parser.add_argument("--hf", required=True, type=path, metavar="DIR", help="the Hugging Face folder")
    parser.add_argument("--out", required=True, type=path, metavar="DIR", help="the Megatron folder to be made")
    add_grid(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Convert."""

    def prepare(ranks: tuple[int, ...]) -> tuple[Checkpoint, Target]:
        source = open_checkpoint(args.hf, ranks=ranks, kind=HUGGING_FACE)
        return source, target_of(args, args.out, MEGATRON, source, read_grid(source.arch, args))

    return carry_out(args, prepare)
