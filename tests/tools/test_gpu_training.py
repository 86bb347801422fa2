"""What the suite measures of training, on a CPU and a model of two layers."""

import math
from pathlib import Path

import pytest

from tests.workers import World
from tools.gpu.report import read
from tools.gpu.shapes import SHAPES, Shape, save
from tools.gpu.steps import Work
from tools.gpu.timing import covered
from tools.gpu.training import Timing, Variant, measure, report

TINY = Shape(2, 64, 2, 1, 96, tie_word_embeddings=True, vocab_size=2048)


def test_shapes_have_the_weights_of_their_models() -> None:
    """494,032,768 and 1,543,714,304 are what the model cards of Qwen2.5-0.5B and 1.5B count."""
    assert SHAPES["0.5b"].parameters == SHAPES["0.5b"].multiplied == 494_032_768
    assert SHAPES["1.5b"].parameters == 1_543_714_304
    wide = SHAPES["7b8"]
    assert wide.parameters - wide.multiplied == 151_936 * 3584


def test_operations_of_a_forward() -> None:
    """By hand: 2 for each of 10 tokens and weights; each token multiplies with half of 4 keys and values of 64 · 2."""
    layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 64 + 2 * 32 + 2 * 64)
    weights = 2048 * 64 + layers + 64
    assert TINY.forward_flops(4, 10) == 2 * weights * 10 + 2 * (2 * 2 * 64 * 2) * 10


def test_busy_time_counts_what_overlaps_once() -> None:
    assert covered([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4
    assert covered([]) == 0


def test_a_variant_is_measured_and_learns(world: World, tmp_path: Path) -> None:
    work = Work(sequences=2, length=16, micro_batches=2)
    timing = world(1, measure, tmp_path / "tiny", TINY, Variant("torch", False, 1024), work)[0]
    assert timing.gpu is None
    assert 0 < timing.forward_backward < 10
    assert timing.loss_before == pytest.approx(math.log(2048), abs=1.0)  # random tokens under random weights
    assert timing.loss_after < timing.loss_before


def test_mfu_is_operations_over_time_and_peak(capsys: pytest.CaptureFixture[str]) -> None:
    shape, work = SHAPES["0.5b"], Work()
    seconds = Timing(0.11, 0.5, 0.16, None, 2**34, 2**35, 790e12, 12.0, 11.5)
    report("0.5b", Variant("te", True, 1024), seconds, work, judged=True)
    once, whole, scored = read(capsys.readouterr().out.splitlines())
    # The prototype's .110 s, of which it said MFU .47.
    assert once.value == pytest.approx(0.47, abs=0.005)
    assert (once.target, once.meets_target, whole.target) == (0.45, True, None)
    assert whole.details["optimizer_s"] == pytest.approx(0.06)
    assert scored.value == pytest.approx(shape.forward_flops(1024, 4 * 16_384) / 0.16 / 989e12, rel=1e-3)
    assert once.details["peak_gib"] == 16
    assert once.bound == pytest.approx(0.8, abs=0.005)


def test_a_folder_is_complete_or_written_again(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", TINY, layers=1)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    save(folder, TINY, layers=1)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    (folder / "config.json").unlink()
    save(folder, TINY, layers=1)
    assert (folder / "model.safetensors").stat().st_mtime_ns != written
