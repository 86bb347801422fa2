"""How many rows of a Megatron checkpoint's padded vocabulary are the model's: what import noted, or the config says."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_bridge.files import open_hf
from megatron_bridge.record import RECORD
from tests.bridge.test_checkpoints import toy_folder

Run = Callable[..., str]


@pytest.fixture
def megatron(run: Run, tmp_path: Path) -> Path:
    """A checkpoint of 37 rows, padded to 64."""
    run("import", "--hf", toy_folder(tmp_path / "source"), "--out", tmp_path / "megatron", "--vocab-multiple", 64)
    return tmp_path / "megatron"


def set_vocabulary(folder: Path, size: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))


@pytest.mark.parametrize("size", [30, 36, 38, 64])
def test_another_vocabulary_than_was_imported_is_refused(run: Run, megatron: Path, tmp_path: Path, size: int) -> None:
    set_vocabulary(megatron, size)
    record = megatron / "iter_0000000" / RECORD
    expected = f"error: {record}: the model has vocab_size 37, but the config says {size}: give its own config.json\n"
    assert run("export", "--megatron", megatron, "--out", tmp_path / "out", code=2) == expected
    assert run("reshard", "--from", record.parent, "--to", tmp_path / "out", code=2) == expected
    other = toy_folder(tmp_path / "other", vocab_size=size)
    assert run("export", "--megatron", megatron, "--hf", other, "--out", tmp_path / "out", code=2) == expected
    assert not (tmp_path / "out").exists()


def test_a_record_that_is_broken_is_named(run: Run, megatron: Path, tmp_path: Path) -> None:
    (megatron / "iter_0000000" / RECORD).write_text("[]")
    assert f"{RECORD}: not a JSON object" in run("export", "--megatron", megatron, "--out", tmp_path / "out", code=2)


def test_without_a_record_the_config_says_and_padding_is_counted(run: Run, megatron: Path, tmp_path: Path) -> None:
    said = run("export", "--megatron", megatron, "--out", tmp_path / "out")
    assert "padding" not in said
    (megatron / "iter_0000000" / RECORD).unlink()
    set_vocabulary(megatron, 65)
    assert "is [64, 8], expected [65, 8]" in run("export", "--megatron", megatron, "--out", tmp_path / "x", code=2)
    for size, rows in ((37, 27), (30, 34), (64, 0)):
        set_vocabulary(megatron, size)
        shutil.rmtree(tmp_path / "out")
        said = run("export", "--megatron", megatron, "--out", tmp_path / "out")
        line = f"vocab_size is {size} by the config: {rows} of the checkpoint's 64 rows are taken for padding\n"
        assert (line in said) == bool(rows)
        assert open_hf(tmp_path / "out")["lm_head.weight"].shape == (size, 8)
