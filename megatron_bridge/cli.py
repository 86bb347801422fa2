"""`python -m megatron_bridge`: one subcommand a module, each with `add_arguments(parser)` and `run(args) -> exit code`.

A module is imported only when its subcommand is asked for, so that planning needs no torch. Exit codes are 0, 1 for a
difference that was found and 2 for what the user can mend, of which one line is said.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from megatron_bridge.errors import UserError


class Command(NamedTuple):
    """A subcommand: the module that carries it out, and what it is for."""

    module: str
    help: str


COMMANDS = {
    "import": Command("megatron_bridge.conversion.import_hf", "Hugging Face folder to Megatron checkpoint"),
    "export": Command("megatron_bridge.conversion.export_megatron", "Megatron checkpoint to Hugging Face folder"),
    "reshard": Command("megatron_bridge.conversion.reshard", "any model folder to another of any kind"),
    "plan": Command("megatron_bridge.describe", "say what a sync between two layouts moves, without GPUs"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, f"{message}; --help lists the options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in words if not word.startswith("-")), None)
    try:
        args = _parser(chosen).parse_args(words)
        return int(args.run(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser, with the options of the chosen subcommand only."""
    parser = _Parser(prog="megatron_bridge", description="Convert, reshard and plan model weights.", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, command in COMMANDS.items():
        options = commands.add_parser(name, help=command.help, allow_abbrev=False)
        if name == chosen:
            module = import_module(command.module)
            options.description = module.__doc__
            options.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(options)
            options.set_defaults(run=module.run)
    return parser
