"""Tracking: times add up, a resumed run has each step once, and everything can be read back."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole

from rlflow.batch import Prompt, Sample
from rlflow.config.schema import Config, Data, Model, Rollout, Tracking, Trainer
from rlflow.errors import UserError
from rlflow.tracking import Tracker, read_records, series, summary
from rlflow.tracking.clock import StepClock
from rlflow.tracking.console import Console, clock_time, step_line
from rlflow.tracking.table import run_table
from tests.batch.samples import make_sample

ROOT = Path(__file__).parent.parent.parent


class FakeTime:
    """A clock that moves when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_config(**tracking: object) -> Config:
    return Config(
        model=Model("model"),
        data=Data("train.jsonl"),
        rollout=Rollout(n=4),
        trainer=Trainer(prompts_per_step=2),
        tracking=Tracking(**tracking),  # type: ignore[arg-type]
    )


def run_steps(run_dir: Path, steps: range, total: int = 4, **tracking: object) -> Tracker:
    tracker = Tracker(make_config(**tracking), run_dir, is_main=True, total_steps=total)
    for step in steps:
        tracker.begin(step)
        with tracker.phase("generate"):
            pass
        tracker.end(step, {"train/reward": step / 10, "train/response_length": 5.0}, [make_sample([1], [2])])
    return tracker


def test_phases_and_the_rest_make_up_the_step():
    now = FakeTime()
    clock = StepClock(now)
    clock.begin()
    for name, seconds in (("generate", 2.0), ("update", 3.0), ("generate", 1.0)):
        with clock.phase(name):
            now.seconds += seconds
    now.seconds += 0.5
    assert clock.end() == {"time/step": 6.5, "time/generate": 3.0, "time/update": 3.0, "time/other": 0.5}


def test_what_passes_between_two_steps_counts_for_the_second():
    now = FakeTime()
    clock = StepClock(now)
    clock.begin()
    clock.end()
    now.seconds += 0.25
    clock.begin()
    now.seconds += 1
    assert clock.end() == {"time/step": 1.25, "time/track": 0.25, "time/other": 1.0}


def test_the_parts_of_a_phase_are_timed_and_counted_once():
    now, entered = FakeTime(), []
    clock = StepClock(now, entered.append)
    clock.begin()
    with clock.phase("update"):
        now.seconds += 1
        for name, seconds in (("update/critic", 2.0), ("update/actor", 4.0), ("update/critic", 8.0)):
            with clock.phase(name):
                now.seconds += seconds
    now.seconds += 16
    assert clock.end() == {
        "time/step": 31.0, "time/update/critic": 10.0, "time/update/actor": 4.0, "time/update": 15.0,
        "time/other": 16.0,
    }  # fmt: skip
    assert entered[:4] == ["update", "update/critic", "update", "update/actor"]
    assert entered[-2:] == ["update", "after update"]


def test_other_phases_do_not_nest_and_steps_must_begin():
    clock = StepClock(FakeTime())
    with pytest.raises(RuntimeError, match="has not begun"):
        clock.end()
    clock.begin()
    with clock.phase("generate"), pytest.raises(RuntimeError, match="inside phase generate"), clock.phase("score"):
        pass


def test_a_phase_before_the_first_step_counts_for_none(tmp_path: Path):
    tracker = Tracker(make_config(tensorboard=False, console=False), tmp_path, is_main=True, total_steps=1)
    with tracker.phase("evaluate"):
        pass
    tracker.begin(1)
    with tracker.phase("update"):
        pass
    tracker.end(1, {})
    (record,) = read_records(tmp_path)
    assert record.keys() == {"step", "time/step", "time/update", "time/other", "memory/update_gib"}


def test_the_phase_that_failed_can_be_named(tmp_path: Path):
    tracker = Tracker(make_config(console=False), tmp_path, is_main=True, total_steps=1)
    tracker.begin(1)
    with pytest.raises(ZeroDivisionError), tracker.phase("score"):
        raise ZeroDivisionError
    assert tracker.running == "score"
    with tracker.phase("update"):
        assert tracker.running == "update"
    assert tracker.running == "after update"


