"""Profiles of steps: what spans of time say, the tables, and what a profiled step leaves."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlflow.config.schema import Actor, Algorithm, Config, Critic, Model, Rollout, Tracking
from rlflow.config.schema import Profile as ProfileSection
from rlflow.tracking import Tracker
from rlflow.tracking.profile import Profile, profiled_ranks
from rlflow.tracking.profile_table import profile_text
from rlflow.tracking.spans import Recording, Span, Spans, own_times, read

MS = 1_000_000  # in nanoseconds


def spans(*given: tuple[str, int, int]) -> list[Span]:
    """Of names, starts and ends in milliseconds."""
    return [Span(name, start * MS, end * MS) for name, start, end in given]


def test_overlapping_work_is_covered_once() -> None:
    """Two streams: 0-4 and 2-6, then 8-9; the kernel inside another adds nothing."""
    work = Spans(spans(("c", 8, 9), ("a", 0, 4), ("inside", 1, 2), ("b", 2, 6)))
    assert work.covered() == pytest.approx(0.007)
    assert work.within(spans(("window", 2, 9))).names == ["b", "c"]
    assert work.within(spans(("first", 0, 1), ("second", 8, 9))).names == ["a", "c"]
    assert Spans().covered() == 0


def test_costs_add_up_by_name() -> None:
    work = Spans(spans(("copy", 0, 1), ("gemm", 1, 4), ("copy", 4, 6)))
    assert work.by_name() == [("copy", 2, 0.003), ("gemm", 1, 0.003)]


def test_an_operator_is_charged_what_it_does_itself() -> None:
    """matmul 0-10 calls mm 1-7, which calls copy 2-3; add follows."""
    nested = spans(("mm", 1, 7), ("matmul", 0, 10), ("copy", 2, 3), ("add", 10, 12))
    own = {span.name: (span.end - span.start) // MS for span in own_times(nested)}
    assert own == {"matmul": 4, "mm": 5, "copy": 1, "add": 2}


def event(name: str, start: int, end: int, *, device: str = "CPU", annotation: bool = False, thread: int = 1) -> Any:
    kind = getattr(torch.autograd.DeviceType, device)
    return SimpleNamespace(
        name=lambda: name, start_ns=lambda: start * MS, duration_ns=lambda: (end - start) * MS,
        device_type=lambda: kind, is_user_annotation=lambda: annotation, start_thread_id=lambda: thread,
    )  # fmt: skip


GPU_STEP = [
    event("rlflow: update", 10, 30, annotation=True),
    event("rlflow: step", 0, 40, annotation=True),
    event("rlflow: update/actor", 10, 28, annotation=True),
    event("rlflow: update", 12, 29, device="CUDA", annotation=True),  # the device's copy of it
    event("nccl:all_reduce", 12, 13, device="CUDA", annotation=True),
    event("aten::mm", 10, 11),
    event("cudaLaunchKernel", 10, 11),
    event("cudaGraphLaunch", 12, 13),
    event("cudaLaunchHostFunc", 13, 14),
    event("cudaDeviceSynchronize", 14, 29),
    event("void at::native::gemm<float>", 11, 20, device="CUDA"),
    event("void at::native::gemm<float>", 20, 22, device="CUDA"),
    event("Memcpy DtoH (Device -> Pageable)", 26, 28, device="CUDA"),
]


def test_events_of_a_gpu_become_spans() -> None:
    recording = read(GPU_STEP, "rlflow: ")
    assert [span.name for span in recording.phases] == ["step", "update", "update/actor"]
    assert len(recording.device) == 3
    assert recording.launches.names == ["cudaLaunchKernel", "cudaGraphLaunch"]
    assert not len(recording.operators)


def words(text: str) -> list[list[str]]:
    """The cells of each row of the tables."""
    return [line.replace("│", " ").split() for line in text.splitlines() if line.startswith("│")]


def test_the_tables_of_a_gpu() -> None:
    """Of the update's 20 ms the GPU works for 9 + 2 + 2, in three pieces that two launches have started."""
    text = profile_text(read(GPU_STEP, "rlflow: "), {"step": 0.05, "update": 0.02, "update/actor": 0.01}, "step 3")
    rows = words(text)
    assert rows[0] == ["update", "0.020", "50.0%", "0.02", "0.013", "65%", "2", "3"]
    assert rows[1] == ["update/actor", "0.018", "45.0%", "0.01", "0.013", "72%", "2", "3"]
    assert rows[2] == ["other", "0.020", "50.0%", "0.03", "0.000", "0%", "0", "0"]
    assert rows[3] == ["step", "0.040", "100.0%", "0.05", "0.013", "32%", "2", "3"]
    assert rows[4] == ["update/actor", "0.011", "84.6%", "2", "5,500.0", "gemm<float>"]
    assert text.startswith("step 3\n")


