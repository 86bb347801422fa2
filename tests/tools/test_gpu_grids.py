"""What the suite measures of grids of several GPUs: over gloo on a model of four layers, and from given numbers."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlflow.config.schema import Role
from tests.tools.printed import measurements
from tests.workers import RankFailure, World
from tools.gpu import alone, grids
from tools.gpu.calibrate import architecture
from tools.gpu.grids import KINDS, ONE, Case, Measured, bench, choose, of_grid, report
from tools.gpu.report import read
from tools.gpu.rounding import bound_of_gradients, bound_of_loss, distance_of_hidden
from tools.gpu.shapes import SHAPES, Shape
from tools.gpu.steps import Work

TINY = Shape(4, 64, 2, 1, 96, tie_word_embeddings=True, vocab_size=2048)
TP2, DP2 = Case(Role(tensor_parallel_size=2), 2), Case(Role(), 2)
PP2 = Case(Role(pipeline_parallel_size=2), 2)
OF_ONE = Measured(2.0, 2.2, 13.0, 11.0, 4.0, 60 * 2**30, 70 * 2**30, None)


class Lent:
    """In the place of fresh GPU processes: `run` makes the calls, on so many ranks."""

    def __init__(self, run: Callable[..., list[Any]]) -> None:
        self._run = run

    def __call__(self, size: int, function: Callable[[], Any], timeout: float = 240) -> list[Any]:
        return self._run(size, function, timeout=timeout)

    def start(self, size: int) -> None:
        """What is lent is there."""

    def close(self) -> None:
        """It stays."""


@pytest.fixture
def lend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., list[Any]]], list[dict[str, str]]]:
    """`lend(run)` lets `run` make the calls of all worlds; returns the environments that these are given."""

    def lend(run: Callable[..., list[Any]]) -> list[dict[str, str]]:
        given: list[dict[str, str]] = []

        def world(backend: str, environment: dict[str, str]) -> Lent:
            given.append(environment)
            return Lent(run)

        monkeypatch.setattr(alone, "World", world)
        return given

    return lend


def test_every_grid_learns_what_one_process_does(
    world: World, tmp_path: Path, lend: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    lend(world)
    cases = list(choose(KINDS, 2, architecture("tiny")))
    assert [str(case) for case in cases] == ["TP2", "TP2 × SP", "PP2", "PP2 × VP2", "DP2", "CP2"]
    work = Work(sequences=2, length=16, micro_batches=2)
    assert bench("tiny", tmp_path / "tiny", cases, work, math.inf) == 0
    found = measurements(capsys)
    compared = [one for one in found.values() if one.target is not None]
    assert len(compared) == 3 * len(cases)
    assert [one for one in compared if not one.meets_target] == []
    assert all(found[f"scaling efficiency tiny {case}"].value > 0 for case in cases)


def test_a_grid_that_fails_takes_no_other_along(lend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(size: int, call: partial[Measured], timeout: float) -> list[Measured]:
        if call.args[2] == PP2:
            raise RankFailure("rank 1 of 2: no luck")
        return [OF_ONE] * size

    given = lend(run)
    assert bench("1.5b", tmp_path, [TP2, PP2, DP2], Work(), math.inf) == 1
    output = capsys.readouterr().out
    assert "FAILED: 1.5b PP2\nrank 1 of 2: no luck" in output
    assert {one.what for one in read(output.splitlines())} >= {f"MFU a GPU 1.5b {case}" for case in (ONE, TP2, DP2)}
    assert given == [{}, {}, {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}]  # one GPU, PP2, DP2, TP2


def test_the_next_grid_starts_while_one_computes(lend: Any, tmp_path: Path) -> None:
    started: list[int] = []

    def run(size: int, call: partial[Measured], timeout: float) -> list[Measured]:
        started.append(len(given))
        return [OF_ONE] * size

    given = lend(run)
    assert bench("1.5b", tmp_path, [PP2, DP2], Work(), math.inf) == 0
    assert started == [2, 3, 3]  # one GPU, PP2, DP2: nothing comes behind the last


def test_grids_for_which_no_time_is_left_have_failed(
    lend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lend(lambda size, call, timeout: [OF_ONE] * size)
    assert bench("1.5b", tmp_path, [DP2], Work(), until=0.0) == 2
    assert "FAILED: 1.5b DP2\nno time was left" in capsys.readouterr().out


def test_grids_without_one_gpu_are_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    report("1.5b", TP2, OF_ONE, None, Work())
    assert set(measurements(capsys)) == {"MFU a GPU 1.5b TP2", "MFU a GPU 1.5b TP2 whole step"}


def test_speed_and_efficiency_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """1.5b: 1,543,714,304 weights, 28 layers, hidden 1536; 8 micro-batches of 16 × 1,024 tokens."""
    work = Work(micro_batches=8)
    tokens = 8 * 16 * 1024
    flops = 6 * 1_543_714_304 * tokens + 12 * 28 * 1536 * 512 * tokens
    half = replace(OF_ONE, forward_backward=1.0, whole_step=1.2)
    for case, seen in ((ONE, OF_ONE), (TP2, half), (PP2, half), (DP2, OF_ONE)):
        report("1.5b", case, seen, OF_ONE, work)
    found = measurements(capsys)
    assert found["MFU a GPU 1.5b one GPU"].value == pytest.approx(flops / 2.0 / 989e12, abs=1e-4)
    assert found["MFU a GPU 1.5b TP2"].value == pytest.approx(flops / 1.0 / (2 * 989e12), abs=1e-4)
    assert found["MFU a GPU 1.5b DP2 whole step"].value == pytest.approx(2 * flops / 2.2 / (2 * 989e12), abs=1e-4)
    strong, pipeline, weak = (found[f"scaling efficiency 1.5b {case}"] for case in (TP2, PP2, DP2))
    assert strong.value == pytest.approx(2.2 / (2 * 1.2), abs=1e-4)
    assert (strong.bound, strong.details["scaling"], strong.details["forward_and_backward"]) == (None, "strong", 1.0)
    assert pipeline.bound == round(8 / 9, 3)  # of 9 turns of the two stages, each waits in one
    assert (weak.value, weak.details["scaling"]) == (1.0, "weak")
    assert found["MFU a GPU 1.5b DP2"].details["peak_gib"] == 60


def test_a_grid_counts_with_its_slowest_rank_and_all_of_its_samples() -> None:
    slow = replace(OF_ONE, whole_step=3.0, loss_before=14.0, peak=61 * 2**30)
    found = of_grid([OF_ONE, slow])
    assert (found.forward_backward, found.whole_step, found.loss_before) == (2.0, 3.0, 13.5)
    assert found.peak == 61 * 2**30


def test_what_bfloat16_explains() -> None:
    """28 layers: ρ = 2⁻⁸ · √(8 · 28 / 3); logits of the 1.5b shape spread by .05 · √1536 = 1.96."""
    shape = SHAPES["1.5b"]
    assert distance_of_hidden(shape) == pytest.approx(0.03375, abs=1e-5)
    assert bound_of_loss(shape, 65_536) == pytest.approx(4 * 1.96 * 0.03375 / 256, rel=1e-3)
    assert bound_of_gradients(shape) == pytest.approx(4 * 0.03375**2, rel=1e-3)


def test_losses_are_held_against_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Bounds at 1.5b: .00103 nats before, .00456 of the two nats that were learned besides, and of the norm."""
    report("1.5b", TP2, replace(OF_ONE, loss_before=13.0009, loss_after=11.0105, grad_norm=4.02), OF_ONE, Work())
    verdicts = {what: one.meets_target for what, one in measurements(capsys).items() if one.target is not None}
    assert verdicts == {
        "loss before 1.5b TP2, from one GPU's": True,
        "loss after 8 steps 1.5b TP2, from one GPU's": False,
        "relative norm of the first gradient 1.5b TP2, from one GPU's": False,
    }


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        (2, ["TP2", "TP2 × SP", "PP2", "PP2 × VP2", "DP2", "CP2"]),
        (4, ["TP4", "TP4 × SP", "PP4", "PP4 × VP7", "DP4", "CP4", "TP2 × SP × DP2", "TP2 × SP × PP2"]),
        (8, ["DP8", "CP8", "TP2 × SP × DP4", "TP2 × SP × PP2 × DP2"]),
    ],
)
def test_grids_that_the_model_can_have(gpus: int, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """12 attention heads and 28 layers divide over two and four, not over eight."""
    assert [str(case) for case in choose(KINDS, gpus, architecture("1.5b"))] == names
    if gpus == 8:
        assert "tp on 8 GPUs left out: actor.tensor_parallel_size = 8: 12 attention heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"), [([], "needs 2 CUDA GPUs; 1 found"), (["--gpus", "1"], "a grid needs at least 2, not 1")]
)
def test_too_few_gpus_are_told_in_a_line(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["grids", *words])
    with pytest.raises(SystemExit, match="2"):
        grids.main()
    assert line in capsys.readouterr().err
