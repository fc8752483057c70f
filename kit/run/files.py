"""Write the files of a run folder completely or not at all, and lock the folder for one run.

The disk may be full at any write:

- A file that is replaced is written under another name, then renamed.
- A file that grows gets its old length back if a line does not fit.

Protects: the files of a run, from half-written content and from a second run.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from kit.errors import RunError

LOCK_NAME = "run.lock"
PARTIAL_SUFFIX = ".part"  # ends the name of a file that is not complete yet
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PERMISSION_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
WRITE_FAILED = (*DISK_FULL, *PERMISSION_DENIED, errno.EIO, errno.ENOTDIR, errno.EMFILE)


def describe_write_error(path: Path | str, error: OSError) -> str:
    """Return one line: which file could not be written, why, and how to fix it."""
    reason = os.strerror(error.errno) if error.errno else str(error).rstrip(".")
    hint = "Free space there" if error.errno in DISK_FULL else "Make it writable"
    return f"{path} cannot be written: {reason}. {hint}, then rerun the same command"


@contextlib.contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a RunError that names the path."""
    try:
        yield
    except OSError as error:
        raise RunError(describe_write_error(path, error)) from error


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


def lock_folder(folder: Path) -> FileLock:
    """Lock a folder for this run until `release`, or until this process ends for any reason.

    The lock is flock(2) of <folder>/run.lock, which child processes do not keep. The file stays.
    Raises RunError with the pid of the run that holds the lock.
    """
    path = folder / LOCK_NAME
    lock = FileLock(path, timeout=0)
    with explain_write_errors(path):
        try:
            lock.acquire()
        except Timeout:
            holder = path.read_text(errors="replace").strip() or "unknown pid"
            raise RunError(
                f"{folder} is in use by another run ({holder}). Wait until it ends, stop it, or "
                "give this run another trainer.experiment_name"
            ) from None
    with contextlib.suppress(OSError):  # on a full disk only the pid is missing
        path.write_text(f"pid {os.getpid()} on {os.uname().nodename}\n")
    return lock
