"""Who may write the folder of a run."""

import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rlflow import run_folder
from rlflow.errors import UserError


def write_until_killed(folder: Path, pipe: Connection) -> None:
    os.setpgrp()  # so that the child can be ended too
    with run_folder.alone_in(folder):
        if os.fork():
            pipe.send("writing")
        time.sleep(60)  # so does a child, such as those that score or load data


def test_a_second_run_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """However it goes: a run that was killed leaves no lock, though its children live on."""
    folder, context = tmp_path / "runs" / "one", multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=write_until_killed, args=(folder, theirs))
    process.start()
    try:
        assert ours.recv() == "writing"
        with pytest.raises(UserError) as raised, run_folder.alone_in(folder):
            pass
        message = f"trainer.output_dir: {folder} is being written by process {process.pid} on "
        assert str(raised.value).startswith(message)
        assert " since 20" in str(raised.value)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
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