def test_a_phase_that_comes_twice_has_one_row() -> None:
    phases = spans(("step", 0, 10), ("generate", 1, 3), ("generate", 5, 6))
    recording = Recording(phases, operators=Spans(spans(("aten::mm", 2, 3), ("aten::add", 4, 5))))
    assert words(profile_text(recording, {}, ""))[:2] == [
        ["generate", "0.003", "30.0%", "0.00", "1"],
        ["other", "0.007", "70.0%", "0.00", "1"],
    ]


def test_only_the_steps_asked_for_are_profiled(tmp_path: Path) -> None:
    """On a CPU the products of two 64 × 64 matrices are counted in their phase; the trace has the phase's name."""
    profile = Profile((2,), tmp_path / "profile", rank=1, trace=True)
    for step in (1, 2, 3):
        profile.begin(step)
        with profile.phase("update"), profile.phase("update/actor"):
            torch.ones(64, 64) @ torch.ones(64, 64)
        table = profile.end(step)
        assert (table is None) == (step != 2)
        if table is not None:
            assert table == (tmp_path / "profile" / "step_000002_rank_1.txt").read_text()
            assert table.startswith("step 2 on rank 1, CPU")
            assert ["aten::mm"] in [row[-1:] for row in words(table)]
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "step_000002_rank_1.json.gz").read_bytes()))
    assert "rlflow: update/actor" in {item.get("name") for item in trace["traceEvents"]}
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "step_000002_rank_1.json.gz", "step_000002_rank_1.txt",
    ]  # fmt: skip


def test_the_trace_can_be_left_out(tmp_path: Path) -> None:
    profile = Profile((1,), tmp_path, rank=0, trace=False)
    profile.begin(1)
    with profile.phase("update"):
        pass
    assert profile.end(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001_rank_0.txt"]


def test_phases_are_ranges_of_nvtx_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))
    with Profile((), tmp_path, rank=0, trace=True).phase("sync"):
        calls.append("inside")
    assert calls == ["rlflow: sync", "inside", "end"]


def test_a_run_shows_the_table_before_the_steps_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = Config(
        model=Model("model"), tracking=Tracking(tensorboard=False), profile=ProfileSection(steps=(2,), trace=False)
    )  # fmt: skip
    tracker = Tracker(config, tmp_path, is_main=True, total_steps=2)
    for step in (1, 2):
        tracker.begin(step)
        with tracker.phase("update"):
            torch.ones(4).add_(1)
        tracker.end(step, {})
    shown = capsys.readouterr().out
    assert shown.index("step 1/2") < shown.index("step 2 on rank 0, CPU") < shown.index("step 2/2")
    assert (tmp_path / "profile" / "step_000002_rank_0.txt").read_text() in shown


def test_one_rank_of_each_role_is_profiled() -> None:
    """The critic's and the reference's ranks follow no other role's here; the rollout samples on 2 and 3."""
    config = Config(
        model=Model("model"), actor=Actor(ranks=(0, 1)), critic=Critic(ranks=(4, 5)), rollout=Rollout(ranks=(2, 3)),
        algorithm=Algorithm(advantage="gae"),
    )  # fmt: skip
    assert profiled_ranks(config, 6) == {0, 2, 4}
    assert profiled_ranks(Config(model=Model("model")), 8) == {0}
