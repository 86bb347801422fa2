"""The `rlflow` command: arguments, the check of the configuration, exit codes; the work is done by `job`.

Exit codes are 0, 1 for a failure and 2 for what the user can mend. Nothing heavy is imported before the configuration
is known to be good.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rlflow import __version__
from rlflow.config import Config, assemble, load, role_sections
from rlflow.config.check import Purpose
from rlflow.config.load import of_model
from rlflow.config.summary import summarize
from rlflow.errors import UserError

SECONDS_FOR_RANK_0 = 10.0
SECONDS_TO_LEAVE = 5  # that processes have, once one of them has failed
Work = Callable[[], int]  # what a command does once its configuration is good; returns the exit code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # so that the installed command finds reward functions beside the user too
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    if unknown := [word for word in rest if "=" not in word]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; overrides are written section.key=value")
    args.overrides += rest
    try:
        return args.command(args)()
    except UserError as error:
        _report(error)
        return 2


def train(args: argparse.Namespace) -> Work:
    """Train, in this process as one of torchrun's, or with --nproc in that many processes of this machine."""
    config = _config(args, "train")
    if args.nproc is not None:
        return partial(launch, args.nproc, ["train", args.config, *args.overrides])
    _prepare_libraries(config)
    from rlflow import job

    return partial(job.train, config)


def evaluate(args: argparse.Namespace) -> Work:
    """Score the held-out file, greedily and sampled."""
    config = _config(args, "evaluate")
    if args.nproc is not None:
        return partial(launch, args.nproc, ["eval", args.config, *args.overrides])
    _prepare_libraries(config)
    from rlflow import job

    return partial(job.evaluate, config)


def generate(args: argparse.Namespace) -> Work:
    """Print responses to the prompts given."""
    if args.model is not None and args.config is not None and "=" in args.config:
        args.overrides.insert(0, args.config)  # there is no CONFIG: the first override took its place
        args.config = None
    if (args.config is None) == (args.model is None):
        raise UserError("generate", "needs either CONFIG or --model")
    config = _config(args, "generate")
    if args.nproc is not None:
        source = ["--model", args.model] if args.config is None else [args.config]
        prompts = [word for prompt in args.prompt for word in ("--prompt", prompt)]
        return partial(launch, args.nproc, ["generate", *source, *args.overrides, *prompts])
    _prepare_libraries(config)
    from rlflow import job

    return partial(job.generate, config, args.prompt)


def verify(args: argparse.Namespace) -> Work:
    """Prove that weights reach vLLM right, on the ranks and with the sizes of the configuration."""
    config = _config(args, "verify")
    if args.nproc is not None:
        parity = ["--parity"] if args.parity else []
        return partial(launch, args.nproc, ["verify", args.config, *args.overrides, *parity])
    _prepare_libraries(config)
    from rlflow import verify

    return partial(verify.verify, config, parity=args.parity)


def check(args: argparse.Namespace) -> Work:
    """Say what is wrong with a configuration, or what it would run."""
    config = load(args.config, args.overrides, world_size=args.world_size, ranks_per_node=args.ranks_per_node)
    print(f"{args.config}: good\n{summarize(config, args.world_size)}")
    return lambda: 0


def launch(processes: int, command: Sequence[str]) -> int:
    """Run `rlflow command` in `processes` processes by torchrun; a user's error in any of them is one of the whole.

    Nothing is started again after a failure. Of processes that a signal ended, which could not speak, it tells, unless
    they were asked to end.
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    threads = 1 if torch.cuda.is_available() else max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # torchrun would take 1, and warn
    options = ["--standalone", "--nproc-per-node", str(processes), "-m", "rlflow", *command]
    try:
        with _ending_together() as asked:
            run(parse_args(options))
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.pid not in asked:
                _explain_signal(rank, -failure.exitcode)
        return 2 if any(failure.exitcode == 2 for failure in error.failures.values()) else 1
    except SignalException as error:  # Ctrl-C, or the scheduler; torchrun has ended the processes
        print(f"ended by {error.sigval.name}", file=sys.stderr)
        return 128 + error.sigval
    return 0


@contextlib.contextmanager
def _ending_together() -> Iterator[set[int]]:
    """Have all processes of a failed torchrun end within SECONDS_TO_LEAVE, not its 30 s, and what they started too.

    Yields what will be the ids of those that were asked to end. torchrun has no option for how long it waits once a
    process has failed, and of what processes have started it ends only what does so when asked.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    close, started, asked = PContext.close, set[int](), set[int]()

    def close_soon(ranks: PContext, death_sig: signal.Signals | None = None, timeout: int = SECONDS_TO_LEAVE) -> None:
        started.update(ranks.pids().values())
        asked.update(filter(_runs, started))
        close(ranks, death_sig, timeout)

    PContext.close = close_soon  # type: ignore[method-assign, assignment]
    try:
        yield asked
    except BaseException:
        for leader in started:  # each of a process group of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        raise
    finally:
        PContext.close = close  # type: ignore[method-assign]


