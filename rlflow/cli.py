"""The `rlflow` command: arguments, the check of the configuration, exit codes; the work is done by `job`.

Exit codes are 0, 1 for a failure and 2 for what the user can mend. Nothing heavy is imported before the configuration
is known to be good.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlflow import __version__
from rlflow.config import Config, assemble, load
from rlflow.config.check import Purpose
from rlflow.config.summary import summarize
from rlflow.errors import UserError

OVERRIDES = "section.key=value"
Work = Callable[[], int]
"""What a command does once its configuration is good; returns the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that the installed command finds reward functions beside the user too
    args, rest = _parser().parse_known_args(arguments)
    if unknown := [word for word in rest if "=" not in word]:
        _parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    args.overrides += rest
    try:
        work = args.command(args)
    except UserError as error:  # every rank reads the same files and finds the same
        return _report(error) if _rank() == 0 else 2
    try:
        return work()
    except UserError as error:
        return _report(error)


def train(args: argparse.Namespace) -> Work:
    """Train, in this process as one of torchrun's, or with --nproc in that many processes of this machine."""
    config, launch = _configure(args, "train", "train")

    def work() -> int:
        from rlflow import job

        return job.train(config)

    return launch or work


def evaluate(args: argparse.Namespace) -> Work:
    """Score the held-out file, greedily and sampled."""
    config, launch = _configure(args, "eval", "evaluate")

    def work() -> int:
        from rlflow import job

        return job.evaluate(config)

    return launch or work


def check(args: argparse.Namespace) -> Work:
    """Say what is wrong with a configuration, or what it would run."""
    config = load(args.config, args.overrides, world_size=args.world_size)
    print(f"{args.config}: good\n{summarize(config, args.world_size)}")
    return lambda: 0


def generate(args: argparse.Namespace) -> Work:
    """Print responses to the prompts given."""
    if (args.config is None) == (args.model is None):
        raise UserError("generate", "needs either a CONFIG or --model")
    tree: dict[str, Any] = {"model": {"path": args.model}}
    options: dict[str, Any] = {"world_size": _world_size(), "purpose": "generate"}
    if args.config is None:
        config = assemble(tree, args.overrides, source="generate", **options)
    else:
        config = load(args.config, args.overrides, **options)

    def work() -> int:
        from rlflow import job

        return job.generate(config, args.prompt)

    return work


def _configure(args: argparse.Namespace, command: str, purpose: Purpose) -> tuple[Config, Work | None]:
    """The checked configuration, and torchrun's start where --nproc asks for it."""
    started_by_torchrun = "WORLD_SIZE" in os.environ
    if args.nproc is not None and started_by_torchrun:
        raise UserError("--nproc", "torchrun has started this process already; leave one of them")
    config = load(args.config, args.overrides, world_size=args.nproc or _world_size(), purpose=purpose)
    if args.nproc is None:
        return config, None
    return config, partial(launch, args.nproc, [command, args.config, *args.overrides])


def _report(error: UserError) -> int:
    rank = f"rank {_rank()}: " if _rank() else ""
    print(f"rlflow: {rank}{error}", file=sys.stderr)
    return 2


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch(processes: int, command: Sequence[str]) -> int:
    """Run `rlflow command` in `processes` processes by torchrun; a user's error in any of them is one of the whole."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options = ["--standalone", "--nproc-per-node", str(processes), "-m", "rlflow", *command]
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        return 2 if any(failure.exitcode == 2 for failure in error.failures.values()) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlflow", description="Reinforcement learning of large language models.")
    parser.add_argument("--version", action="version", version=f"rlflow {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, command in (("train", train), ("eval", evaluate), ("check", check), ("generate", generate)):
        words = (command.__doc__ or "").strip()
        sub = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        sub.set_defaults(command=command)
        sub.add_argument("config", metavar="CONFIG", help="YAML file", nargs="?" if name == "generate" else None)
        sub.add_argument("overrides", metavar=OVERRIDES, nargs="*", default=[], help="instead of what the file says")
        _OPTIONS[name](sub)
    return parser


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=_count, help="start torchrun with this many processes on this machine")


def _add_world_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=_count, help="check the grids for this many ranks")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder, in place of CONFIG")
    parser.add_argument("--prompt", action="append", required=True, help="a prompt; may be given more than once")


_OPTIONS = {"train": _add_nproc, "eval": _add_nproc, "check": _add_world_size, "generate": _add_prompts}


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number
