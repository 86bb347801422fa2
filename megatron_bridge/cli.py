"""`python -m megatron_bridge`: one subcommand a module, each with `add_arguments(parser)` and `run(args) -> exit code`.

A module is imported only when its subcommand is asked for, so that planning needs no torch. Exit codes are 0, 1 for a
difference that was found and 2 for what the user can mend, of which one line is said.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import NamedTuple, NoReturn

from megatron_bridge import __version__
from megatron_bridge.command_line import drop_output
from megatron_bridge.errors import UserError

SECONDS_FOR_RANK_0 = 10.0
CLOSED_PIPE = 141  # as shells say of a program that SIGPIPE ended; 1 is a difference
OTHER_NAMES = ("rlflow-convert", "convert_checkpoint.py")


class Command(NamedTuple):
    """A subcommand: the module that carries it out, and what it is for."""

    module: str
    help: str


COMMANDS = {
    "import": Command("megatron_bridge.conversion.import_hf", "Hugging Face folder to Megatron checkpoint"),
    "export": Command("megatron_bridge.conversion.export_megatron", "Megatron checkpoint to Hugging Face folder"),
    "reshard": Command("megatron_bridge.conversion.reshard", "any model folder to another of any kind"),
    "verify": Command("megatron_bridge.conversion.verify", "compare two model folders tensor by tensor"),
    "inspect": Command("megatron_bridge.conversion.inspect_folder", "say what a model folder holds"),
    "plan": Command("megatron_bridge.describe", "say what a sync between two layouts moves, without GPUs"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, f"{message}; --help lists the options")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in words if not word.startswith("-")), None)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of few characters is no reason to say nothing
    try:
        args = _parser(chosen).parse_args(words)
        return int(args.run(args))
    except UserError as error:
        return _report(f"error: {error}", 2)
    except BrokenPipeError:  # whoever read the output, such as `head`, has enough of it
        drop_output()
        return CLOSED_PIPE
    except OSError as error:
        if error.filename is None:
            raise
        return _report(f"error: {error.filename}: {error.strerror}", 2)
    except KeyboardInterrupt:
        return _report("interrupted: nothing was changed", 130)


def _report(message: str, code: int) -> int:
    """Say what went wrong, once: all ranks of torchrun are told of a failure, and it ends them when rank 0 is gone."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(SECONDS_FOR_RANK_0)
    print(message if rank == "0" else f"rank {rank}: {message}", file=sys.stderr, flush=True)
    return code


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser, with the options of the chosen subcommand only."""
    started = Path(sys.argv[0]).name
    name = started if started in OTHER_NAMES else "megatron_bridge"
    parser = _Parser(prog=name, description="Convert, reshard and plan model weights.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{name} {__version__}")
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
