"""Processes that fork from one that has imported, instead of importing torch, verl and vLLM each for itself.

    FOLDER/python ARGUMENTS         what stands in for Python: has the process below fork, and the fork gets its
                                    arguments, environment, folder, signal mask and descriptors. It lives as long as the
                                    fork, hands it SIGTERM, ends as it ends; killed, it takes the fork along
    fork.py serve FD PYTHON MODULE  a process that forks: imports the modules, then waits to be asked, till stdin ends
                                    It waits before `ray`, which reads of which raylet it is when it is imported

Ray starts its workers by the first one (runtime_env.py_executable), and these vLLM's engine (multiprocessing's
set_executable). All else, and all where nobody serves, as on other nodes, becomes Python itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NUMBER = 16  # bytes of a number that goes over the socket
FORKED = (
    "default_worker.py",
    "from multiprocessing.spawn import spawn_main",
)  # in the arguments of what takes a fork
_begun: list[tuple[str, Any]] = []  # the process of the next run, and where it is


def begin(modules: str) -> None:
    """Have a process import `modules`, names with spaces between, for the run that comes: `serving` takes it over."""
    import atexit
    import shlex
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="kit-fork-")
    python, here = os.path.join(folder, "python"), os.path.abspath(__file__)
    asker = shlex.join([sys.executable, "-I", "-S", here, "ask", folder])
    with open(python, "w") as script:
        script.write(f'#!/bin/sh\nexec {asker} "$@"\n')
    os.chmod(python, 0o700)
    with open(os.path.join(folder, "log"), "w") as log, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(folder, "socket"))
        listener.listen(64)
        command = [
            sys.executable,
            "-P",
            here,
            "serve",
            str(listener.fileno()),
            python,
            *modules.split(),
        ]
        process = subprocess.Popen(  # in a session of its own: Ctrl-C is the driver's
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
            pass_fds=[listener.fileno()], env=os.environ | {"TMPDIR": folder},
        )  # fmt: skip
    _begun.append((folder, process))
    atexit.register(_end, folder, process)


def _end(folder: str, process: Any) -> None:
    import shutil

    process.terminate()  # stdin's end alone would wait for its imports
    process.communicate()
    shutil.rmtree(folder, ignore_errors=True)  # at exit it is gone


@contextlib.contextmanager
def serving(modules: str, log: Path) -> Iterator[tuple[str, Callable[..., None]]]:
    """A process that imports `modules`, unless one has begun to, and forks. What stands in for Python, by whom asking
    waits for the imports; and what to call with the environment that Ray's workers share, once Ray is there."""
    import json
    import shutil

    if not _begun:
        begin(modules)
    folder, process = _begun.pop()

    def tell(**environment: str) -> None:
        with contextlib.suppress(
            BrokenPipeError
        ):  # it ended: its log says why, and Python itself does all
            os.write(process.stdin.fileno(), json.dumps(environment).encode() + b"\n")

    try:
        yield os.path.join(folder, "python"), tell
    finally:
        shutil.copy(os.path.join(folder, "log"), log)
        _end(folder, process)


# --- who asks: it stands before every process, and so imports little ------------------------------


def ask(folder: str, arguments: list[str]) -> int:
    """Have a fork do what `python ARGUMENTS` would, and wait for its end. Its status."""
    import json

    server = socket.socket(socket.AF_UNIX)
    descriptors = [
        fd for fd in map(int, os.listdir("/proc/self/fd")) if fd != server.fileno() and _is_open(fd)
    ]
    mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    try:
        if not any(name in argument for name in FORKED for argument in arguments):
            raise ConnectionRefusedError("Python itself will do")
        server.connect(os.path.join(folder, "socket"))
        socket.send_fds(server, [b"."], descriptors)
        server.sendall(
            json.dumps([arguments, dict(os.environ), os.getcwd(), mask, descriptors]).encode()
            + b"\n"
        )
        pid = int(server.recv(NUMBER, socket.MSG_WAITALL))
    except (OSError, ValueError):  # nobody serves, or it ended before it forked
        os.execv(sys.executable, [sys.executable, *arguments])
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    for fd in descriptors:
        os.close(fd)  # a pipe is to end when the fork closes it
    status = int(server.recv(NUMBER, socket.MSG_WAITALL) or -signal.SIGKILL)
    if status < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _is_open(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.fstat(fd))
    return False