def test_a_line_can_be_read_and_searched():
    metrics = {
        "train/reward": 0.41, "actor/kl": 0.002, "train/response_length": 12.3, "perf/tokens_per_second": 1234.0,
        "time/step": 4.7, "time/generate": 1.2, "time/update": 3.44, "time/score": 0.01, "time/other": 0.06,
        "time/update/critic": 1.5, "memory/generate_gib": 4.54, "memory/update/critic_gib": 3.0,
    }  # fmt: skip
    assert step_line(3, 40, metrics, 151) == (
        "step 3/40 reward 0.41 kl 0.002 len 12.3 tok/s 1,234 mem 4.54GiB eta 2:31 | "
        "generate 1.2s update 3.4s other 0.1s"
    )
    assert step_line(0, 40, {"eval/accuracy": 0.25}) == "step 0/40 accuracy 0.25"
    assert clock_time(3751) == "1:02:31"


def test_the_console_prints_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    console = Console(40, RichConsole(file=out))
    console.phase("generate")
    console.line("step 1/40 [bold] " + "x" * 300, 1)
    console.close()
    assert out.getvalue() == "step 1/40 [bold] " + "x" * 300 + "\n"


def test_a_terminal_has_a_bar_with_the_phase_at_work():
    out = io.StringIO()
    console = Console(40, RichConsole(file=out, force_terminal=True, width=100))
    console.phase("generate")
    console.line("step 1/40 reward 0.5", 1)
    console.close()
    assert "generate" in out.getvalue()
    assert "step 1/40 reward 0.5" in out.getvalue()


def test_a_run_is_recorded_and_summarised(tmp_path: Path):
    tracker = Tracker(make_config(console=False), tmp_path / "run", is_main=True, total_steps=2)
    tracker.evaluation(0, {"eval/accuracy": 0.2, "eval/integer_answer/format": 0.5})
    for step in (1, 2):
        tracker.begin(step)
        metrics = {"train/reward": step / 10, "train/response_length": 5.0}
        if step == 2:
            metrics |= {"eval/accuracy": 0.6, "eval/integer_answer/format": 1.0}
        tracker.end(step, metrics)
    result = tracker.finish()
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == result
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    seconds = result.pop("seconds")
    # 2 prompts × 4 responses × 5 tokens × 2 steps
    assert result.pop("tokens_per_second") == pytest.approx(80 / seconds)
    assert result == {
        "steps": 2, "reward/first": 0.1, "reward/last": 0.2, "eval/accuracy_first": 0.2, "eval/accuracy_last": 0.6,
        "eval/format_first": 0.5, "eval/format_last": 1.0,
    }  # fmt: skip


def test_every_step_is_covered_by_its_phases(tmp_path: Path):
    run_steps(tmp_path, range(1, 4), console=False, tensorboard=False)
    for record in read_records(tmp_path):
        parts = sum(value for name, value in record.items() if name.startswith("time/") and name != "time/step")
        assert parts == pytest.approx(record["time/step"], abs=1e-9)


def test_resuming_replaces_the_steps_that_are_done_again(tmp_path: Path):
    run_steps(tmp_path, range(1, 4), console=False).close()
    run_steps(tmp_path, range(3, 5), console=False).close()
    assert series(read_records(tmp_path), "train/reward") == ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])


