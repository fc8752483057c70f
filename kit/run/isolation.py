"""Isolate a run from other runs and users: its folders, and Ray's folder, token and GPUs.

Protects: a run's processes, from other users who reach its sockets, and from other runs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kit.errors import RunError

SOCKET_PATH_LIMIT = 107  # bytes: Linux's sun_path has 108, and the last one is a zero
# the longest socket path below each folder: Ray's, and verl's weight sync in the run's TMPDIR
RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
RUN_SOCKET = "/kit-abcdefgh/rl-colocate-zmq-01000000-replica-999-rank-999.sock"
INDUCTOR_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # torch would use TMPDIR
# As in Ray. Linux's default is 1024. With more, programs that close every possible file take long.
MAX_OPEN_FILES = 65536
FOLDER_KEY = "ray_kwargs.ray_init._temp_dir"


def check_limits() -> None:
    """Raise the limit of open files. Raises RunError if paths of sockets in TMPDIR are too long."""
    _check_length("TMPDIR", tempfile.gettempdir(), RUN_SOCKET)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # in Python, "no limit" is -1
    limit = MAX_OPEN_FILES if hard < 0 else min(hard, MAX_OPEN_FILES)
    if 0 <= soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@contextlib.contextmanager
def use_own_tmpdir() -> Iterator[str]:
    """Set TMPDIR to a new folder of mode 0700, and yield its path. Delete it after the block.

    All processes of the run keep their sockets and locks there. The kernels that torch compiles
    stay for the next run: in TORCHINDUCTOR_CACHE_DIR, or in ~/.cache/torchinductor if it is not
    set. Other nodes of a cluster do not have the folder, and use /tmp.
    """
    folder = tempfile.mkdtemp(prefix="kit-")
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kernels = os.environ.get(INDUCTOR_CACHE, str(caches / "torchinductor"))
    try:
        with change_environment({"TMPDIR": folder, INDUCTOR_CACHE: kernels}):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_ray_folder(parent: str | None) -> str:
    """Return the folder for Ray's sessions, in a private folder that is made if it is missing.

    Ray sets its own folder to mode 0777, so the folder above it must keep other users out.
    parent: ray_kwargs.ray_init._temp_dir; None: /tmp/kit-UID.
    Raises RunError if another user could enter or replace the folder, or if its path is too long.
    """
    folder = Path(parent or f"/tmp/kit-{os.getuid()}").absolute()
    _check_length(FOLDER_KEY, str(folder), RAY_SOCKET)
    _make_private(folder)
    return str(folder / "ray")


def _check_length(name: str, folder: str, socket: str) -> None:
    length = len(os.fsencode(folder))
    limit = SOCKET_PATH_LIMIT - len(socket)
    if length > limit:
        raise RunError(
            f"{name}={folder} has {length} bytes, over {limit}. Paths of sockets in it would "
            f"exceed the {SOCKET_PATH_LIMIT} bytes that Linux allows. "
            f"Set {name} to a shorter path"
        )


def _make_private(folder: Path) -> None:
    """Make a folder of mode 0700, or check that only this user can use an existing one."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    status = folder.lstat()
    parent_mode = folder.parent.stat().st_mode
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    is_open = bool(status.st_mode & 0o077)
    is_replaceable = bool(parent_mode & 0o022) and not parent_mode & stat.S_ISVTX
    if not is_own or is_open or is_replaceable:
        raise RunError(
            f"Other users could take over Ray's sockets in {folder}: it is not yours, or others "
            f"can enter or replace it. Run `chmod 700 {folder}`, or set {FOLDER_KEY} to a folder "
            "that only you can use"
        )


@contextlib.contextmanager
def show_logical_gpus(device: str) -> Iterator[None]:
    """Hide CUDA_VISIBLE_DEVICES from the processes that a recipe for a CPU starts in the block.

    Such a recipe gives Ray logical GPUs. Ray and its workers read their ids from this variable, and
    users set it to "" or -1 to compute on the CPU. device: trainer.device.
    """
    names = ["CUDA_VISIBLE_DEVICES"] if device == "cpu" else []
    with change_environment(dict.fromkeys(names)):
        yield


@contextlib.contextmanager
def set_ray_token() -> Iterator[None]:
    """Set a new token for the Ray that this process starts: in the environment, not in a file.

    Without it Ray writes a token to ~/.ray/auth_token, which other users may be able to read.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        with change_environment(token):
            _reload_authentication()
            yield
    finally:
        _reload_authentication()


@contextlib.contextmanager
def change_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in the block, or remove those with None."""
    previous = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        _set_variables(previous)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _reload_authentication() -> None:
    """Make Ray read the mode and the token again, since it caches both."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