def _runs(process: int) -> bool:
    """Whether one of this process's children has not ended."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # it was waited for
        return False


def _explain_signal(rank: int, number: int) -> None:
    """Say what ended a process, if that was a signal other than SIGTERM, which asks it to end."""
    if number == signal.SIGKILL:
        print(
            f"rank {rank} was killed (SIGKILL): where no person and no scheduler did that, the machine ran out of "
            "memory, and its kernel's log (dmesg) says so; take fewer processes a machine, or lower "
            "rollout.kv_cache_gib and micro_batch_tokens of the roles",
            file=sys.stderr,
        )
    elif number > 0 and number != signal.SIGTERM:
        print(f"rank {rank} was ended by {signal.Signals(number).name}", file=sys.stderr)


def _config(args: argparse.Namespace, purpose: Purpose) -> Config:
    """The configuration, checked for the ranks that torchrun has started or --nproc will start."""
    started = os.environ.get("WORLD_SIZE")
    if args.nproc is not None and started is not None:
        raise UserError("--nproc", "torchrun has started this process already; use one of them")
    ranks = {"world_size": args.nproc or int(started or 1), "ranks_per_node": args.nproc}
    if args.config is None:
        return assemble(of_model(args.model), args.overrides, purpose=purpose, source="generate", **ranks)
    return load(args.config, args.overrides, purpose=purpose, **ranks)


def _prepare_libraries(config: Config) -> None:
    """Set what libraries read when they are loaded, unless the user has set it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # vLLM warns on every rank that it binds memory
    if any(role.tensor_parallel_size > 1 for role in role_sections(config).values()):
        # One queue to the GPU: megatron overlaps tensor parallel communication by the order of launches.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _report(error: UserError) -> None:
    """Print the error once: all ranks of torchrun read the same files, and rank 0 speaks for them.

    torchrun ends all processes when the first is gone, so the others wait for rank 0; where their files differ from
    its, nobody ends them and they speak for themselves.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(SECONDS_FOR_RANK_0)
    print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rlflow", description="Reinforcement learning of large language models.")
    parser.add_argument("--version", action="version", version=f"rlflow {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, command in (
        ("train", train),
        ("eval", evaluate),
        ("generate", generate),
        ("verify", verify),
        ("check", check),
    ):
        doc = command.__doc__ or ""
        sub = commands.add_parser(name, help=doc, description=doc, allow_abbrev=False)
        sub.set_defaults(command=command)
        sub.add_argument("config", metavar="CONFIG", help="a YAML file", nargs="?" if name == "generate" else None)
        sub.add_argument("overrides", metavar="section.key=value", nargs="*", default=[], help="goes before the file")
        if name == "check":
            sub.add_argument("--world-size", type=_count, metavar="N", help="check the grids for this many ranks")
            sub.add_argument("--ranks-per-node", type=_count, metavar="N", help="where the configuration names nodes")
        else:
            sub.add_argument(
                "--nproc", type=_count, metavar="N", help="start torchrun with N processes on this machine"
            )
        if name == "verify":
            sub.add_argument(
                "--parity", action="store_true", help="also compare the engine's log-probs with the trainer's"
            )
        if name == "generate":
            sub.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder, in place of CONFIG")
            sub.add_argument("--prompt", action="append", required=True, help="a prompt; may be given again")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")
    return int(text)
