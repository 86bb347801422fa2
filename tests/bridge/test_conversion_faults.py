"""What users of the conversion commands get wrong: one line that says it, and nothing half visible."""

import errno
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.conversion import convert
from megatron_bridge.files import INDEX, SINGLE
from megatron_bridge.folders import MARKER
from tests.bridge.test_checkpoints import toy_folder
from tests.bridge.test_conversion import Run, assert_same


def test_folders_that_are_none(run: Run, tmp_path: Path) -> None:
    source, out = toy_folder(tmp_path / "models" / "source"), tmp_path / "out"
    for wrong, message in (
        (tmp_path / "nowhere", "no such folder"),
        (source / SINGLE, "is a file: give the folder of the model"),
        (tmp_path / "models", f"{source} is one"),
    ):
        said = run("import", "--hf", wrong, "--out", out, code=2)
        assert said.startswith(f"error: {wrong}: ")
        assert message in said
        assert said.count("\n") == 1
    assert "is a Hugging Face folder" in run("export", "--megatron", source, "--out", out, code=2)
    run("import", "--hf", source, "--out", out)
    (out / "config.json").unlink()
    assert "give --hf DIR" in run("export", "--megatron", out, "--out", tmp_path / "back", code=2)
    run("export", "--megatron", out, "--hf", source, "--out", tmp_path / "back")
    assert_same(source, tmp_path / "back")


def test_files_that_are_broken(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    run("reshard", "--from", source, "--to", tmp_path / "shards", "--max-shard-size", "1K")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    index = (tmp_path / "shards" / INDEX).read_text()

    def convert_shards() -> str:
        return run("import", "--hf", tmp_path / "shards", "--out", tmp_path / "out", code=2)

    first = min(json.loads(index)["weight_map"])
    (tmp_path / "shards" / INDEX).write_text(index.replace(first, "mtp.weight"))
    assert "lists tensors that are not in their file: mtp.weight" in convert_shards()  # A25
    (tmp_path / "shards" / INDEX).write_text(index)
    os.truncate(shards[0], shards[0].stat().st_size - 1)
    assert f"error: {shards[0]}: cut short: " in convert_shards()
    shards[0].unlink()
    assert f"lists files that do not exist: {shards[0].name}" in convert_shards()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    said = run("import", "--hf", source, "--out", tmp_path / "out", code=2)
    assert "model_type 'mamba' is not one of llama, " in said
    assert not (tmp_path / "out").exists()


def test_a_grid_that_the_model_does_not_allow(run: Run, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 28, "num_key_value_heads": 28, "hidden_size": 56, "intermediate_size": 56}
    source = toy_folder(tmp_path / "source", **heads, num_hidden_layers=6)
    said = run("import", "--hf", source, "--out", tmp_path / "out", "--tp", 8, "--pp", 4, code=2)
    assert "--tp 8: 28 attention heads do not split over tensor parallel size 8" in said
    assert "valid sizes are 1, 2, 4, 7, 14, 28" in said  # cases.md H05
    assert "--pp 4: stages of 1-1-1-1 layers are not 6 layers on 4 pipeline stages: give `stages`" in said
    assert "valid sizes are 1, 2, 3, 6" in said
    run("import", "--hf", source, "--out", tmp_path / "out", "--pp", 4, "--stages", "1-2-2-1")
    said = run("import", "--hf", source, "--out", tmp_path / "x", "--pp", 31, code=2)
    assert "--pp 31: stages of 0-0-0-0-0-0-0-0-… layers are not 6 layers on 31 pipeline stages" in said
    said = run("import", "--hf", source, "--out", tmp_path / "x", "--pp", 2, "--vpp", 7, code=2)
    assert said.endswith("; with --vpp 7 no size is valid\n")
    for option in ("--vocab-multiple", "--tp"):
        said = run("import", "--hf", source, "--out", tmp_path / "x", option, 10**9, code=2)
        assert f"argument {option}: must be a whole number of at least 1 and at most 65536, not 1000000000" in said
    said = run("import", "--hf", source, "--out", tmp_path / "x", "--tp", 28, "--cp", 60000, code=2)
    assert "1,680,000 ranks are too many" in said
    assert "has no experts" in run("import", "--hf", source, "--out", tmp_path / "x", "--ep", 2, code=2)
    assert "must be a whole number" in run("import", "--hf", source, "--out", tmp_path / "x", "--tp", "two", code=2)


def test_targets_are_not_replaced_unasked(run: Run, tmp_path: Path) -> None:
    source, out = toy_folder(tmp_path / "source"), tmp_path / "out"
    run("import", "--hf", source, "--out", out)
    again = ("import", "--hf", source, "--out", out)
    assert f"error: {out}: exists already: give another target, or --overwrite" in run(*again, code=2)
    run(*again, "--overwrite")
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("")
    said = run("import", "--hf", source, "--out", tmp_path / "new", code=2)
    assert said.startswith(f"error: {tmp_path / 'new.partial'}: is a folder in the way that no conversion left: ")
    (tmp_path / "new.partial" / MARKER).touch()
    said = run("import", "--hf", source, "--out", tmp_path / "new", code=2)
    assert said.startswith(f"error: {tmp_path / 'new.partial'}: holds files that are no part of a model: thesis.txt")
    (out / "iter_0000100").mkdir()
    assert "no part of a model: iter_0000100" in run(*again, "--overwrite", code=2)
    (tmp_path / "link").symlink_to(out)
    for target in (source, tmp_path, source / "config.json", tmp_path / "link"):
        run("reshard", "--from", source, "--to", target, "--overwrite", code=2)
    assert sorted(path.name for path in source.iterdir()) == ["config.json", SINGLE]


def _fails_when_writing(run: Run, tmp_path: Path, *words: Any) -> None:
    said = run(*words, code=2)
    assert "cannot be written: File too large" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_disk_that_is_full(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toy_folder(tmp_path / "source", vocab_size=4000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        _fails_when_writing(run, tmp_path, "import", "--hf", source, "--out", tmp_path / "out")
        _fails_when_writing(run, tmp_path, "reshard", "--from", source, "--to", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    said = run("import", "--hf", source, "--out", tmp_path / "out", code=2)
    assert said == f"error: {tmp_path / 'out'}: needs 154.99 kB, but 1.00 kB are free there\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("kind", ["hf", "megatron"])
def test_a_disk_that_is_full_in_the_end(run: Run, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights fit, and what goes beside them does not."""
    source = toy_folder(tmp_path / "source")

    def no_space(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfile", no_space)
    said = run("reshard", "--from", source, "--to", tmp_path / "out", "--format", kind, code=2)
    assert said.startswith(f"error: {tmp_path / 'out.partial'}")
    assert said.endswith(": cannot be written: No space left on device\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_target_that_cannot_be_written_to(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "source")
    said = run("import", "--hf", source, "--out", "/proc/model", code=2)
    assert said.startswith("error: /proc: cannot be written to: ")
    (tmp_path / "file").touch()
    said = run("import", "--hf", source, "--out", tmp_path / "file" / "model", code=2)
    assert f"error: {tmp_path / 'file'}: cannot be written to: " in said


def test_an_interruption_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = toy_folder(tmp_path / "source"), tmp_path / "out"
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / SINGLE).write_text("of a run that was killed")
    (tmp_path / "out.partial" / MARKER).touch()

    class Interrupted(convert.Progress):
        def __call__(self, nbytes: int) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "Progress", Interrupted)
        assert run("import", "--hf", source, "--out", out, code=130).startswith("interrupted")
        assert run("reshard", "--from", source, "--to", out, code=130).startswith("interrupted")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
