"""`python -m megatron_bridge plan`: its figures beside counts of one's own, its words, and what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.cli import main
from megatron_bridge.families import load_architecture
from megatron_bridge.layout_options import read_layouts
from tests.bridge.test_placement import QWEN3_8B
from tests.bridge.toys import CONFIG, toy_experts
from tools.bench_plan import LLAMA_70B

MODEL_8B = 2 * 151936 * 4096 + 4096 + 36 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(QWEN3_8B))
    return str(path)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_figures(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """TP8 to engines of TP2: each rank needs half of the model and holds at most an eighth of it."""
    report = plan(capsys, "--model", model, "--train", "tp=8", "--rollout", "tp=2")
    assert report["model_bytes"] == 2 * MODEL_8B
    for needed, local, received in zip(
        *(report[f"{key}_bytes"] for key in ("needed", "local", "received")), strict=True
    ):
        assert needed == local + received
        assert needed == pytest.approx(MODEL_8B, rel=1e-3)  # half of the weights, two bytes each; norms are whole
    assert sum(report["received_bytes"]) == sum(report["sent_bytes"]) == report["lower_bound_received_bytes"]
    assert max(report["received_bytes"]) / 1e9 == pytest.approx(8.190, abs=1e-3)
    assert report["peak_extra_bytes"] <= 4 * 256 * 2**20
    assert (
        report["transfers"] == 8 * 4 - 4
    )  # each from the four that hold its half; four of the ranks hold a part of it
    aligned = plan(capsys, "--model", model, "--train", "tp=8", "--rollout", "tp=2", "--placement", "aligned")
    assert max(aligned["received_bytes"]) / 1e9 == pytest.approx(6.143, abs=1e-3)
    assert aligned["lower_bound_received_bytes"] == aligned["least_received_bytes"]
    assert aligned["rollout_ranks"] == [0, 4, 1, 5, 2, 6, 3, 7]


def test_nothing_is_staged_where_nothing_moves(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = plan(capsys, "--model", model, "--train", "tp=8", "--rollout", "tp=8")
    assert (sum(report["received_bytes"]), report["transfers"], report["peak_extra_bytes"]) == (0, 0, 0)
    assert report["local_bytes"] == report["needed_bytes"]


def test_bytes_between_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PP2 on two nodes of 4, an engine on each: half of the layers crosses each way, the two vocabularies once."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    words = ["--model", str(tmp_path), "--train", "tp=4,pp=2", "--rollout", "tp=4", "--ranks-per-node", "4"]
    report = plan(capsys, *words)
    layers = 40 * (8192 * 10240 + 8192 * 8192 + 3 * 8192 * 28672 + 2 * 8192)
    vocab = 128256 * 8192
    assert report["node_bytes"] == [[1, 0, 2 * (layers + vocab + 8192)], [0, 1, 2 * (layers + vocab)]]
    assert main(["plan", *words]) == 0
    out = capsys.readouterr().out
    assert "node 1 to 0: 70.554 GB" in out
    assert "ratio 1.000" in out


def test_data_parallelism_fills_the_same_ranks() -> None:
    arch, experts = load_architecture(CONFIG), toy_experts(num_attention_heads=8, num_key_value_heads=8)
    train, rollout = read_layouts(arch, "tp=2,pp=2", "tp=4,dp=2", "tp-dp-pp")
    assert (train.dp, rollout.ranks) == (2, tuple(range(8)))
    train, rollout = read_layouts(arch, "tp=1", "tp=4", "tp-dp-pp")
    assert (train.dp, rollout.ranks) == (4, (0, 1, 2, 3))
    train, rollout = read_layouts(arch, "tp=2,dp=4,stages=2", "tp=2", "tp-dp-pp")
    assert (train.stages, rollout.ranks) == ((2,), tuple(range(8)))
    train, rollout = read_layouts(experts, "pp=3,ep=4,etp=1", "tp=2,ep=2", "tp-ep-dp-pp")
    assert (train.dp, rollout.ep, len(rollout.ranks)) == (4, True, 12)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("--model nowhere --train tp=8 --rollout tp=2", "--model nowhere: no such file or folder; give a folder with"),
        ("--train tp=3 --rollout tp=2", "--train tp=3: 32 attention heads do not split .*: tp may be 1, 2, 4"),
        ("--train tp=8 --rollout tp=5", "--rollout tp=5: 32 attention heads .*: tp may be 1, 2, 4"),
        ("--train tp=8,size=2 --rollout tp=8", "--train tp=8,size=2: 'size=2' is none of tp, pp, vpp, cp, ep, etp, dp"),
        ("--train tp=0 --rollout tp=8", "--train tp=0: tp must be at least 1"),
        ("--train tp=8,dp=999999999 --rollout tp=8", "--train .* --rollout tp=8: 7,999,999,992 ranks are too many"),
        (f"--train tp={'9' * 5000} --rollout tp=8", "--train tp=9*: tp is too large"),
        (f"--train tp=8,stages={'9' * 5000} --rollout tp=8", "--train tp=8,stages=9*: stages is too large"),
        ("--train tp=8,vpp=99999999 --rollout tp=8", "--train tp=8,vpp=99999999: 99,999,999 stages are too many"),
        ("--train pp=50 --rollout tp=1", "--train pp=50: stages of 0-0-0-0-0-0-0-0-… layers are not 36 layers"),
        ("--train tp=2,tp=4 --rollout tp=8", "tp is given twice"),
        ("--train tp=8,pp=5 --rollout tp=8", "--train tp=8,pp=5: stages of 7-7-7-7-7 layers are not 36 layers"),
        ("--train tp=8,dp=1 --rollout tp=16", "--rollout tp=16: 8 training ranks do not divide into engines of 16"),
        ("--train tp=8 --rollout tp=8,ep=2", "--rollout tp=8,ep=2: an engine's experts .*: ep is 1 or 8"),
        ("--train tp=8 --rollout tp=8,ep=8", "--rollout tp=8,ep=8: this qwen3 model has no experts to spread"),
        ("--train tp=4,dp=2,ep=2 --rollout tp=8", "--train tp=4,dp=2,ep=2: this qwen3 model has no experts to spread"),
        ("--train tp=8 --rollout tp=8 --order tp-dp", "--order tp-dp: order 'tp-dp' does not name tp, dp and pp"),
        ("--train tp=8 --rollout tp=8 --bucket-mib 0", "argument --bucket-mib: must be a whole number of at least 1"),
        ("--rollout tp=8", "the following arguments are required: --train"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(model: str, words: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = words.split() if "--model" in words else ["--model", model, *words.split()]
    assert main(["plan", *given]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.match(f"error: .*{fault}", err)


def test_a_broken_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"model_type": "gpt2"}')
    assert main(["plan", "--model", str(path), "--train", "tp=1", "--rollout", "tp=1"]) == 2
    assert f"error: --model {path}: model_type 'gpt2' is not one of llama" in capsys.readouterr().err


def test_the_model_may_be_given_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--train", "tp=1", "--rollout", "tp=1")
    assert plan(capsys, "--model", json.dumps(CONFIG), *sizes)["received_bytes"] == [0]
    assert main(["plan", "--model", '{"model_type"', *sizes]) == 2
    assert capsys.readouterr().err.startswith("error: --model: broken JSON: Expecting ':' delimiter")


def test_planning_imports_no_torch(model: str) -> None:
    code = (
        "import sys; from megatron_bridge.cli import main;"
        f"code = main(['plan', '--model', {model!r}, '--train', 'tp=4,pp=2', '--rollout', 'tp=8', '--json']);"
        "sys.exit(code or ('torch' in sys.modules) * 3)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60).returncode == 0
