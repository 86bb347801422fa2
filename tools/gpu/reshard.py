"""Resharding from Megatron's layouts to vLLM's over NCCL, on 2, 4 or 8 GPUs, and what keeps it from being faster.

    python -m tools.gpu.reshard [--gpus 2] [--model qwen2.5-7b] [--sweeps bucket order programs] [--limit-s 420]

Pairs of layouts of a random model in bfloat16, each for itself: seconds, beside an all-to-all and a copy of the same
bytes and beside a full gather in the same run (`tools.bench_reshard`), checked bit by bit; and for how long packing,
exchange, unpacking and local copies were at work, together and each alone (`tools.gpu.stages`). Where their sum is as
long as the whole, nothing overlaps; what takes much longer than alone lacks room on the GPU, or bandwidth; where the
host takes as long as the whole, rounds are too many.

Then the first pair in other ways, knob after knob: `bucket`, the bytes of a round; `order`, NCCL's kernels before those
that also wait for room on the GPU; `programs`, how many programs copy at a time. Takes about 3 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_bridge.execute import Transfer
from megatron_bridge.groups import Group
from tests.workers import World
from tools.bench_reshard import MODELS, Bench, architecture, layouts, parse, reshard, timed
from tools.gpu.alone import attempt
from tools.gpu.machine import leave_multicast_off, require_gpu, visible_gpus
from tools.gpu.report import GIB, emit
from tools.gpu.runs import deadline
from tools.gpu.stages import STAGES, Recorder, each_alone, host_seconds

PAIRS = {  # of the trainer's and the rollout's layout, by the GPUs that both fill; in the last nothing is sent
    2: (("tp=2", "tp=1"), ("pp=2", "tp=2"), ("pp=2", "tp=1"), ("tp=2", "tp=2")),
    4: (("tp=4", "tp=1"), ("tp=2,pp=2", "tp=4"), ("pp=4", "tp=2"), ("tp=4", "tp=4")),
    8: (("tp=4,dp=2", "tp=1"), ("tp=4,pp=2", "tp=4"), ("tp=2,pp=4", "tp=2"), ("tp=4,dp=2", "tp=4")),
}
MODEL = "qwen2.5-7b"
SECONDS = 0.15  # that a sync of it may take
OF_COLLECTIVE = 0.8  # of the rate of a plain all-to-all and copy
PAIR_SECONDS = 120.0  # at most, of a pair or a sweep with its preparations
REPEATS = 7


@dataclass(frozen=True)
class Way:
    """How buckets are exchanged."""

    bucket_mib: int = 256
    before_others: bool = False  # a GPU starts NCCL's kernels before others that wait for room on it
    programs: int | None = None  # that copy at a time, at most

    def __str__(self) -> str:
        words = f"buckets of {self.bucket_mib} MiB"
        words += ", NCCL before others" if self.before_others else ""
        return words + (f", {self.programs} programs copy" if self.programs is not None else "")


SWEEPS = {
    "bucket": tuple(Way(mib) for mib in (64, 128, 256, 512, 1024)),
    "order": tuple(Way(mib, True) for mib in (64, 128, 256, 512)),
    "programs": tuple(Way(256, before, programs) for before in (False, True) for programs in (33, 50, 66, 99, 132)),
}


def words_of(model: str, train: str, rollout: str) -> list[str]:
    """A pair of layouts as `tools.bench_reshard` takes it."""
    return ["--model", model, "--train", train, "--rollout", rollout]


def prepare(words: Sequence[str]) -> Bench:
    """The tensors of a pair of layouts on this rank."""
    options, rank = parse(words), dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    ((_, _, source, target),) = layouts(architecture(options), options)
    return Bench(source, target, options, rank, device)


def measure(words: Sequence[str], repeat: int = REPEATS) -> dict[str, Any]:
    """What `tools.bench_reshard` finds of a pair, and its stages. Collective."""
    bench = prepare(words)
    return reshard(bench, repeat) | {"stages": stages_of(bench.transfer, bench.device, repeat)}


def stages_of(transfer: Transfer, device: torch.device, repeat: int) -> dict[str, float]:
    """Milliseconds of this rank's stages in a run, of its host, and of each stage alone. Collective."""
    transfer.run()  # which allocates buckets and makes the kernels' tables, where they have been released
    host = host_seconds(transfer)
    recorder = Recorder(device)
    together = recorder.run(transfer, repeat)
    alone = each_alone(transfer, recorder.exchanges, repeat, device)
    transfer.release()
    seconds = together | {"host": host} | {f"{stage}_alone": alone[stage] for stage in STAGES}
    return {f"{name}_ms": round(1e3 * value, 3) for name, value in seconds.items()}