# --- who forks ------------------------------------------------------------------------------------


def serve(listener: socket.socket, python: str, modules: list[str]) -> None:
    """Fork for whoever asks, until stdin ends, which is when the process that started this one does.

    python: what stands in for it.
    """
    import atexit
    import ctypes
    import gc
    import importlib
    import json
    import selectors

    for module in modules:
        if module == "ray":
            os.environ.update(json.loads(sys.stdin.readline() or sys.exit()))
        importlib.import_module(module)
        if module == "ray":
            draw_no_ids()
    gc.freeze()  # else the first collection of each fork copies every page
    atexit.register(gc.unfreeze)  # else libraries complain of what was not collected
    look = selectors.DefaultSelector()
    look.register(0, selectors.EVENT_READ)
    look.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in look.select():
            if key.fd == 0:
                return None
            if key.fileobj is listener:
                asker = listener.accept()[0]
                received = socket.recv_fds(asker, 1, 253)[1]
                request = asker.makefile().readline()
                parent = os.getpid()
                if not (pid := os.fork()):
                    ctypes.CDLL(None).prctl(
                        1, signal.SIGKILL
                    )  # PR_SET_PDEATHSIG: who asked may be gone before it
                    if os.getppid() != parent:
                        return None
                    for mine in (look, listener, asker):
                        mine.close()
                    return become(python, received, *json.loads(request))
                for fd in received:
                    os.close(fd)
                asker.sendall(f"{pid:{NUMBER}}".encode())
                ended = os.pidfd_open(pid)
                for each in (ended, asker):
                    look.register(each, selectors.EVENT_READ, (pid, ended, asker))
            elif key.fd in look.get_map():
                pid, ended, asker = key.data
                if key.fileobj is asker:
                    os.kill(pid, signal.SIGKILL)  # who asked for it is gone
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    asker.sendall(f"{status:{NUMBER}}".encode())
                for each in (ended, asker):
                    look.unregister(each)
                os.close(ended)
                asker.close()


def draw_no_ids() -> None:
    """Ray draws ids from a generator of C++, which is seeded when it first draws. Were that before the forks, as where
    a module has a class that is ray.remote, all would draw the same: two actors give their calls to a third the same
    ids, and Ray ends that. So classes get theirs from somebody else."""
    import ray.actor

    theirs = ray.ActorClassID

    class Ids:
        @staticmethod
        def from_random() -> Any:
            return theirs(os.urandom(theirs.size()))

    vars(ray.actor)["ActorClassID"] = Ids


def become(
    python: str,
    received: list[int],
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    mask: list[int],
    descriptors: list[int],
) -> None:
    """In the fork: be what `python ARGUMENTS` would be. `received` are the `descriptors` of who asked."""
    import fcntl
    import multiprocessing
    import runpy
    import tempfile
    import types

    import numpy
    import setproctitle

    os.setpgid(0, 0)  # Ray's raylet ends a worker's whole group
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 512) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(high, descriptors, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if raylet := sys.modules.get(
        "ray._raylet"
    ):  # setproctitle's own wants an environment that nobody has changed
        setproctitle.setproctitle = raylet.setproctitle
    numpy.random.seed()  # as in a process of its own; Python's random does it by itself
    tempfile.tempdir = None  # the one of another environment
    multiprocessing.set_executable(python)
    at = next(
        i
        for i, argument in enumerate(arguments)
        if argument == "-c" or not argument.startswith("-")
    )
    sys.argv = arguments[at:]
    if arguments[at] == "-c":
        del sys.argv[1]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(arguments[at + 1], vars(main))
    else:
        runpy.run_path(arguments[at], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], sys.argv[4:])
    else:
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
