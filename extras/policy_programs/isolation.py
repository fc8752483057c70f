"""Call verl's scorer in a forked process, if it runs code of the policy.

That code can still cheat the scorer, because verl runs both in the same process. It can give its
episode at most 1, the reward of a right response. It cannot change the reward of another episode.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kit.verify.python_verifiers.calls import VerifierError, describe_failure
from kit.verify.python_verifiers.process import kill_descendants, replace_by_null

if TYPE_CHECKING:
    from gym_client import Json

FAILURES = ("raised", "memory", "bad_answer")
MAX_RESULT_BYTES = 2**16
MAX_FILE_BYTES = 64 * 2**20  # of each file that a program writes
MAX_SANDBOX_PROCESSES = 256  # of one program. A sandbox does not count the user's other processes.


def run_isolated(call: Callable[[], Json], memory: int) -> Json:
    """Run `call` in a forked process, kill all that it has started, and return its answer.

    The result is read as JSON of at most MAX_RESULT_BYTES, and never unpickled.
    memory: bytes. Raises VerifierError.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        write_result_and_exit(call, writer, memory)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        line = file.readline(MAX_RESULT_BYTES)
    kill_descendants(os.getpid())
    reap_children()
    return parse_result(line)


def parse_result(line: bytes) -> Json:
    """Return the answer of an isolated call. Raises VerifierError.

    The program may have written it, so session.py accepts only rewards from 0 to 1.
    """
    try:
        result = dict(json.loads(line))
    except (ValueError, TypeError):
        raise VerifierError("the program ended its scorer, or its result is too long") from None
    if result.get("failed") in FAILURES:
        return {"failed": result["failed"], "why": str(result.get("why"))}
    return {"reward": result.get("reward"), "reward_components": {}}


def reap_children() -> None:
    """Remove the entries of ended children from the process table."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def write_result_and_exit(call: Callable[[], Json], writer: int, memory: int) -> NoReturn:
    """Write the result of `call` to the pipe `writer`, and exit. Runs in the forked process.

    Processes that the program forks do not get the pipe.
    """
    os.register_at_fork(after_in_child=functools.partial(replace_by_null, writer))
    limit_program(memory)
    try:
        try:
            answer = call()
        except BaseException as error:
            answer = describe_failure(error, "")
        os.write(writer, json.dumps(answer).encode() + b"\n")
    finally:  # the message of a program's exception may raise, too
        os._exit(0)


def limit_program(memory: int) -> None:
    """Limit the memory of this process, the size of its files and, in a sandbox, its processes.

    memory: bytes that it may use beyond its present size. Mapped memory counts too.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    addresses = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    if os.environ.get("KIT_SANDBOX"):
        processes = MAX_SANDBOX_PROCESSES
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