def sweep(words: Sequence[str], ways: Sequence[Way], repeat: int = REPEATS) -> bool:
    """Measure one pair in several ways and tell of each as soon as it is done; whether all moved the bits right."""
    bench, what = prepare(words), " → ".join(parse(words).train + parse(words).rollout)
    plain, _ = timed(bench.staged_exchange(), repeat, bench.device)
    ahead = group_before_others() if any(way.before_others for way in ways) else None
    right = True
    for way in ways:
        found = measure_way(bench, way, ahead if way.before_others else None, repeat)
        right = found["bitwise"] and right
        if dist.get_rank() == 0:
            report_way(f"{what}, {way}", found, plain)
    return right


def measure_way(bench: Bench, way: Way, group: Group | None, repeat: int) -> dict[str, Any]:
    """What is known of one way to fill the target of a pair. Collective."""
    with copying_by(way.programs):
        transfer = bench.connect(way.bucket_mib, group)
        seconds, _ = timed(transfer.run, repeat, bench.device)
        bitwise = bench.bitwise()
        stages = stages_of(transfer, bench.device, repeat)
    return {"seconds": seconds, "bitwise": bitwise, "rounds": transfer.rounds, "stages": stages}


def report_way(what: str, found: dict[str, Any], plain: float) -> None:
    """Tell of one way, beside the seconds of the plain collective; `found` is what `measure_way` returns."""
    emit(
        "reshard", what, found["seconds"], "s", bound=plain, against="all-to-all and copy", more_is_better=False,
        details={"of_collective": round(plain / found["seconds"], 3), "rounds": found["rounds"]} | found["stages"],
    )  # fmt: skip


def group_before_others() -> Group:
    """All ranks, exchanging on a stream that a GPU prefers to others."""
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return dist.new_group(pg_options=options)


@contextlib.contextmanager
def copying_by(programs: int | None) -> Iterator[None]:
    """Have copies made by at most so many programs at a time; None: by as many as there is room for."""
    if programs is None:
        yield
        return
    from megatron_bridge.copy_kernel import launch

    with patch("megatron_bridge.copy_kernel.launch", partial(launch, programs=programs)):
        yield


def report(what: str, model: str, found: dict[str, Any]) -> None:
    """What is known of a pair; `found` is what `measure` returns."""
    sizes = {name: round(found[f"{name}_bytes"] / 1e9, 3) for name in ("received", "local")}
    details = {f"{name}_gb": size for name, size in sizes.items()} | {"bitwise": found["bitwise"]}
    details |= {"gb_s": found["gb_s"], "rounds": found["rounds"], "extra_gib": round(found["extra_bytes"] / GIB, 2)}
    emit(
        "reshard", f"{what} sync", found["seconds"], "s", target=SECONDS if model == MODEL else None,
        bound=found["all_to_all_and_copy_seconds"], against="all-to-all and copy", more_is_better=False,
        details=details,
    )  # fmt: skip
    emit(
        "reshard", f"{what} of the plain collective", found["all_to_all_and_copy_seconds"] / found["seconds"],
        target=OF_COLLECTIVE, details={"plain_gb_s": found["all_to_all_and_copy_gb_s"]} | found["stages"],
    )  # fmt: skip
    emit(
        "reshard", f"{what} full gather over the sync", found["gather_to_bridge"],
        details={"gather_s": found["gather_seconds"], "gather_extra_gib": round(found["gather_extra_bytes"] / GIB, 2)},
    )  # fmt: skip


def bench(world: World, model: str, gpus: int, sweeps: Sequence[str], until: float) -> int:
    """All pairs and sweeps, each for itself; returns how many failed or moved bits wrong."""
    failed = 0
    for train, rollout in PAIRS[gpus]:
        what = f"{train} → {rollout}"
        call = partial(measure, words_of(model, train, rollout))
        found = attempt(world, what, call, ranks=gpus, until=until, seconds=PAIR_SECONDS)
        if found is not None:
            report(what, model, found[0])
        failed += found is None or not found[0]["bitwise"]
    first = words_of(model, *PAIRS[gpus][0])
    for knob in sweeps:
        told = partial(sweep, first, SWEEPS[knob])
        right = attempt(world, f"sweep of {knob}", told, ranks=gpus, until=until, seconds=PAIR_SECONDS)
        failed += right is None or not all(right)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=PAIRS, help="default: the most of these that are visible")
    parser.add_argument("--model", choices=MODELS, default=MODEL)
    parser.add_argument("--sweeps", nargs="*", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--limit-s", type=float, default=420.0)
    arguments = parser.parse_args()
    until = deadline(arguments.limit_s)
    require_gpu(arguments.gpus or min(PAIRS))
    leave_multicast_off()
    gpus = arguments.gpus or max(count for count in PAIRS if count <= visible_gpus())
    with contextlib.closing(World("nccl")) as world:
        failed = bench(world, arguments.model, gpus, arguments.sweeps, until)
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
