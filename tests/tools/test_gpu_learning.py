"""What the learning part of the GPU suite reads out of runs; skipped where reasoning-gym is not installed."""

import json
from pathlib import Path

import pytest

from rlflow.data.readers import read_rows

pytest.importorskip("reasoning_gym")

from tools.gpu import learning
from tools.gpu.learning import Curve, curve, row, tell
from tools.gpu.report import read
from tools.make_arithmetic import write_split

RECORDS = [
    {"step": 0, "eval/accuracy": 0.1},
    {"step": 1, "time/step": 3.0},
    {"step": 2, "time/step": 1.0, "eval/accuracy": 0.4},
    {"step": 3, "time/step": 1.0, "train/reward": 0.5},
    {"step": 4, "time/step": 1.5, "eval/accuracy": 0.625},
]


def test_a_curve_counts_the_seconds_of_training() -> None:
    found = curve(RECORDS)
    assert found == Curve([0, 2, 4], [0.1, 0.4, 0.625], [0.0, 4.0, 6.5], seconds_per_step=1.25)
    assert [found.seconds_to(target) for target in (0.05, 0.4, 0.5, 0.7)] == [0.0, 4.0, 6.5, None]


def test_a_run_is_a_row() -> None:
    assert row("seed 0", curve(RECORDS), target=0.5) == "| seed 0 | .100 | .400 | .625 | 6 | 1.25 |"
    assert row("seed 1", curve(RECORDS[:3]), target=0.5) == "| seed 1 | .100 | .400 | – | 2.00 |"


def test_a_recipe_is_a_table_and_a_measurement_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    tell("quickstart", {0: curve(RECORDS), 1: curve(RECORDS[:3])})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| quickstart | step 0 | step 2 | step 4 | seconds to 0.5 | s/step |"
    first, second = read(lines)
    assert (first.value, first.meets_target, first.details["seconds_to_target"]) == (0.625, True, 6.5)
    assert (second.what, second.meets_target) == ("quickstart held-out accuracy, seed 1", False)


def test_a_run_that_fails_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: Path, overrides: list[str], *, until: float) -> bool:
        if "trainer.seed=1" in overrides:
            return False
        (config.parent / "run").mkdir()
        (config.parent / "run/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
        return True

    monkeypatch.setattr(learning, "train", train)
    assert not learning.learn_side_by_side(["quickstart"], [0, 1, 2], tmp_path, [], until=0.0)
    output = capsys.readouterr().out
    assert "quickstart-1: " in output
    assert [one.what[-6:] for one in read(output.splitlines())] == ["seed 0", "seed 2"]


def test_the_recipes_get_the_data_that_they_name(tmp_path: Path) -> None:
    train, held_out = learning.TASKS["reasoning_gym"].rows()
    write_split(tmp_path, train, held_out)
    assert len(list(read_rows(str(tmp_path / "train.jsonl")))) == 3000
    assert len(list(read_rows(str(tmp_path / "held_out.jsonl")))) == 200
    head = (learning.ROOT / "configs/reasoning_gym.yaml").read_text()
    assert "--task family_relationships" in head
    assert "--seed 5 --examples 2" in head
