"""The folder of a run while the run writes it: one run at a time.

What the files in it are is left to those who write them: `checkpoint`, `tracking`, and the bridge for a trained model.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from rlflow.errors import UserError

log = logging.getLogger(__name__)
LOCK = "run.lock"
KEY = "trainer.output_dir"


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
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(KEY, f"cannot be written to: {error}") from error
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = os.read(handle, 1000).decode(errors="replace") or "another process"
            os.close(handle)
            rule = "wait for its end, end it, or take another folder"
            raise UserError(KEY, f"{folder} is being written by {holder}: {rule}") from error
        except OSError as error:  # of a file system that was mounted without locks
            log.warning("%s cannot be locked (%s): nothing keeps another run from writing it", folder, error.strerror)
        if os.fstat(handle).st_nlink:
            _tell_holder(handle)
            return handle
        os.close(handle)  # its last holder removed it after it was opened here: a newer one may be in its place


def _tell_holder(handle: int) -> None:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, but nobody is told whose it is
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)
