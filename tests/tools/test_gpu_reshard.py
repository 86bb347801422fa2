"""What the suite measures of resharding: over gloo on a model of two layers, and from given numbers."""

import contextlib
import io
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from megatron_bridge.execute import Transfer
from megatron_bridge.plan import make_plan
from tests.tools.printed import measurements
from tests.workers import RankFailure, World
from tools.bench_reshard import architecture, layouts, parse
from tools.gpu import reshard
from tools.gpu.report import Measurement, read
from tools.gpu.reshard import PAIRS, Way, bench, measure, prepare, stages_of, sweep, words_of
from tools.gpu.stages import STAGES, Recorder, host_seconds

WORDS = [*words_of("tiny", "tp=2", "tp=1"), "--layers", "2"]
FOUND = {
    "bitwise": True, "received_bytes": 7_600_000_000, "local_bytes": 7_600_000_000, "rounds": 29, "seconds": 0.03,
    "gb_s": 506.67, "all_to_all_and_copy_seconds": 0.0246, "all_to_all_and_copy_gb_s": 617.89, "gather_seconds": 0.07,
    "gather_to_bridge": 2.33, "extra_bytes": 2**30, "gather_extra_bytes": 2**31, "stages": {"whole_ms": 30.5},
}  # fmt: skip
LATE = 1.0  # seconds; a run takes some hundredths


@pytest.mark.parametrize("gpus", PAIRS)
def test_pairs_fill_all_gpus_and_the_last_sends_nothing(gpus: int) -> None:
    received = []
    for train, rollout in PAIRS[gpus]:
        options = parse(words_of("qwen2.5-7b", train, rollout))
        ((_, _, source, target),) = layouts(architecture(options), options)
        assert tuple(source.ranks) == tuple(target.ranks) == tuple(range(gpus))
        plan = make_plan(source, target)
        received.append(max(map(plan.received_bytes, range(gpus))))
    assert min(received[:-1]) > 0 == received[-1]


def test_a_pair_and_its_stages(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU an exchange is waited for when it was posted: then its stages follow one another."""
    found, other = world(2, partial(measure, WORDS, 1))
    assert found["bitwise"]
    assert {name: found[name] for name in ("received_bytes", "rounds")} == {
        name: other[name] for name in ("received_bytes", "rounds")
    }
    stages = found["stages"]
    assert set(stages) == {f"{name}_ms" for name in ("whole", "host", *STAGES, *(f"{one}_alone" for one in STAGES))}
    assert all(stages[f"{stage}_ms"] > 0 < stages[f"{stage}_alone_ms"] for stage in STAGES)
    assert sum(stages[f"{stage}_ms"] for stage in STAGES) <= stages["whole_ms"]


def _stages_of_what_was_released() -> tuple[float, int, bool]:
    """Seconds of a run that rank 1 comes late to, its exchanges, and whether the host found buckets there."""
    bench, found = prepare(WORDS), []

    def host(transfer: Transfer) -> float:
        found.append(all((*transfer.buckets.outgoing, *transfer.buckets.incoming)))
        return host_seconds(transfer)

    with patch("tools.gpu.reshard.host_seconds", host):
        stages_of(bench.transfer, bench.device, 1)
    bench.transfer.run()
    recorder = Recorder(bench.device)
    time.sleep(LATE * dist.get_rank())
    return recorder.run(bench.transfer, 1)["whole"], len(recorder.exchanges), found[0]


def test_stages_are_those_of_a_run_without_waiting_or_allocation(world: World) -> None:
    for whole, exchanges, prepared in world(2, _stages_of_what_was_released):
        assert 0 < whole < LATE
        assert exchanges == 1
        assert prepared


def _sweep_of_two(words: list[str]) -> tuple[bool, list[Measurement]]:
    """Whether all was right, and what the rank told of."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        right = sweep(words, (Way(1), Way(64)), 1)
    return right, read(printed.getvalue().splitlines())


def test_a_sweep_tells_of_each_way(world: World) -> None:
    (right, (small, large)), other = world(2, _sweep_of_two, WORDS)
    assert right
    assert other == (True, [])
    assert (small.what, large.what) == ("tp=2 → tp=1, buckets of 1 MiB", "tp=2 → tp=1, buckets of 64 MiB")
    assert small.details["rounds"] > 4 * large.details["rounds"]
    assert small.bound == large.bound


def test_ways_are_told_apart() -> None:
    ways = [way for ways in reshard.SWEEPS.values() for way in ways]
    assert len(set(map(str, ways))) == len(ways)
    assert str(Way(64, True, 33)) == "buckets of 64 MiB, NCCL before others, 33 programs copy"


def test_targets_are_those_of_seven_billion_weights(capsys: pytest.CaptureFixture[str]) -> None:
    reshard.report("tp=2 → tp=1", "qwen2.5-7b", FOUND)
    found = measurements(capsys)
    sync, rate = found["tp=2 → tp=1 sync"], found["tp=2 → tp=1 of the plain collective"]
    assert (sync.value, sync.target, sync.meets_target, sync.bound) == (0.03, 0.15, True, 0.0246)
    assert sync.details["received_gb"] == 7.6
    assert (round(rate.value, 2), rate.meets_target, rate.details["whole_ms"]) == (0.82, True, 30.5)
    assert found["tp=2 → tp=1 full gather over the sync"].value == 2.33
    reshard.report("tp=2 → tp=1", "tiny", FOUND)
    assert measurements(capsys)["tp=2 → tp=1 sync"].target is None


@pytest.mark.parametrize(("until", "failures"), [(math.inf, 3), (0.0, 7)])
def test_a_pair_that_fails_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], until: float, failures: int
) -> None:
    """Of four pairs and three sweeps one each fails, and one pair has a wrong bit; or there is no time for any."""

    def world(ranks: int, call: Callable[[], Any], timeout: float) -> list[Any]:
        assert (ranks, timeout) == (2, reshard.PAIR_SECONDS)
        words, *rest = call.args  # type: ignore[attr-defined]
        if rest:
            return [rest[0] != reshard.SWEEPS["order"]] * ranks
        if words == words_of("tiny", "pp=2", "tp=2"):
            raise RankFailure("rank 1 of 2: gone")
        return [FOUND | {"bitwise": words != words_of("tiny", "pp=2", "tp=1")}] * ranks

    assert bench(world, "tiny", 2, list(reshard.SWEEPS), time.monotonic() + until) == failures  # type: ignore[arg-type]
    output = capsys.readouterr().out
    if until:
        assert "FAILED: pp=2 → tp=2\nrank 1 of 2: gone" in output
        assert len(read(output.splitlines())) == 3 * 3
    else:
        assert output.count("no time was left") == 7
