"""Keep a run's folders, sockets and Ray token away from the other users of the machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kit.errors import RunError

SOCKET_PATH_LIMIT = 107  # bytes: Linux's sun_path has 108, and the last one is a zero
# the longest path of a socket below a folder: Ray's, and verl's weight sync in the run's folder
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
RUN_SOCKET = "/kit-abcdefgh/rl-colocate-zmq-01000000-replica-999-rank-999.sock"
FOLDER_KEY = "ray_kwargs.ray_init._temp_dir"


def check_temporary_folder() -> None:
    """Raise RunError if the sockets of a run would have too long a path in TMPDIR."""
    _check_length("TMPDIR", tempfile.gettempdir(), RUN_SOCKET)


def make_ray_folder(parent: str | None) -> str:
    """Return the folder for Ray's sessions, in a private one that is made if it is missing.

    Ray sets its own folder to mode 0777, so the folder above it must keep other users out.
    parent: ray_kwargs.ray_init._temp_dir; None: /tmp/kit-UID.
    Raises RunError if another user could enter or replace it, or if its path is too long.
    """
    folder = Path(parent or f"/tmp/kit-{os.getuid()}").absolute()
    _check_length(FOLDER_KEY, str(folder), RAY_SOCKET)
    _make_private(folder)
    return str(folder / "ray")


def _check_length(name: str, folder: str, socket: str) -> None:
    length = len(os.fsencode(folder))
    room = SOCKET_PATH_LIMIT - len(socket)
    if length > room:
        raise RunError(
            f"{name}={folder} has {length} bytes, over {room}: paths of sockets in it would exceed "
            f"the {SOCKET_PATH_LIMIT} that Linux allows; set {name} to a shorter path"
        )


def _make_private(folder: Path) -> None:
    """Make a folder of mode 0700, or check that an existing one is this user's alone."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    found = folder.lstat()
    above = folder.parent.stat()
    problem, fix = "", f"set {FOLDER_KEY} to a folder that only you can use"
    if not stat.S_ISDIR(found.st_mode):
        problem = "is a symbolic link or a file"
    elif found.st_uid != os.getuid():
        problem = f"belongs to user {found.st_uid}, not to you ({os.getuid()})"
    elif mode := found.st_mode & 0o077:
        problem = f"is open to other users (mode {mode | 0o700:04o})"
        fix = f"run `chmod 700 {folder}`"
    elif above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
        problem = f"can be replaced by other users, who can write to {folder.parent}"
    if problem:
        raise RunError(f"{folder} {problem}, so other users could take over Ray's sockets; {fix}")


@contextlib.contextmanager
def ray_token() -> Iterator[None]:
    """Give the Ray that this process starts a new token, in the environment and not in a file.

    Without it Ray writes a token to ~/.ray/auth_token, which other users may be able to read.
    """
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")
    before = {name: os.environ.get(name) for name in names}
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    _reload_authentication()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _reload_authentication()


def _reload_authentication() -> None:
    """Have Ray read the mode and the token again: it keeps both after it has read them once."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
