"""The calibration of predicted memory: coefficients come back from peaks that were made with them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.score import with_score_head
from rlflow.config.check import check
from rlflow.config.load import interpret
from rlflow.errors import UserError
from rlflow.inspect.calibration import GIB, Calibration, load_calibration
from rlflow.inspect.memory import predict
from tools.gpu import memory, works
from tools.gpu.calibrate import Measured, architecture, fit
from tools.gpu.memory import CASES, WHOLE_RUNS, finished_run, given_runs, write
from tools.gpu.runs import merged
from tools.gpu.shapes import SHAPES

TRUE = Calibration(
    libraries=0.5, kept=0.9, passing=1.3, gradients=1.2, logits=1.1, rollout=2.0,
    sampling=0.9, prefill=1.2,
)  # fmt: skip


def made_with(calibration: Calibration) -> list[Measured]:
    """All that the tool measures, as it would come out if these coefficients were exact."""
    plans = [Measured(str(case), case.shape, case.sections(), False, {}) for case in CASES]
    plans += [Measured(what, shape, sections, True, {}) for what, (shape, sections) in WHOLE_RUNS.items()]
    return [replace(plan, gib=peaks_of(plan, calibration)) for plan in plans]


def peaks_of(plan: Measured, calibration: Calibration) -> dict[str, float]:
    models = dict.fromkeys(("actor", "reference"), architecture(plan.shape))
    found = predict(plan.run(), models, 1, calibration, with_rollout=plan.with_rollout)
    return {phase: peak.total(calibration) / GIB for phase, peak in found.items()}


def test_coefficients_are_found_from_the_peaks_that_they_make() -> None:
    """All but one: no configuration is so that the sampler takes more than a forward over prompts."""
    measured = made_with(TRUE)
    assert len({one.what for one in measured}) == len(measured) >= 6
    found = fit(measured)
    assert max(one.largest_error(found) for one in measured) < 0.003
    assert found.kept == pytest.approx(TRUE.kept, rel=0.03)
    assert found.rollout == pytest.approx(TRUE.rollout, abs=0.1)


def test_a_run_that_nothing_was_fitted_to_is_predicted() -> None:
    """PPO of 7b, with AdamW partly on the host and a smaller critic: GiB on an H200 as docs/results.md has them."""
    measured = {
        "generate": 120.78, "predict/reference": 106.28, "predict/critic": 105.74, "predict/actor": 106.28,
        "update/critic": 107.99, "update/actor": 116.84, "sync": 120.54,
    }  # fmt: skip
    base = {"model": {"path": "7b", "dtype": "bfloat16"}, "rollout": {"ignore_eos": True}}
    config, faults = interpret(merged(base, works.of_shape("ppo", "7b", Path("models"))))
    assert not faults
    policy = architecture("7b")
    models = {"actor": policy, "reference": policy, "critic": with_score_head(architecture(works.CRITICS["7b"]))}
    calibration = load_calibration()
    found = {phase: peak.total(calibration) / GIB for phase, peak in predict(config, models, 1, calibration).items()}
    assert found == {phase: pytest.approx(gib, rel=0.015) for phase, gib in measured.items()}


def test_whole_runs_are_good_configurations() -> None:
    """But for what the tool writes to files: model, data, rewards."""
    files = ("model.", "data.", "trainer.output_dir", "rewards")
    for what, (shape, sections) in WHOLE_RUNS.items():
        faults = check(Measured(what, shape, sections, True, {}).run(), 1, "train")
        assert not [fault for fault in faults if not fault.key.startswith(files)]


def test_a_finished_run_is_read_with_what_it_was(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(vars(SHAPES["1.5b"])))
    config = {"model": {"path": str(model)}, "actor": {"offload": True}, "trainer": {"output_dir": "somewhere"}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    steps = [{"memory/generate_gib": 1.0}, {"memory/generate_gib": 2.0, "memory/score_gib": 9.0, "time/step": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    found = finished_run(tmp_path, "mine")
    assert found.gib == {"generate": 2.0}
    assert found.shape == "1.5b"
    assert found.config["actor"] == {"offload": True}
    assert "trainer" not in found.config
    assert [one.gib for one in given_runs([tmp_path, tmp_path / "nowhere"])] == [found.gib]


def test_a_written_calibration_is_what_predictions_take(tmp_path: Path) -> None:
    write(tmp_path / "calibration.json", [], TRUE)
    assert load_calibration(tmp_path / "calibration.json") == TRUE
    load_calibration()  # the one of the package
    (tmp_path / "calibration.json").write_text('{"coefficients": {"held": 1.0}, "measurements": []}')
    with pytest.raises(UserError, match="coefficients held are unknown"):
        load_calibration(tmp_path / "calibration.json")
    (tmp_path / "calibration.json").write_text("[]")
    with pytest.raises(UserError, match="must hold coefficients"):
        load_calibration(tmp_path / "calibration.json")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"coefficients": {}}'])
def test_a_file_that_is_no_calibration_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "calibration.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("sys.argv", ["memory", "--check", str(path)])
    assert memory.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: ")
