"""Which checkpoint folders are taken, and when old ones go."""

import errno
import logging
from pathlib import Path

import pytest

from rlflow.checkpoint import folders, store
from rlflow.errors import UserError


def write(root: Path, step: int, text: str = "weights") -> Path:
    partial = folders.begin(root, step)
    (partial / "actor").mkdir()
    (partial / "actor" / "shard").write_text(text)
    return folders.publish(partial, step)


def test_a_folder_is_visible_only_when_published(tmp_path: Path) -> None:
    partial = folders.begin(tmp_path, 3)
    (partial / "shard").write_text("half")
    assert folders.latest(tmp_path) is None
    folders.publish(partial, 3)
    assert folders.latest(tmp_path) == 3


DAMAGES = pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "actor" / "shard").unlink(), "actor/shard is missing"),
        (lambda folder: (folder / "actor" / "shard").write_text(""), "actor/shard has 0 bytes instead of 7"),
        (lambda folder: (folder / "actor" / "shard").write_text("weigh"), "actor/shard has 5 bytes instead of 7"),
        (lambda folder: (folder / folders.MANIFEST).unlink(), "it has no manifest.json"),
        (lambda folder: (folder / folders.MANIFEST).write_text('{"step": 30'), "its manifest.json is broken"),
    ],
)


@DAMAGES
def test_a_broken_folder_is_passed_over_with_the_reason(tmp_path, damage, reason, caplog) -> None:  # cases.md F02
    write(tmp_path, 20)
    damage(write(tmp_path, 30))
    with caplog.at_level(logging.WARNING):
        assert folders.latest(tmp_path) == 20
    assert reason in caplog.text


@DAMAGES
def test_where_none_is_complete_nothing_starts_anew_over_them(tmp_path, damage, reason) -> None:
    (folders.begin(tmp_path, 40) / "shard").write_text("half")
    for step in (20, 30):
        damage(write(tmp_path, step))
    with pytest.raises(UserError) as raised:
        folders.latest(tmp_path)
    said = f"trainer.resume: {tmp_path} has checkpoints, none complete; step_000030: {reason}; remove them, take "
    assert str(raised.value).startswith(said)


def test_an_interrupted_save_leaves_the_older_step_and_is_cleaned_at_the_next(tmp_path: Path) -> None:  # F04, F11
    write(tmp_path, 1)
    (folders.begin(tmp_path, 2) / "shard").write_text("half")
    assert folders.latest(tmp_path) == 1
    write(tmp_path, 2)
    folders.retain(tmp_path, keep=1, newest=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002"]


def test_a_step_that_is_done_again_replaces_the_folder(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    folder = write(tmp_path, 1, "new, and longer")
    assert (folder / "actor" / "shard").read_text() == "new, and longer"
    assert folders.latest(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_a_broken_step_takes_no_place_of_a_complete_one(tmp_path: Path) -> None:
    """Step 30 was broken, the run went on from 20 and saved 25: with keep = 1 that is the one to keep."""
    for step in (10, 20, 25, 30):
        write(tmp_path, step)
    for step in (10, 30):
        (tmp_path / f"step_0000{step}" / "actor" / "shard").unlink()
    folders.retain(tmp_path, keep=1, newest=25)
    assert folders.latest(tmp_path) == 25
    assert folders.steps(tmp_path) == [25, 30]


def test_keep_zero_keeps_all(tmp_path: Path) -> None:  # F04, H06
    for step in (1, 2, 3):
        write(tmp_path, step)
    folders.retain(tmp_path, keep=0, newest=3)
    assert folders.steps(tmp_path) == [1, 2, 3]


def test_what_fills_the_disk_goes_when_a_save_fails_and_when_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(states: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store.torch, "save", fill)
    monkeypatch.setattr(store, "agree_on_group_names", lambda: None)
    monkeypatch.setattr(store.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(store.dist, "barrier", lambda: None)
    write(tmp_path, 1)
    with pytest.raises(UserError, match="No space left on device, while checkpoint step_000002 was written"):
        store.Checkpoints(tmp_path, keep=2).save({}, store.State(step=2))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    (folders.begin(tmp_path, 2) / "shard").write_text("half")
    folders.remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