def test_a_run_from_the_start_replaces_an_earlier_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    first = Tracker(make_config(console=False, tensorboard=False), tmp_path, is_main=True, total_steps=4)
    first.evaluation(0, {"eval/accuracy": 0.5})
    run_steps(tmp_path, range(1, 3), console=False, tensorboard=False)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "metrics.earlier.jsonl").read_text()) == {"step": 0, "eval/accuracy": 0.5}
    assert "holds an earlier run, which this one replaces" in caplog.text


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path):
    run_steps(tmp_path, range(1, 3), console=False, tensorboard=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/rew')
    assert len(read_records(tmp_path)) == 2
    run_steps(tmp_path, range(3, 4), console=False, tensorboard=False)
    assert [record["step"] for record in read_records(tmp_path)] == [1, 2, 3]


def test_nan_is_left_out_and_the_rest_stays(tmp_path: Path):
    """cases.md E09."""
    tracker = Tracker(make_config(console=False, tensorboard=False), tmp_path, is_main=True, total_steps=1)
    tracker.evaluation(0, {"eval/accuracy": math.nan, "eval/reward": 0.5})
    assert read_records(tmp_path) == [{"step": 0, "eval/reward": 0.5}]


def test_only_the_main_rank_writes(tmp_path: Path):
    tracker = Tracker(make_config(), tmp_path / "run", is_main=False, total_steps=1)
    tracker.evaluation(0, {"eval/accuracy": 0.5})
    tracker.begin(1)
    with tracker.phase("generate"):
        pass
    tracker.end(1, {"train/reward": 1.0}, [make_sample([1], [2])])
    assert tracker.finish() == {}
    assert not (tmp_path / "run").exists()


def test_samples_are_dumped_each_step(tmp_path: Path):
    prompt = Prompt("train/7", [1, 2], {"prompt": "2 + 2 =", "answer": 4}, 4)
    sample = Sample(prompt, 1, [5], [-0.5], False, "4 `", 3, reward=1.0, scores={"exact_match": 1.0})
    tracker = Tracker(make_config(console=False), tmp_path, is_main=True, total_steps=1)
    tracker.begin(1)
    tracker.end(1, {"train/reward": 1.0}, [sample])
    tracker.close()
    (line,) = (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "prompt_id": "train/7", "index": 1, "prompt": "2 + 2 =", "response": "4 `", "answer": 4, "reward": 1.0,
        "scores": {"exact_match": 1.0}, "response_tokens": 1, "truncated": False, "weights_version": 3,
    }  # fmt: skip


def test_tensorboard_has_scalars_and_texts(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_steps(tmp_path, range(1, 3), console=False).close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("train/reward")] == pytest.approx([0.1, 0.2])
    assert "sample/0/text_summary" in events.Tags()["tensors"]


def test_wandb_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"tracking\.wandb"):
        run_steps(tmp_path, range(1, 2), console=False, tensorboard=False, wandb="project")


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class FakeWandb:
        util = SimpleNamespace(generate_id=lambda: f"id{len(started)}")

        @staticmethod
        def init(**settings: object) -> SimpleNamespace:
            started.append(settings)
            return SimpleNamespace(log=lambda metrics, step: logged.append(step), finish=lambda: None)

    started: list[dict] = []
    logged: list[int] = []
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    for steps in (range(1, 3), range(3, 4)):
        run_steps(tmp_path, steps, console=False, tensorboard=False, wandb="project").close()
    assert [settings["id"] for settings in started] == ["id0", "id0"]
    assert started[0]["project"] == "project"
    assert logged == [1, 2, 3]


def test_the_table_shows_what_the_run_has():
    out = io.StringIO()
    values = {"steps": 40, "seconds": 151.0, "reward/first": 0.1, "reward/last": 0.4, "tokens_per_second": 1234.0}
    RichConsole(file=out, width=100).print(run_table(Path("runs/x"), values))
    assert "training reward" in out.getvalue()
    assert "2:31" in out.getvalue()
    assert "1,234" in out.getvalue()
    assert "accuracy" not in out.getvalue()


def test_a_folder_without_a_run_is_the_users_error(tmp_path: Path):
    with pytest.raises(UserError, match="holds no steps"):
        read_records(tmp_path)


def test_a_run_is_plotted(tmp_path: Path):
    run_steps(tmp_path, range(1, 4), console=False, tensorboard=False)
    command = [sys.executable, str(ROOT / "tools" / "plot_run.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    command[-1] = str(tmp_path / "missing")
    assert subprocess.run(command, capture_output=True, check=False, env=environment).returncode == 2


def test_the_table_of_no_run_is_the_users_error(tmp_path: Path):
    command = [sys.executable, "-m", "rlflow.tracking.table", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {tmp_path}/summary.json: does not exist")


def test_a_summary_of_steps_without_evaluation():
    assert summary([{"step": 1, "time/step": 2.0, "perf/response_tokens": 10.0}]) == {
        "steps": 1, "seconds": 2.0, "tokens_per_second": 5.0,
    }  # fmt: skip
