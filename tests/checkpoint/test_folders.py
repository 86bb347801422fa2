"""Which checkpoint folders are taken, and when old ones go."""

import logging
from pathlib import Path

import pytest

from rlflow.checkpoint import folders


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


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "actor" / "shard").unlink(), "actor/shard is missing"),
        (lambda folder: (folder / "actor" / "shard").write_text(""), "actor/shard has 0 bytes instead of 7"),
        (lambda folder: (folder / "actor" / "shard").write_text("weigh"), "actor/shard has 5 bytes instead of 7"),
        (lambda folder: (folder / folders.MANIFEST).unlink(), "it has no manifest.json"),
    ],
)
def test_a_broken_folder_is_passed_over_with_the_reason(tmp_path, damage, reason, caplog) -> None:  # cases.md F02
    write(tmp_path, 20)
    damage(write(tmp_path, 30))
    with caplog.at_level(logging.WARNING):
        assert folders.latest(tmp_path) == 20
    assert reason in caplog.text


def test_an_interrupted_save_leaves_the_older_step_and_is_cleaned_at_the_next(tmp_path: Path) -> None:  # F04, F11
    write(tmp_path, 1)
    (folders.begin(tmp_path, 2) / "shard").write_text("half")
    assert folders.latest(tmp_path) == 1
    write(tmp_path, 2)
    folders.retain(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002"]


def test_keep_zero_keeps_all(tmp_path: Path) -> None:  # F04, H06
    for step in (1, 2, 3):
        write(tmp_path, step)
    folders.retain(tmp_path, keep=0)
    assert folders.steps(tmp_path) == [1, 2, 3]
