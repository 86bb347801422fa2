"""TRL's step on a GPU: the same work as rlflow's, and how the two are compared. TRL itself is not needed here."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools import peer_trl_gpu as peer
from tools.gpu.report import read
from tools.gpu.whole_step import WORK

FOUND = {
    "step": 40.0,
    "generate": 20.0,
    "sync": 0.5,
    "score": 1.5,
    "update": 18.0,
    "peak_gib": 80.0,
    "tokens": WORK.sampled,
    "engine": "graphs",
}


@pytest.mark.parametrize("shape", peer.SEQUENCES)
def test_the_settings_fix_the_work(shape: str) -> None:
    said = peer.settings(WORK, shape, Path("run"))
    assert said["per_device_train_batch_size"] * said["gradient_accumulation_steps"] == 1024
    assert (said["num_generations"], said["max_completion_length"], said["vllm_max_model_length"]) == (8, 1024, 1280)
    assert said["generation_kwargs"]["ignore_eos"]
    assert not said["vllm_importance_sampling_correction"]  # it would take a pass for old log-probs


def test_phases_add_up_to_the_step() -> None:
    found = peer.taken(40.0, {"experience": 22.0, "generate": 20.0, "sync": 0.5})
    assert found["score"] == 1.5
    assert sum(found[phase] for phase in ("generate", "sync", "score", "update")) == found["step"]


def test_the_ratio_is_of_steps_behind_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"time/generate": 10.0, "time/update": 9.0, "time/sync": 0.25}
    steps = [{"step": number, "time/step": seconds, **times} for number, seconds in ((1, 60.0), (2, 20.0), (3, 20.0))]
    run = tmp_path / "0.5b" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    peer.report("0.5b", FOUND, tmp_path)
    own, ratio = read(capsys.readouterr().out.splitlines())
    assert (own.value, own.details["tokens/s"]) == (40.0, 26_214)
    assert (ratio.value, ratio.meets_target) == (2.0, True)
    assert ratio.details == {"rlflow_s": 20.0, "generate": 2.0, "update": 2.0, "sync": 2.0}


def test_without_steps_of_rlflow_there_is_no_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer.report("0.5b", FOUND, tmp_path)
    said = capsys.readouterr().out
    assert len(read(said.splitlines())) == 1
    assert "no ratio" in said


def test_a_step_of_other_work_is_told_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    peer.report("0.5b", FOUND | {"tokens": WORK.sampled - 1}, None)
    said = capsys.readouterr().out
    assert [one.value for one in read(said.splitlines())] == [FOUND["step"]]
    assert "not of the same work" in said


@pytest.mark.parametrize("starts", [True, False])
def test_vllm_is_tried_again_without_compilation(starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    tried: list[str] = []

    def pretend(command: list[str], log: Path, seconds: float, **rest: Any) -> int:
        tried.append(command[command.index("--engine") + 1])
        log.write_text("no compiler\n")
        if starts and tried[-1] == "graphs":
            (tmp_path / "trl_graphs.json").write_text(json.dumps({"step": 40.0}))
        return 1

    monkeypatch.setattr(peer, "run_within", pretend)
    found = peer.measure("0.5b", tmp_path, tmp_path, 1.0)
    assert tried == ["compiled", "graphs"]
    assert found == ({"step": 40.0, "engine": "graphs"} if starts else None)
    assert "no compiler" in capsys.readouterr().out
