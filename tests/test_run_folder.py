"""Who may write the folder of a run, and what is said where its disk is full."""

import errno
import fcntl
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from torch.distributed.checkpoint import CheckpointException

from rlflow import run_folder
from rlflow.errors import UserError

FULL = OSError(errno.ENOSPC, "No space left on device")


def write_until_killed(folder: Path, pipe: Connection) -> None:
    os.setpgrp()  # so that the child can be ended too
    with run_folder.alone_in(folder):
        if os.fork():
            pipe.send("writing")
        time.sleep(60)  # so does a child, such as those that score or load data


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it goes: a run that was killed leaves no lock, though its children live on."""
    folder, context = tmp_path / "runs" / "one", multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=write_until_killed, args=(folder, theirs))
    process.start()
    try:
        assert ours.recv() == "writing"
        monkeypatch.setattr(run_folder, "PATIENCE", 0.0)
        with pytest.raises(UserError) as raised, run_folder.alone_in(folder):
            pass
        message = f"trainer.output_dir: {folder} is being written by process {process.pid} on "
        assert str(raised.value).startswith(message)
        assert " since 20" in str(raised.value)
        monkeypatch.undo()
        threading.Timer(0.5, process.kill).start()
        with run_folder.alone_in(folder):
            assert f"process {os.getpid()} on " in (folder / run_folder.LOCK).read_text()
    finally:
        os.killpg(process.pid or 0, signal.SIGKILL)
    assert list(folder.iterdir()) == []


def test_a_file_system_without_locks_is_written_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with caplog.at_level(logging.WARNING), run_folder.alone_in(tmp_path):
        pass
    assert f"{tmp_path} cannot be locked (No locks available)" in caplog.text


def wrapped(error: Exception) -> RuntimeError:
    failure = RuntimeError("Worker failure")
    failure.__cause__ = error
    return failure


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        wrapped(FULL),
        CheckpointException("save", {1: (FULL, None)}),  # type: ignore[dict-item]
        RuntimeError(f"worker 3: {FULL}"),
    ],
)
def test_a_full_disk_is_said_in_one_line(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised, run_folder.naming_full_disk(tmp_path, "checkpoint step_000004"):
        raise error
    said = f"trainer.output_dir: {tmp_path}: No space left on device, while checkpoint step_000004 was written: "
    assert str(raised.value) == said + "make room, lower trainer.keep (0 keeps all), or take another folder"


def test_a_failure_that_does_not_say_why_is_a_full_disk_s_only_where_nothing_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's, which has "unexpected pos" for a write that was cut."""
    with pytest.raises(RuntimeError, match="unexpected pos"), run_folder.naming_full_disk(tmp_path / "new", "it"):
        raise RuntimeError("unexpected pos 64 vs 0")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 0}))
    with pytest.raises(UserError, match="No space left"), run_folder.naming_full_disk(tmp_path, "it"):
        raise RuntimeError("unexpected pos 64 vs 0")


def test_space_is_said_in_units_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 812_000}))
    run_folder.check_space(tmp_path, 812_000, "it")
    with pytest.raises(UserError) as raised:
        run_folder.check_space(tmp_path, 5_120_000, "the trained model")
    said = f"trainer.output_dir: {tmp_path} has 812.00 kB free, the trained model needs 5.12 MB: "
    assert str(raised.value).startswith(said)
