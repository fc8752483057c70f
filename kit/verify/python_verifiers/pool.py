"""Start processes that run Python verifiers, call them with a timeout, and replace lost ones.

Protects: a call that fails, hangs, forges an answer or is lost gives no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import pickle
import secrets
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import gym_client
from gym_client import GymError, Json
from kit import optional
from kit.recipe.keys import ROOT
from kit.recipe.recipe import Recipe
from kit.recipe.resources import cores
from kit.verify import servers as gym_servers
from kit.verify.python_verifiers.process import ANSWER, REQUEST, kill_tree
from kit.verify.python_verifiers.session import (
    CallResult,
    EnvironmentSession,
    EpisodeSession,
    FunctionSession,
)
from kit.verify.python_verifiers.settings import VerifierSpec

LOAD_TIMEOUT_S = 300.0  # to start a process and import the verifier
EXIT_TIMEOUT_S = 5.0  # for a killed process to be gone
CLOSE_TIMEOUT_S = 10.0  # to close an environment; no reward depends on it
MAX_ANSWER_BYTES = 64 * 2**20
MAX_LOG_BYTES = 16 * 2**20  # a longer log is emptied
logger = logging.getLogger(__name__)


class SessionSource(Protocol):
    """What opens the sessions of a verifier: a Pool, or a client of an environment."""

    spec: VerifierSpec

    async def kind(self) -> str: ...
    def session(self, row: Json) -> AbstractAsyncContextManager[EpisodeSession]: ...
    async def close(self) -> None: ...


def make_pools(
    recipe: Recipe, specs: Mapping[str, VerifierSpec], logs: Path
) -> Mapping[str, SessionSource]:
    """Make a pool for each Python verifier, {name: pool}, or the client of its environment.

    Starts no process. The logs of a verifier whose name here is another one are in a folder of that
    name.
    """
    pools: dict[str, SessionSource] = {}
    for name, spec in specs.items():
        folder = logs if name == spec.name else logs / name
        folder.mkdir(parents=True, exist_ok=True)
        pools[name] = Pool(spec, recipe, folder)
    if not recipe.env.environment:
        return pools
    environment = optional.load("environment", "env.environment")
    replaced: Mapping[str, SessionSource] = environment.replace_pools(pools, recipe, logs)
    return replaced


class Pool:
    """The processes of one verifier.

    A function is called in the process that was used last, so that no more are started than needed.
    An environment stays in one process, the one with the fewest.
    """

    def __init__(self, spec: VerifierSpec, recipe: Recipe, logs: Path):
        self.spec = spec
        env = recipe.env
        self.may_run_code = bool(env.verifier_pool.sandbox or env.allow_unsandboxed_code)
        self.workers: list[Worker] = []
        for number in range(env.verifier_pool.processes or cores()):
            log = logs / f"verifier_{spec.name}_{number}.log"
            self.workers.append(Worker(spec, recipe, log))
        self.idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in reversed(self.workers):
            self.idle.put_nowait(worker)
        self.loaded_kind = ""  # empty until a process has loaded the verifier

    async def find_kind(self) -> str:
        """Return "verify" for a function, "step" or "tools" for a class. Raises GymError."""
        if not self.loaded_kind:
            self.loaded_kind = str((await self.call("kind")).answer["kind"])
        return self.loaded_kind

    async def kind(self) -> str:
        """Return the kind of the sessions: "verify" or "step". Raises GymError."""
        return "step" if await self.find_kind() == "step" else "verify"

    @contextlib.asynccontextmanager
    async def session(self, row: Json) -> AsyncIterator[FunctionSession]:
        """Open a session for one episode of `row`, and close it at exit. Raises GymError."""
        if await self.find_kind() == "verify":
            yield FunctionSession(self.spec, row, self.call, self.may_run_code)
            return
        worker = min(self.workers, key=lambda worker: worker.environments)
        environment = PinnedEnvironment(worker)
        worker.environments += 1
        try:
            session = EnvironmentSession(self.spec, row, environment.call, self.may_run_code)
            session.kind = await self.kind()
            await session.open()
            yield session
        finally:
            worker.environments -= 1
            await environment.close()

    async def call(self, method: str, *arguments: object) -> CallResult:
        """Call the verifier in an idle process. Waiting for one has no timeout. Raises GymError."""
        worker = await self.idle.get()
        try:
            return await worker.call(method, *arguments)
        finally:
            self.idle.put_nowait(worker)

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(worker.kill() for worker in self.workers))


class Worker:
    """One process of a pool. The first call starts it, and so does a call after it was lost."""

    def __init__(self, spec: VerifierSpec, recipe: Recipe, log: Path):
        self.spec = spec
        self.recipe = recipe
        self.log = log
        self.process: Process | None = None
        self.environments = 0  # open ones
        self.lock = asyncio.Lock()  # of the current request

    def is_running(self) -> bool:
        """Return whether there is a process."""
        return self.process is not None and self.process.returncode is None

    async def call(self, method: str, *arguments: object) -> CallResult:
        """Call the verifier. Waiting for other calls has no timeout. Raises GymError."""
        async with self.lock:
            if not self.is_running():
                await self.start()
            return await self.request(self.recipe.env.verifier_pool.timeout_s, method, *arguments)

    # --- start and stop --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a process, and load the verifier in it. Raises GymError."""
        await self.kill()  # what environments of a dead process have started
        visible = ["PYTHONPATH", *self.recipe.env.verifier_pool.env]
        environment = gym_servers.list_public_variables(visible)
        environment["OMP_NUM_THREADS"] = "1"  # there is a process for each core
        spec = self.spec
        try:
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *self.make_command(),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            message = f"{spec.reference}: its process does not start: {error}"
            raise GymError("died", message) from None
        await self.request(LOAD_TIMEOUT_S, "load", spec.path, spec.name, spec.settings)

    def make_command(self) -> list[str]:
        """Return the command line of the process."""
        memory = int(self.recipe.env.verifier_pool.memory_gb * 2**30)
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
            "from kit.verify.python_verifiers.process import serve; "
            f"serve({memory})"
        )
        command = [sys.executable, "-u", "-P", "-c", code]
        readable = [Path(path).expanduser() for path in self.recipe.env.verifier_pool.readable]
        readable += list_code(Path(self.spec.path)) if self.spec.path else []
        if self.recipe.env.verifier_pool.sandbox:
            sandbox = optional.load("sandbox", "env.verifier_pool.sandbox")
            command = sandbox.sandbox_command(command, readable)
        return command

    async def kill(self) -> None:
        """Kill the process and all that it has started."""
        process = self.process
        self.process = None
        if process:
            await kill_process(process)

    # --- requests --------------------------------------------------------------------------------

    async def request(self, timeout_s: float, method: str, *arguments: object) -> CallResult:
        """Send a request and return its result. Raises GymError.

        Kills the process if it does not answer in time, or if the caller is cancelled.
        """
        process = self.process
        assert process
        if self.log.stat().st_size > MAX_LOG_BYTES:
            os.truncate(self.log, 0)  # the process appends to it
        result = None
        try:
            async with asyncio.timeout(timeout_s):
                result = await self.exchange(process, timeout_s, method, *arguments)
        except TimeoutError:
            raise GymError(
                "timeout",
                f"{self.spec.reference} gave no answer to {method} within {timeout_s:g} s. Its log "
                f"has its last line, {self.log}. Make it faster, or raise "
                "env.verifier_pool.timeout_s.",
            ) from None
        except (asyncio.IncompleteReadError, OSError, ValueError):
            # ValueError: the answer is not JSON, so process.py did not write it.
            await self.kill()
            raise GymError(
                "died",
                f"{self.spec.reference}: its process ended with status {process.returncode}. "
                f"Read its log, {self.log}.",
            ) from None
        finally:
            if result is None:
                await self.kill()
        # A function may return a dict with a key `failed`, but then the answer has a reward, too.
        if "failed" in result.answer and "reward" not in result.answer:
            if result.answer["failed"] == "memory" or method == "load":
                await self.kill()  # it cannot be used again
            separator = ": " if method == "load" else " "
            message = f"{self.spec.reference}{separator}{result.answer.get('why')}"
            raise GymError(str(result.answer["failed"]), message)
        return result

    async def exchange(
        self, process: Process, timeout_s: float, method: str, *arguments: object
    ) -> CallResult:
        """Send a request and read its answer.

        Raises GymError if the number or the size of the answer is wrong, ValueError if it is no
        JSON object.
        """
        assert process.stdin and process.stdout
        number = secrets.randbits(64)
        payload = pickle.dumps([timeout_s, method, *arguments])
        began = time.monotonic()
        process.stdin.write(REQUEST.pack(number, len(payload)) + payload)
        await process.stdin.drain()
        header = await process.stdout.readexactly(ANSWER.size)
        answered_number, text_size = ANSWER.unpack(header)
        if answered_number != number or text_size > MAX_ANSWER_BYTES:
            raise GymError(
                "bad_answer",
                f"{self.spec.reference}: the answer to {method} is over the limit of "
                f"{MAX_ANSWER_BYTES} bytes, or belongs to no request. Return less, and read the "
                f"log, {self.log}.",
            )
        text = await process.stdout.readexactly(text_size)
        answer = gym_client.sanitize_json(json.loads(text))
        if not isinstance(answer, dict):
            raise ValueError(f"the answer {answer!r:.80} is not an object")
        return CallResult(answer, time.monotonic() - began)


