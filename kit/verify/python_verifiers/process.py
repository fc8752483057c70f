"""The process that runs a Python verifier. pool.py starts it and sends it requests.

Protocol: a request on stdin is a pickled list of its timeout in seconds, a method and the
arguments. The methods are load, kind, score and, for one episode, those of EPISODE_CALLS: their
first argument is the number of the episode, whose environment stays here from reset to close. An
answer on stdout is JSON: the result, or `failed` (a reason as in gym_client.GymError) and `why`. It
repeats the random number of its request, so that nobody can answer a later request in advance. The
driver never unpickles what this process writes. The output of the verifier goes to stderr.

Only this process can write answers: in a child that it forks, both pipes are /dev/null.

Protects: the driver and other rewards from the code of a verifier, and of the policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import functools
import inspect
import json
import math
import os
import pickle
import resource
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from kit import optional
from kit.recipe.python_files import import_callable
from kit.verify.python_verifiers import calls
from kit.verify.python_verifiers.verl_scorer import CODE_SOURCES, load_verl_scorer

if TYPE_CHECKING:  # its packages would take each process a second to import
    from gym_client import Json

REQUEST = struct.Struct("!QQ")  # number of the request, bytes of its pickle
ANSWER = struct.Struct("!QQ")  # number of the request, bytes of the JSON
EPISODE_CALLS: dict[str, Callable[..., Json]] = {
    "reset": calls.reset,
    "step": calls.step,
    "call_tool": calls.call_tool,
    "score_environment": calls.score_environment,
    "close": calls.close,
}
TREE_TIMEOUT_S = 5.0  # for the descendants of a killed process to end
# Options of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def serve(memory: int) -> None:
    """Answer requests until stdin is closed. memory: the limit of this process in bytes."""
    requests, answers = take_pipes()
    protect_process(memory)
    faulthandler.enable()
    with asyncio.Runner() as runner:
        server = VerifierServer(runner, memory)
        while header := requests.read(REQUEST.size):
            request, size = REQUEST.unpack(header)
            answers.write(server.respond(request, requests.read(size)))
            answers.flush()


class VerifierServer:
    """One verifier and its requests."""

    def __init__(self, runner: asyncio.Runner, memory: int):
        self.runner = runner
        self.memory = memory
        self.path = ""  # of the verifier's file, empty for verl's scorer
        # a function or class with its settings
        self.verifier: functools.partial[object] | None = None
        self.environments: dict[int, object] = {}  # {episode: instance of the class}

    def respond(self, request: int, payload: bytes) -> bytes:
        """Carry out one request and return its encoded answer."""
        try:
            timeout_s, method, *arguments = pickle.loads(payload)
            # Write the current line to the log, shortly before the driver would kill this process.
            faulthandler.dump_traceback_later(0.9 * timeout_s)
            answer = self.call(method, arguments)
        except BaseException as error:  # also sys.exit: a failed call, not an end
            answer = calls.describe_failure(error, self.path)
        faulthandler.cancel_dump_traceback_later()
        text = json.dumps(answer).encode()
        return ANSWER.pack(request, len(text)) + text

    def call(
        self,
        method: str,
        arguments: list[Any],  # unpickled
    ) -> Json:
        """Load the verifier or call it. Raises its errors, UserFunctionError and VerifierError."""
        if method == "load":
            self.path, name, settings = arguments
            reference = f"{self.path}:{name}"
            verifier = import_callable(reference) if self.path else load_verl_scorer()
            self.verifier = functools.partial(verifier, **settings)
            return {}
        assert self.verifier, "the first request loads the verifier"
        if method == "kind":
            return {"kind": find_kind(self.verifier.func)}
        if method in EPISODE_CALLS:
            return self.call_environment(method, *arguments)
        if not self.path and arguments[0]["data_source"] in CODE_SOURCES:
            scores = optional.load("programs", "env.verifier=verl")
            answer: Json = scores.score_code(self.verifier, self.runner, arguments[0], self.memory)
            return answer
        return calls.score(self.verifier, self.runner, *arguments)

    def call_environment(self, method: str, episode: int, *arguments: object) -> Json:
        """Call a method of the environment of an episode. `reset` makes it, `close` forgets it."""
        if method == "reset":
            assert self.verifier
            self.environments[episode] = self.verifier()
        environment = self.environments.get(episode)  # None if it could not be made
        if method == "close":
            self.environments.pop(episode, None)
        return EPISODE_CALLS[method](environment, self.runner, *arguments)


def find_kind(verifier: Callable[..., object]) -> str:
    """Return the kind of a verifier: a function, a class with tools, or one with `step`."""
    if not inspect.isclass(verifier):
        return "verify"
    return "tools" if hasattr(verifier, "call_tool") else "step"


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes of the requests and of the answers, and hide both from the verifier.

    The verifier's stdin is empty, and it prints to the log. Its forked children have neither pipe.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    hide = functools.partial(replace_by_null, requests.fileno(), answers.fileno())
    os.register_at_fork(after_in_child=hide)
    return requests, answers


def replace_by_null(*descriptors: int) -> None:
    """Replace open files by /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def protect_process(memory: int) -> None:
    """Limit this process, end it with the driver, and close it to other processes of the user.

    memory: bytes.
    """
    # If the machine runs out of memory, the kernel kills this process before the driver.
    Path("/proc/self/oom_score_adj").write_text("1000")
    # Limit the data, not the address space: libraries reserve more addresses than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    prctl(PR_SET_DUMPABLE, 0)  # only root can open its memory or its pipes in /proc


# --- kill a process with all that it has started -------------------------------------------------


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, also those in another session or process group."""
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        os.kill(pid, signal.SIGSTOP)  # a stopped process cannot start more processes
        kill_descendants(pid, TREE_TIMEOUT_S)
        os.kill(pid, signal.SIGKILL)


def kill_descendants(pid: int, timeout_s: float = math.inf) -> None:
    """Kill all descendants of a process, until none is left or the time is over.

    The process must be a subreaper (PR_SET_CHILD_SUBREAPER): then the children of its dead children
    are still its descendants.
    """
    end = time.monotonic() + timeout_s
    while kill_running(psutil.Process(pid).children(recursive=True)):
        if time.monotonic() > end:
            return
        time.sleep(0.005)


def kill_running(processes: list[psutil.Process]) -> int:
    """Kill the processes that have not ended, and return their number."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed += 1
    return killed
