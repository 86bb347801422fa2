"""The GPU suite's whole runs on two GPUs: what they are configured to do, and what is told of them."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlflow.config import load
from tests.tools.printed import measurements
from tools.gpu import faults, grpo_grids, placement, several
from tools.gpu.grpo_grids import PAIRS, Pair
from tools.gpu.runs import write_config
from tools.gpu.shapes import Shape, save

SMALL = Shape(4, 64, 4, 2, 128, tie_word_embeddings=True, vocab_size=2048)
CONFIGURED = {
    **{str(pair): (pair.ranks, grpo_grids.sections_of(pair, 2)) for pair in PAIRS},
    **{place: (2, placement.sections_of(place, 2)) for place in placement.PLACES},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("small"), SMALL)


@pytest.mark.parametrize("name", CONFIGURED)
def test_runs_can_be_had_on_their_gpus(name: str, tmp_path: Path, model: Path) -> None:
    ranks, sections = CONFIGURED[name]
    config = load(write_config(tmp_path, model, ["a", "b"], sections), world_size=ranks)
    assert config.rollout.sleep_level == 2
    assert config.rollout.ignore_eos


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.phase)
def test_runs_that_lose_a_rank_can_go_on_elsewhere(fault: faults.Fault, tmp_path: Path, model: Path) -> None:
    path, _ = faults.configure(tmp_path, model, ["a", "b"], fault, faults.grpo())
    begun, later = (load(path, overrides, world_size=2) for overrides in ([], fault.overrides()))
    assert begun.actor != later.actor
    assert begun.trainer == later.trainer
    assert [reward.weight for reward in begun.rewards] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("pair", "share"),
    [
        (Pair("TP2", "TP1 × 2"), 0.5),  # of what TP cuts, the other half
        (Pair("TP2", "TP2"), 0.0),
        (Pair("DP2", "TP2"), 0.0),
        (Pair("CP2", "TP1 × 2"), 0.0),
    ],
    ids=str,
)
def test_what_a_rank_must_receive(pair: Pair, share: float, tmp_path: Path, model: Path) -> None:
    """Two bytes of each weight. All are cut but the norms: two of each layer, and the last."""
    path = write_config(tmp_path, model, ["a", "b"], grpo_grids.sections_of(pair, 2))
    norms = (2 * SMALL.num_hidden_layers + 1) * SMALL.hidden_size
    assert grpo_grids.expected_bytes(path, [], 2) == 2 * share * (SMALL.parameters - norms)


def records(run: Path, *, received: Sequence[float]) -> None:
    """What a run would have recorded that received so many bytes in each step."""
    run.mkdir(parents=True)
    common = {
        "time/generate": 1.0, "time/update": 2.0, "time/sync": 0.5, "time/sync/weights": 0.25, "time/sync/cache": 0.25,
        "memory/update_gib": 8.0, "mismatch/kl": 1e-4, "mismatch/log_prob_mean": 0.01, "mismatch/log_prob_max": 0.1,
        "sync/local_bytes": 1e6,
    }  # fmt: skip
    lines = [
        {"step": number, "time/step": 9.0 if number == 1 else 4.0, "sync/received_bytes": count, **common}
        for number, count in enumerate(received, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def grids(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> grpo_grids.Runs:
    """Runs of two steps, of which the second receives what the first did, and one that is given away in TP2 → TP2."""

    def pretend(config: Path, overrides: Sequence[str], *, until: float, processes: int) -> bool:
        records(config.parent / "run", received=[0, 2 if "tp2_to_vllm_tp2" in str(config) else 0])
        return True

    monkeypatch.setattr(several, "train", pretend)
    return grpo_grids.Runs(model, tmp_path, [], steps=2, until=math.inf)


def test_a_step_is_told_beside_one_gpu(grids: grpo_grids.Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert grids(Pair())
    assert grids(Pair("DP2", "TP1 × 2"))
    found = measurements(capsys)
    assert (found["one GPU: step"].value, found["one GPU: step"].bound) == (4.0, None)
    step = found["DP2 → vLLM TP1 × 2: step"]
    assert (step.value, step.bound, step.details["gib"]) == (4.0, 4.0, {"update": 8.0})
    assert found["DP2 → vLLM TP1 × 2: gap, k3"].meets_target


def test_a_byte_too_many_in_any_step_is_a_failure(grids: grpo_grids.Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert not grids(Pair("TP2", "TP2"))
    assert measurements(capsys)["TP2 → vLLM TP2: received in a sync by the first rank"].meets_target is False


def test_a_run_without_time_is_left_out(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grpo_grids.Runs(model, tmp_path, [], steps=2, until=0.0)(Pair())
    assert capsys.readouterr().out == "one GPU: left out, no time is left\n"


def test_places_are_told_beside_each_other(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pretend(config: Path, overrides: Sequence[str], *, until: float, processes: int) -> bool:
        records(config.parent / "run", received=[0, 0])
        return True

    monkeypatch.setattr(several, "train", pretend)
    runs = placement.Runs(model, tmp_path, [], steps=2, until=math.inf)
    assert all([runs("on both GPUs"), runs("side by side")])
    found = measurements(capsys)
    assert found["PPO on both GPUs: step"].bound is None
    assert (found["PPO side by side: step"].bound, found["PPO side by side: step"].against) == (4.0, "s on both GPUs")
