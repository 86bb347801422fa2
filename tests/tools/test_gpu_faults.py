"""A run that loses a rank in the middle of a step, as the GPU suite has it: it ends, says why, and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.end_to_end import run_in
from tests.workers import World
from tools.gpu import faults, killing
from tools.gpu.faults import FAULTS, SAVED, STEPS, Ended
from tools.gpu.grpo_grids import expected_bytes
from tools.gpu.killing import LOOK
from tools.gpu.report import read
from tools.gpu.runs import Sections, steps_of

TINY: Sections = {
    "model": {"dtype": "float32"},
    "actor": {"micro_batch_tokens": 256},
    "rollout": {"n": 4, "max_prompt_length": 48, "max_response_length": 12, "kv_cache_gib": 0.1},
    "bridge": {"startup_proof": False},
    "trainer": {"steps": STEPS, "prompts_per_step": 6, "save_every": SAVED, "export": False},
}


@pytest.mark.timeout(600)  # a busy machine starts vLLM in minutes
def test_a_killed_rank_ends_the_job_which_goes_on_from_its_checkpoint_on_another_grid(
    world: World, tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cases.md G05, F10: TP2, whose rank 1 is killed in the update, and DP2. The peer waits for it in a collective."""
    fault, end = FAULTS[0], time.monotonic() + 550
    monkeypatch.setattr(faults, "DEEP", 0.01)
    texts = [f"{number} plus {number + 1} =" for number in range(6 * STEPS)]
    config, note = faults.configure(tmp_path / "run", tiny_model("qwen2"), texts, fault, TINY)
    ended = faults.lose(config, note, [], end)
    assert ended is not None
    assert ended.everything < 30, ended
    assert faults.report(fault, ended), ended
    assert ended.place.startswith("rlflow.")
    received = {step["sync/received_bytes"] for step in steps_of(config)}
    assert received == {expected_bytes(config, [], 2)}

    def through_the_world(config: Path, overrides: Sequence[str], *, until: float, processes: int) -> bool:
        run_in(world, processes, "train", config, *overrides)
        return True

    monkeypatch.setattr(faults, "train", through_the_world)
    assert faults.go_on(fault, config, [], end)
    assert [step["step"] for step in steps_of(config)] == list(range(1, STEPS + 1))


def test_a_run_that_ends_before_the_kill_has_lost_no_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "no such configuration.yaml"
    assert faults.lose(config, tmp_path / "killed.json", [], time.monotonic() + 60) is None
    assert "no rank was killed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes",
    [{"said": "rank 1 failed"}, {"left": ("sleep 60",)}, {"code": None, "launcher": None}],
    ids=["cause not named", "a process left", "not by itself"],
)
def test_an_end_that_is_not_as_it_should_be_is_a_failure(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    good = Ended(1.0, 2.0, (), place="", said="rank 1 was killed (SIGKILL)", code=1)
    assert faults.report(FAULTS[0], good)
    assert not faults.report(FAULTS[0], replace(good, **changes))
    first, second = read(capsys.readouterr().out.splitlines())
    assert first.meets_target
    assert first.details == {
        "launcher_s": 1.0, "exit": 1, "cause": "named", "killed_at": "", "left": "nothing",
    }  # fmt: skip
    assert first.details != second.details


def test_a_rank_is_killed_once_within_the_work_of_a_phase(tmp_path: Path) -> None:
    program = f"""
import time
from tools.gpu.killing import kill_rank
space = {{"time": time, "__name__": "rlflow.roles.engine"}}
exec("def train_step(seconds):\\n    time.sleep(seconds)", space)
score = lambda: kill_rank("", None, row={{}}, rank=1, phase="update", behind={str(tmp_path)!r}, seconds=0.1, note=NOTE)
NOTE = {str(tmp_path / "note")!r}
score(), score()
space["train_step"](30)
"""
    environment = {**os.environ, "RANK": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=faults.ROOT, timeout=60)
    assert done.returncode == -9
    assert '"place": "rlflow.roles.engine.train_step:2"' in (tmp_path / "note").read_text()


def test_a_phase_shorter_than_the_delay_is_let_pass_and_half_of_it_waited_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note, waited, kills = tmp_path / "note", list[float](), list[tuple[int, int]]()
    places = iter(["", "first", "", "", "second", "second"])  # as they are looked at: idle, a short phase, a long one
    monkeypatch.setattr(killing, "_place", lambda phase: next(places))
    monkeypatch.setattr(killing, "time", SimpleNamespace(sleep=waited.append, monotonic=lambda: 7.0))
    monkeypatch.setattr(killing, "os", SimpleNamespace(kill=lambda *given: kills.append(given), getpid=lambda: 4711))
    killing._kill("update", 0.4, note)
    assert waited == [LOOK, 0.4, LOOK, LOOK, 0.2]
    assert kills == [(4711, signal.SIGKILL)]
    assert json.loads(note.read_text()) == {"at": 7.0, "place": "second"}


def test_only_the_rank_named_is_killed_and_not_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[object] = []
    monkeypatch.setattr(
        killing.threading, "Thread", lambda **given: threads.append(given) or SimpleNamespace(start=int)
    )
    arguments = {"rank": 1, "phase": "update", "seconds": 0.1, "note": str(tmp_path / "note")}
    calls = [("0", tmp_path, 0), ("1", tmp_path / "none", 0), ("1", tmp_path, 1), ("1", tmp_path, 1)]
    for rank, behind, expected in calls:
        monkeypatch.setenv("RANK", rank)
        assert killing.kill_rank("", None, row={}, behind=str(behind), **arguments) == 0.0
        assert len(threads) == expected
