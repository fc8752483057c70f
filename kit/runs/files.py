"""Write the files of a run folder completely or not at all, and lock the folder for one run.

The disk may be full at any write:

- A file that is replaced is written under another name, then renamed.
- A file that grows gets its old length back if a line does not fit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import weakref
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.lib.npyio import NpzFile

from kit.errors import RunError

MAX_ARRAY_BYTES = 2**28  # of an .npz file, unpacked
LOCK_NAME = "run.lock"
PARTIAL_SUFFIX = ".part"  # ends the name of a file that is not complete yet
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PERMISSION_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
WRITE_FAILED = (
    *DISK_FULL,
    *PERMISSION_DENIED,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.EMFILE,
)
# of flock(2) on a file system without locks
LOCKS_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

logger = logging.getLogger(__name__)


def describe_write_error(path: Path | str, error: OSError) -> str:
    """Return one line: which file could not be written, why, and how to fix it."""
    reason = os.strerror(error.errno) if error.errno else str(error).rstrip(".")
    if error.errno in DISK_FULL:
        hint = "Free space there"
    elif error.errno in PERMISSION_DENIED:
        hint = "Make it writable"
    elif error.errno == errno.ENOENT:  # of another file, or of a folder above
        reason = f"{error.filename or path} does not exist"
        hint = "Restore it, or give another path"
    else:
        hint = "Check that disk"
    return f"{path} cannot be written: {reason}. {hint}, then rerun the same command"


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(describe_write_error(path, error)) from error


def open_arrays(path: Path) -> NpzFile:
    """Open an .npz file. Raises ValueError if it would unpack to more than MAX_ARRAY_BYTES."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    if size > MAX_ARRAY_BYTES:
        raise ValueError(f"{path}: its arrays have {size:,} bytes, over {MAX_ARRAY_BYTES:,}")
    return cast(NpzFile, np.load(path))


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield another path to write to; after the block, rename that file to `path`.

    If the block fails, delete the new file and keep the old one. Raises RunError.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with explain_write_errors(path):
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def append_or_restore(path: Path) -> Iterator[IO[bytes]]:
    """Yield the file, opened at its end. If the block fails, restore the old length.

    Raises RunError.
    """
    with explain_write_errors(path):
        old_size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                yield file
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, old_size)
            raise


# --- one run per folder --------------------------------------------------------------------------


class FolderLock:
    """Locks a folder for this run until `release`, or until this process ends for any reason.

    Uses flock(2) on <folder>/run.lock. Child processes do not keep the lock. A child that executes
    another program does not inherit the descriptor. A child that Python forks closes it.
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK_NAME
        self.file: IO[str] | None = None

    def acquire(self) -> None:
        """Lock the folder. Raises RunError with the pid of the run that holds the lock.

        On a file system without flock, print a warning and do not lock.
        """
        with explain_write_errors(self.path):
            file = self.path.open("a+", errors="replace")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown pid"
            file.close()
            raise RunError(
                f"{self.path.parent} is in use by another run ({holder}). Wait until it ends, "
                "stop it, or give this run another trainer.experiment_name"
            ) from None
        except OSError as error:
            file.close()
            if error.errno not in LOCKS_UNSUPPORTED:
                raise RunError(describe_write_error(self.path, error)) from error
            logger.warning(
                "%s cannot be locked (%s): do not start a second run with this name",
                self.path.parent,
                os.strerror(error.errno),
            )
            return
        self.file = file
        _held_locks.add(self)
        with contextlib.suppress(OSError):  # on a full disk only the pid is missing
            file.truncate(0)
            file.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
            file.flush()

    def release(self) -> None:
        """Unlock the folder, and keep the lock file.

        If it were deleted, two runs could lock two files of the same name.
        """
        if self.file:
            _held_locks.discard(self)
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None


_held_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close a forked child's copies of the locks, since the child may outlive its parent."""
    for lock in list(_held_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
