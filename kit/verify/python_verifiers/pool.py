"""Start processes that run Python verifiers, call them with a timeout, and replace lost ones.

Protects: a call that fails, hangs, forges an answer or is lost gives no reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import secrets
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from pathlib import Path

import gym_client
from gym_client import GymError, Json
from kit import optional
from kit.recipe.keys import ROOT
from kit.recipe.recipe import Recipe
from kit.recipe.resources import cores
from kit.verify import servers as gym_servers
from kit.verify.python_verifiers.calls import CallResult
from kit.verify.python_verifiers.process import ANSWER, REQUEST, kill_tree
from kit.verify.python_verifiers.session import FunctionSession
from kit.verify.python_verifiers.settings import VerifierSpec

LOAD_TIMEOUT_S = 300.0  # to start a process and import the verifier
EXIT_TIMEOUT_S = 5.0  # for a killed process to be gone
MAX_ANSWER_BYTES = 64 * 2**20
MAX_LOG_BYTES = 16 * 2**20  # a longer log is emptied


def make_pools(recipe: Recipe, specs: Mapping[str, VerifierSpec], logs: Path) -> dict[str, Pool]:
    """Make a pool for each Python verifier: {name: pool}. Starts no process.

    The logs of a verifier whose name here is another one are in a folder of that name.
    """
    pools = {}
    for name, spec in specs.items():
        folder = logs if name == spec.name else logs / name
        folder.mkdir(parents=True, exist_ok=True)
        pools[name] = Pool(spec, recipe, folder)
    return pools


class Pool:
    """The processes of one verifier.

    The process that was used last is used next, so that no more are started than needed.
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

    async def kind(self) -> str:
        """Return "verify" for a function, "step" for a class. Raises GymError."""
        if not self.loaded_kind:
            self.loaded_kind = str((await self.call("kind")).answer["kind"])
        return self.loaded_kind

    async def open_session(self, row: Json) -> FunctionSession:
        """Open a session for one episode of `row`. Raises GymError."""
        kind = await self.kind()
        session = FunctionSession(self.spec, kind, row, self.call, self.may_run_code)
        await session.open()
        return session

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

    async def call(self, method: str, *arguments: object) -> CallResult:
        """Call the verifier. Raises GymError."""
        if self.process is None or self.process.returncode is not None:
            await self.start()
        return await self.request(self.recipe.env.verifier_pool.timeout_s, method, *arguments)

    # --- start and stop --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a process, and load the verifier in it. Raises GymError."""
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
        """Kill the process and all that it has started, and wait until it is gone."""
        process = self.process
        self.process = None
        if process is None:
            return
        if process.returncode is None:
            kill_tree(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # asyncio also waits until its pipes are closed, which another process may hold open
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_S)

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
        answered_number, text_size, env_state_size = ANSWER.unpack(header)
        if answered_number != number or text_size + env_state_size > MAX_ANSWER_BYTES:
            raise GymError(
                "bad_answer",
                f"{self.spec.reference}: the answer to {method} is over the limit of "
                f"{MAX_ANSWER_BYTES} bytes with the pickled environment, or belongs to no request. "
                f"Keep less in it, and read the log, {self.log}.",
            )
        text = await process.stdout.readexactly(text_size)
        env_state = await process.stdout.readexactly(env_state_size)
        answer = gym_client.sanitize_json(json.loads(text))
        if not isinstance(answer, dict):
            raise ValueError(f"the answer {answer!r:.80} is not an object")
        return CallResult(answer, env_state, time.monotonic() - began)


def list_code(path: Path) -> list[Path]:
    """List the Python files and packages in the folder of a file: what it may import.

    Other files there may be rows with the answers, or keys.
    """
    packages = [init.parent for init in path.parent.glob("*/__init__.py")]
    return [*path.parent.glob("*.py"), *packages]
