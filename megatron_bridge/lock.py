"""A lock by which one conversion at a time writes a folder.

It is a hidden file beside the folder that the kernel locks for an open handle, so it ends with its process, however
that ends; a file that a killed process left is locked by the next one.
"""

import errno
import fcntl
import os
from pathlib import Path

from megatron_bridge.errors import UserError

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of file systems that were mounted without


def lock_file(target: Path) -> Path:
    """The file that is locked while a folder is written."""
    return target.with_name(f".{target.name}.lock")


def take_lock(target: Path) -> int:
    """Lock a folder's name, to be given back by `release_lock` with the handle that this returns.

    UserError if another process, or another caller in this one, holds it; OSError where no file can be made. Where the
    file system has no locks nothing is locked.
    """
    while True:
        handle = os.open(lock_file(target), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise UserError(target, "another conversion is writing this folder") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(handle)
                raise
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)  # its last holder removed it after it was opened here: a newer one may be in its place


def release_lock(target: Path, handle: int) -> None:
    """Give a lock back and remove its file."""
    lock_file(target).unlink(missing_ok=True)
    os.close(handle)
