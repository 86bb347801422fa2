"""The program itself: its names, where it writes, and what it takes for a path or a dtype."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import megatron_bridge
import rlflow
from megatron_bridge.cli import CLOSED_PIPE, main
from tests.bridge.test_checkpoints import toy_folder
from tests.bridge.test_conversion import ROOT, Run
from tests.bridge.toys import CONFIG

PLAN = ("plan", "--model", json.dumps(CONFIG), "--train", "tp=1", "--rollout", "tp=1")


def start(*words: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "megatron_bridge", *map(str, words)]
    environment = {**os.environ, **options.pop("env", {})}
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, env=environment, check=False, **options)


def test_a_terminal_of_few_characters(tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    done = start("inspect", source, stdout=subprocess.PIPE, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"model.layers.{0?1}.self_attn.q_proj.weight" in done.stdout


def test_an_output_that_cannot_be_written() -> None:
    with open("/dev/full", "wb") as full:
        done = start(*PLAN, stdout=full)
    assert done.returncode == 2
    assert done.stderr == b"error: standard output: cannot be written: No space left on device\n"


def test_a_reader_that_has_enough() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = start(*PLAN, stdout=closed)
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, b"")


def test_one_process_of_torchrun_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, speaks in (("1", False), ("0", True)):
        monkeypatch.setenv("RANK", rank)
        assert main(PLAN) == 0
        assert bool(capsys.readouterr().out) == speaks


@pytest.mark.parametrize(
    ("started", "name"), [("rlflow-convert", "rlflow-convert"), ("__main__.py", "megatron_bridge")]
)
def test_its_name_and_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, started: str, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [f"/somewhere/{started}"])
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{name} {megatron_bridge.__version__}\n"
    assert megatron_bridge.__version__ == rlflow.__version__
    assert main(["inspect"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {name} inspect: the following arguments are required")


def test_the_home_folder_in_paths(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_folder(tmp_path / "source")
    monkeypatch.setenv("HOME", str(tmp_path))
    run("import", "--hf=~/source", "--out=~/megatron")
    run("verify", "~/source", "~/megatron", "--hf=~/source")
    run("export", "--megatron=~/megatron", "--hf=~/source", "--out=~/back")
    run("reshard", "--from=~/back", "--to=~/again", "--hf=~/source")
    run("inspect", "~/again")
    run("plan", "--model=~/source", "--train", "tp=1", "--rollout", "tp=1")
    assert (tmp_path / "again").is_dir()


@pytest.mark.parametrize("word", ["fp32", "float32"])
def test_both_names_of_a_dtype(run: Run, tmp_path: Path, word: str) -> None:
    run("import", "--hf", toy_folder(tmp_path / "source"), "--out", tmp_path / "out", "--dtype", word)
    assert "float32" in run("inspect", tmp_path / "out")
    weights = 4 * sum(
        tensor["bytes"] for tensor in json.loads(run("inspect", tmp_path / "source", "--json"))["tensors"]
    )
    assert json.loads(run(*PLAN, "--dtype", word, "--json"))["model_bytes"] == weights // 2
    said = run(*PLAN, "--dtype", "int8", code=2)
    assert "argument --dtype: must be bf16 or bfloat16, fp16 or float16, fp32 or float32, not 'int8'" in said
