"""The GPU suite's whole runs: the work they do, what it is held against, and what is compared of two of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlflow.config import load
from tests.tools.printed import measurements
from tools.gpu import whole_step, works
from tools.gpu.report import read
from tools.gpu.runs import deadline, prompts, steps_of, train, write_config
from tools.gpu.shapes import SHAPES, Shape, save
from tools.gpu.whole_step import WORK, of_phase, roofline


@pytest.mark.parametrize(("shape", "seconds"), [("0.5b", 14.6), ("1.5b", 42.9)])
def test_a_step_at_the_roofline_takes_what_the_issue_says(shape: str, seconds: float) -> None:
    assert of_phase(roofline(SHAPES[shape], WORK), "step") == pytest.approx(seconds, abs=0.05)


def test_the_roofline_counts_each_pass_by_hand() -> None:
    """Qwen2.5-0.5B: 494,032,768 weights, 24 layers, hidden 896, two heads of 64 for keys and for values."""
    parts = roofline(SHAPES["0.5b"], WORK)
    tokens, sampled = 1024 * 1280, 1024 * 1024
    flops, bandwidth = 0.45 * 989e12, 0.8 * 4.8e12
    trained = 6 * 494_032_768 * tokens + 12 * 24 * 896 * 640 * tokens
    assert parts["update/products"] == pytest.approx(trained / flops)
    decoded = 2 * 494_032_768 * sampled + 4 * 24 * 896 * 768 * sampled
    assert parts["generate/products"] == pytest.approx(decoded / flops)
    read_a_step = 2 * 494_032_768 + 1024 * 768 * 24 * 2 * 128 * 2
    assert parts["generate/memory"] == pytest.approx(1024 * read_a_step / bandwidth)
    assert parts["generate/prompts"] < 0.1


def test_prompts_have_exactly_the_tokens_asked_for() -> None:
    texts = prompts(3, 7)
    assert len(set(texts)) == 3
    assert all(len(text.split()) == 7 for text in texts)


@pytest.mark.parametrize(
    "sections", [whole_step.sections(WORK, 2), works.grpo(), works.ppo()], ids=["whole_step", "grpo", "ppo"]
)
def test_runs_compute_every_sample(tmp_path: Path, sections: dict[str, dict[str, Any]]) -> None:
    model = save(tmp_path / "model", Shape(2, 64, 2, 1, 128, tie_word_embeddings=True, vocab_size=2048))
    config = load(write_config(tmp_path, model, ["a", "b"], sections), [], world_size=1)
    assert config.rollout.ignore_eos
    assert not config.algorithm.skip_zero_advantage
    assert config.trainer.output_dir == str(tmp_path / "run")


@pytest.mark.parametrize("algorithm", works.ALGORITHMS)
def test_a_shape_without_room_has_a_smaller_critic_and_part_of_adamw_on_the_host(
    tmp_path: Path, algorithm: str
) -> None:
    model = save(tmp_path / "7b", Shape(2, 64, 2, 1, 128, tie_word_embeddings=True, vocab_size=2048))
    sections = works.of_shape(algorithm, "7b", tmp_path)
    if algorithm == "ppo":
        save(Path(sections["critic"]["path"]), Shape(1, 32, 2, 1, 64, tie_word_embeddings=True, vocab_size=2048))
    config = load(write_config(tmp_path, model, ["a", "b"], sections), [], world_size=1)
    assert (config.optimizer.cpu_offload, config.actor.recompute) == (0.6, "selective")
    assert config.critic.path == (str(tmp_path / "0.5b") if algorithm == "ppo" else None)


def test_a_run_that_fails_shows_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, tmp_path / "no model", ["a"], {"trainer": {"steps": 1}})
    assert not train(config, until=deadline(60))
    assert "no model" in capsys.readouterr().out
    assert steps_of(config) == []


def test_a_run_that_ends_in_its_first_step_has_made_none(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    assert steps_of(tmp_path / "config.yaml") == []


def step(number: int, **metrics: float) -> dict[str, float]:
    times = {"time/step": 20.0, "time/generate": 10.0, "time/update": 9.5, "time/sync": 0.5}
    return {"step": number, **times, "memory/update_gib": 50.0, **metrics}


def test_the_first_step_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    slow = {"time/step": 99.0, "time/generate": 80.0}
    whole_step.report("0.5b", [step(1, **slow), step(2), step(3)], WORK)
    found = measurements(capsys)
    whole = found["0.5b step"]
    assert (whole.value, whole.target, whole.meets_target) == (20.0, 21.92, True)
    assert whole.details["peak_gib"] == 50.0
    assert found["0.5b generate"].details["tokens/s"] == 104_858
    assert found["0.5b rest of the step"].value == pytest.approx(0.5)


def test_runs_that_learn_the_same_differ_in_times_alone() -> None:
    one = [step(1, **{"actor/loss": 0.5}), step(2, **{"actor/loss": 0.25})]
    other = [step(1, **{"actor/loss": 0.5, "time/step": 3.0}), step(2, **{"actor/loss": 0.125})]
    assert works.differences(one, one) == []
    assert works.differences(one, other) == ["step 2 actor/loss 0.25 0.125"]
    assert works.differences(one, one[:1]) == ["step 2 actor/loss 0.25 None"]


def test_runs_that_recorded_nothing_are_not_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works, "train", lambda *given, **limits: True)
    monkeypatch.setattr(works, "save", lambda folder, shape: folder)
    assert not works.Jobs(tmp_path, [], 1.0, on_gpu=False)._tell_differences()


def test_a_resumed_run_is_told_with_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    """Each run writes what it would have recorded; the broken one is started twice."""
    started: list[str] = []

    def pretend(config: Path, overrides: list[str], *, until: float) -> bool:
        name = config.parent.name
        started.append(name)
        run = config.parent / "run"
        run.mkdir(exist_ok=True)
        records = [step(number, **{"mismatch/kl": 1e-4}) for number in range(1, 3 if name == "ppo" else 4)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return True

    monkeypatch.setattr(works, "train", pretend)
    monkeypatch.setattr(works, "save", lambda folder, shape: folder)
    assert works.Jobs(tmp_path, [], 1.0, on_gpu=False).run()
    assert sorted(started) == ["broken", "broken", "ppo", "whole"]
    assert [one.meets_target for one in read(capsys.readouterr().out.splitlines())] == [True, True, True]