class PinnedEnvironment:
    """The environment of one episode, which stays in the process that made it."""

    numbers = itertools.count()

    def __init__(self, worker: Worker):
        self.worker = worker
        self.number = next(self.numbers)
        self.process: Process | None = None  # that has it

    async def call(self, method: str, *arguments: object) -> CallResult:
        """Call a method of the environment; `reset` first. Raises GymError."""
        worker = self.worker
        async with worker.lock:
            if method == "reset":
                if not worker.is_running():
                    await worker.start()
                self.process = worker.process
            if not self.is_alive():
                raise GymError(
                    "session_lost",
                    f"{worker.spec.reference}: the process of this environment ended, which "
                    f"another episode may have caused. Read its log, {worker.log}.",
                    session_lost=True,
                )
            timeout_s = worker.recipe.env.verifier_pool.timeout_s
            if method == "close":
                timeout_s = min(timeout_s, CLOSE_TIMEOUT_S)
            return await worker.request(timeout_s, method, self.number, *arguments)

    def is_alive(self) -> bool:
        """Return whether the process that has the environment is the worker's, and runs."""
        return self.process is self.worker.process and self.worker.is_running()

    async def close(self) -> None:
        """End what the environment started. A failure is only logged."""
        try:
            if self.is_alive():
                await self.call("close")
        except GymError as error:
            logger.warning("%s, so what this environment started may be open", error)


async def kill_process(process: Process) -> None:
    """Kill a process that leads a group, with all that it has started, and wait for its end."""
    if process.returncode is None:
        await asyncio.to_thread(kill_tree, process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # asyncio also waits until its pipes are closed, which another process may hold open
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)


def list_code(path: Path) -> list[Path]:
    """List the Python files and packages in the folder of a file: what it may import.

    Other files there may be rows with the answers, or keys.
    """
    packages = [init.parent for init in path.parent.glob("*/__init__.py")]
    return [*path.parent.glob("*.py"), *packages]
