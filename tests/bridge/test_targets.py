"""What stands where a new folder is to be written: nothing of anybody else's is removed, and one conversion writes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bridge.errors import UserError
from megatron_bridge.folders import MARKER, NewFolder
from megatron_bridge.lock import lock_file
from tests.bridge.test_checkpoints import toy_folder
from tests.bridge.test_conversion import Run, assert_same


@pytest.mark.parametrize("suffix", ["partial", "replaced"])
def test_a_model_under_the_name_of_a_leftover_is_kept(run: Run, tmp_path: Path, suffix: str) -> None:
    source, out = toy_folder(tmp_path / f"out.{suffix}"), tmp_path / "out"
    other = toy_folder(tmp_path / "other")
    before = sorted(path.name for path in tmp_path.iterdir())
    said = run("reshard", "--from", source, "--to", out, code=2)
    assert said == f"error: {source}: would be removed, but it is read from: give another target\n"
    said = run("reshard", "--from", other, "--to", out, code=2)
    assert said.startswith(f"error: {source}: is a folder in the way that no conversion left: ")
    assert_same(source, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_files_and_links_under_the_name_of_a_leftover_are_named(run: Run, tmp_path: Path) -> None:
    source, partial = toy_folder(tmp_path / "source"), tmp_path / "out.partial"
    partial.write_text("mine")
    said = run("reshard", "--from", source, "--to", tmp_path / "out", code=2)
    assert said.startswith(f"error: {partial}: is a file in the way")
    partial.unlink()
    partial.symlink_to(tmp_path / "elsewhere")
    said = run("reshard", "--from", source, "--to", tmp_path / "out", code=2)
    assert said.startswith(f"error: {partial}: is a link in the way")


def test_leftovers_of_an_interrupted_conversion_go(run: Run, tmp_path: Path) -> None:
    source, out = toy_folder(tmp_path / "source"), tmp_path / "out"
    for name in ("out.partial", "out.replaced"):
        (toy_folder(tmp_path / name) / MARKER).touch()
    lock_file(out).touch()
    run("reshard", "--from", source, "--to", out)
    assert_same(source, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert not (out / MARKER).exists()


def test_a_second_conversion_into_the_same_folder_is_refused(run: Run, tmp_path: Path) -> None:
    source, out = toy_folder(tmp_path / "source"), tmp_path / "out"
    first = NewFolder(out, (source,))
    first.begin(0)
    for command in (("import", "--hf", source, "--out", out), ("reshard", "--from", source, "--to", out)):
        assert run(*command, code=2) == f"error: {out}: another conversion is writing this folder\n"
    assert (first.partial / MARKER).exists()
    first.publish()
    second = NewFolder(out, (source,), overwrite=True)
    second.begin(0)
    first.discard()  # it has nothing left to discard
    assert second.partial.exists()
    second.discard()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_killed_conversion_leaves_no_lock(run: Run, tmp_path: Path) -> None:
    source, out = toy_folder(tmp_path / "source"), tmp_path / "out"
    code = (
        "import os, signal, sys; from pathlib import Path; from megatron_bridge.folders import NewFolder\n"
        "NewFolder(Path(sys.argv[1]), ()).begin(0); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, out], check=False).returncode == -signal.SIGKILL
    assert os.path.lexists(lock_file(out))
    run("reshard", "--from", source, "--to", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_folder_needs_a_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = toy_folder(tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    for out in (".", "..", "/"):
        assert "gives the new folder no name" in run("reshard", "--from", source, "--to", out, "--overwrite", code=2)


def test_a_target_inside_the_source_is_refused(run: Run, tmp_path: Path) -> None:
    source = toy_folder(tmp_path / "models" / "source")
    said = run("import", "--hf", source, "--out", source / "deep" / "out", code=2)
    assert said == f"error: {source / 'deep' / 'out'}: lies in {source}, which is read: give another target\n"
    run("import", "--hf", source, "--out", tmp_path / "megatron")
    words = ("export", "--megatron", tmp_path / "megatron", "--hf", source, "--out", source / "out")
    assert f"lies in {source}, which is read" in run(*words, code=2)
    said = run("reshard", "--from", source, "--to", tmp_path / "models", "--overwrite", code=2)
    assert "would be replaced, but it is read from" in said
    with pytest.raises(UserError, match="would be replaced"):
        NewFolder(tmp_path / "models", (source,), overwrite=True).check()
    assert sorted(path.name for path in source.iterdir()) == ["config.json", "model.safetensors"]
