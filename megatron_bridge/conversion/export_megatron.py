"""Megatron checkpoint (torch_dist), a trainer's or Megatron-LM's → Hugging Face folder.

    rlflow-convert export --megatron Qwen3-8B-megatron --out Qwen3-8B-trained
    rlflow-convert export --megatron runs/grpo/checkpoints/step_000100 --hf Qwen3-8B --out Qwen3-8B-trained

Weights alone are read; an optimizer's state is passed over. Config, tokenizer and generation settings come from the
checkpoint's folder, where `import` puts them, or from --hf.
"""

import argparse

from megatron_bridge.command_line import path
from megatron_bridge.conversion.checkpoint import HUGGING_FACE, MEGATRON, Checkpoint, open_checkpoint
from megatron_bridge.conversion.convert import Target
from megatron_bridge.conversion.options import add_files, add_output, carry_out, target_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `export`."""
    parser.add_argument(
        "--megatron", required=True, type=path, metavar="DIR",
        help="the checkpoint: its root, an iteration, or a trainer's step",
    )  # fmt: skip
    parser.add_argument("--out", required=True, type=path, metavar="DIR", help="the Hugging Face folder to be made")
    parser.add_argument(
        "--hf", type=path, metavar="DIR", help="a folder with config.json and tokenizer, for checkpoints that have none"
    )
    add_files(parser)
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Convert."""

    def prepare(ranks: tuple[int, ...]) -> tuple[Checkpoint, Target]:
        source = open_checkpoint(args.megatron, config=args.hf, ranks=ranks, kind=MEGATRON)
        return source, target_of(args, args.out, HUGGING_FACE, source)

    return carry_out(args, prepare)
