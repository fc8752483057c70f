"""The files of a run's folder: locked by one run, written whole or not at all, read up to a line that was cut.

The disk may be full at any write. A file that is replaced is written under another name and renamed. A file that grows
gets its old length back if a line does not fit. A killed process may still leave a cut last line: the next command on
the folder moves it to <name>.cut.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kit.errors import RunError

LOCK = "run.lock"
PART = ".part"  # ends the name of a file that is not whole yet
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
DISK = (*NO_ROOM, *DENIED, errno.EIO, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EMFILE)
NO_LOCKS = (
    errno.ENOLCK,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
)  # a file system that has no flock

logger = logging.getLogger(__name__)


def describe_failure(path: Path | str, error: OSError) -> str:
    """Say which file failed, why, and what to do, in one line."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in NO_ROOM:
        way_out = "free space there"
    elif error.errno in DENIED:
        way_out = "make it writable"
    else:
        way_out = "look into that disk"
    return f"{path} cannot be written: {reason}; {way_out}, then run the same command again"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writes to `path`: an OSError becomes a RunError that names it."""
    try:
        yield
    except OSError as error:
        raise RunError(describe_failure(path, error)) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield another name to write to; after the block the file gets the name `path`. Raises RunError.

    If the block fails, what it wrote is deleted, and the file that had the name `path` stays.
    """
    partial = path.with_name(path.name + PART)
    with writing(path):
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def appending(path: Path) -> Iterator[IO[bytes]]:
    """Yield the file, opened at its end. If the block fails, it gets its old length back. Raises RunError."""
    with writing(path):
        before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as out:
                yield out
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, before)
            raise


# --- lines of JSON -------------------------------------------------------------------------------


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if the line was cut or is not an object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file without their ends, also a last one that has none; no lines if there is no such file."""
    return path.read_bytes().splitlines() if path.is_file() else []


def set_cut_line_aside(path: Path) -> str:
    """Move a cut last line of a JSONL file to <name>.cut, so that the next line begins on its own. Raises RunError.

    Returns what to tell; empty if the last line is whole.
    """
    if not path.is_file():
        return ""
    with writing(path), path.open("rb+") as file:
        rest = _unfinished_line(file)
        if not rest:
            return ""
        if parse_line(rest) is not None:  # only its end is missing
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
            return ""
        aside = path.with_name(f"{path.name}.cut")
        with appending(aside) as out:
            out.write(rest + b"\n")
        size = file.seek(0, os.SEEK_END)
        file.truncate(size - len(rest))
    return f"the last line of {path} was cut short; it is now in {aside.name}, and all lines before it are kept"


def _unfinished_line(file: IO[bytes]) -> bytes:
    """What stands after the last line end of a file; read from its end, since files of episodes are large."""
    rest, position = b"", file.seek(0, os.SEEK_END)
    while position and b"\n" not in rest:
        step = min(position, 1 << 20)
        position -= step
        file.seek(position)
        rest = file.read(step) + rest
    return rest.rpartition(b"\n")[2]


# --- one run a folder ----------------------------------------------------------------------------


class Lock:
    """Keeps other runs out of a folder until `release`, or until this process ends however it ends.

    flock(2) on <folder>/run.lock. Children do not keep it: those that are executed do not inherit the descriptor, and
    those that Python forks close it.
    """

    def __init__(self, folder: Path):
        self.path = folder / LOCK
        self.file: IO[str] | None = None

    def take(self) -> None:
        """Lock the folder. Raises RunError with the pid of the run that has it.

        On a file system without flock there is a warning, and no lock.
        """
        with writing(self.path):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.fdopen(os.open(self.path, flags, 0o644), "r+", errors="replace")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise RunError(
                f"{self.path} is not a regular file; remove it, then run the same command again"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(200).strip() or "unknown pid"
            file.close()
            raise RunError(
                f"{self.path.parent} is in use by another run ({holder}); wait until it ends or stop it, or give this "
                "run another trainer.experiment_name"
            ) from None
        except OSError as error:
            file.close()
            if error.errno not in NO_LOCKS:
                raise RunError(describe_failure(self.path, error)) from error
            logger.warning(
                "%s cannot be locked (%s): start no second run of this name while this one runs",
                *(self.path.parent, os.strerror(error.errno)),
            )
            return
        self.file = file
        _held.add(self)
        with contextlib.suppress(
            OSError
        ):  # a full disk: the lock holds, only its holder's pid is not written down
            file.truncate(0)
            file.seek(0)
            file.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
            file.flush()

    def release(self) -> None:
        """Let other runs in. The file stays: to delete it would let two runs lock two files of one name."""
        if self.file:
            _held.discard(self)
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_in_child() -> None:
    """After a fork: the child must not keep its parent's locks, since it may live longer."""
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)
