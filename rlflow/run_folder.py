"""The folder of a run while the run writes it: one run at a time, and what a full disk does to it.

What the files in it are is left to those who write them: `checkpoint`, `tracking`, and the bridge for a trained model.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from torch.distributed.checkpoint import CheckpointException

from megatron_bridge.folders import free_bytes, show_bytes
from rlflow.errors import UserError

log = logging.getLogger(__name__)
LOCK = "run.lock"
KEY = "trainer.output_dir"
PATIENCE, PAUSE = 15.0, 0.2  # seconds: ranks whose launcher was killed end within about 10
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES = 2**20  # free on a disk that a write has filled


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder, and keep every other process from writing it as a run meanwhile. One rank of a job enters this.

    The kernel holds the lock for this process and no child of it, so that it ends with the process, however that ends.
    Raises UserError, which says who writes the folder, where another process does, or where nothing can be written.
    """
    handle = _lock(folder)
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)


def _lock(folder: Path) -> int:
    """The handle of the locked file, to be closed at the end."""
    deadline = time.monotonic() + PATIENCE
    while True:
        handle = _open(folder)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(handle, 1000).decode(errors="replace") or "another process"
            os.close(handle)
            if time.monotonic() > deadline:
                rule = "wait for its end, end it, or take another folder"
                raise UserError(KEY, f"{folder} is being written by {holder}: {rule}") from error
            time.sleep(PAUSE)
            continue
        except OSError as error:  # of a file system that was mounted without locks
            log.warning("%s cannot be locked (%s): nothing keeps another run from writing it", folder, error.strerror)
        if os.fstat(handle).st_nlink:
            _tell_holder(handle)
            return handle
        os.close(handle)  # its last holder removed it after it was opened here: a newer one may be in its place


def _open(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(KEY, f"cannot be written to: {error}") from error


def _tell_holder(handle: int) -> None:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, but nobody is told whose it is
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)


def check_space(folder: Path, needed: int, what: str) -> None:
    """UserError if the disk of a folder has less than `needed` bytes free for `what`."""
    if needed > (free := free_bytes(folder)):
        rule = f"{folder} has {show_bytes(free)} free, {what} needs {show_bytes(needed)}"
        raise UserError(KEY, f"{rule}: make room, or take another folder")


@contextlib.contextmanager
def naming_full_disk(folder: Path, what: str) -> Iterator[None]:
    """What fails because the disk of a folder is full, while `what` is written there, is a UserError that says so."""
    try:
        yield
    except UserError:
        raise
    except (Exception, CheckpointException) as error:
        if (words := _lack_of_space(error, folder)) is None:
            raise
        rule = f"{folder}: {words}, while {what} was written"
        raise UserError(KEY, f"{rule}: make room, lower trainer.keep (0 keeps all), or take another folder") from error


def _lack_of_space(error: BaseException, folder: Path) -> str | None:
    """The system's words if a full disk is what an error comes from; not all who write tell why they failed."""
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if isinstance(found, OSError) and found.errno in FULL:
            return os.strerror(found.errno)
        if isinstance(found, CheckpointException):
            pending += [failure for failure, _ in found.failures.values()]
        if found is not None:
            pending += [found.__cause__, found.__context__]
    full = os.strerror(errno.ENOSPC)
    return full if full in str(error) or free_bytes(folder) < FULL_BYTES else None
