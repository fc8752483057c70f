"""Start processes that run Python verifiers, call them with a timeout, and replace lost ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import re
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import gym_client
from gym_client import GymError, Json
from kit.config import user_functions
from kit.extras.python_verifiers import process_tree, sandbox
from kit.extras.python_verifiers.function_session import FunctionSession
from kit.extras.python_verifiers.verifier_calls import CallResult
from kit.extras.python_verifiers.verifier_process import ANSWER, MAX_ANSWER_BYTES, REQUEST
from kit.extras.python_verifiers.verifier_settings import (
    VerifierSpec,
    count_processes,
    read_specs,
)
from kit.gym import servers as gym_servers

LOAD_TIMEOUT_S = 300.0  # to start a process and import the verifier
EXIT_TIMEOUT_S = 5.0  # for a killed process to be gone
TRACEBACK_TIMEOUT_S = 1.0  # for a process that gave no answer to write its current line
MAX_LOG_BYTES = 16 * 2**20  # a longer log is emptied
MAX_LOG_TAIL_BYTES = 2**16  # the end of the log, which is searched for the current line


def make_pools(config: DictConfig, logs: Path) -> dict[str, Pool]:
    """Make a pool for each Python verifier of the recipe: {name: pool}. Starts no process."""
    return {name: Pool(spec, config, logs) for name, spec in read_specs(config).items()}


class Pool:
    """The processes of one verifier.

    The process that was used last is used next, so that no more are started than needed.
    """

    def __init__(self, spec: VerifierSpec, config: DictConfig, logs: Path):
        self.spec = spec
        is_sandboxed = bool(config.env.verifier_pool.get("sandbox"))
        is_allowed = bool(config.env.get("allow_unsandboxed_code"))
        self.may_run_policy_code = is_sandboxed or is_allowed
        self.workers: list[Worker] = []
        for number in range(count_processes(config)):
            log = logs / f"verifier_{spec.name}_{number}.log"
            self.workers.append(Worker(spec, config, log))
        self.idle = self.workers[::-1]
        self.slots = asyncio.Semaphore(len(self.workers))
        self.loaded_kind = ""  # empty until a process has loaded the verifier

    async def kind(self) -> str:
        """Return "verify" for a function, "step" for a class. Raises GymError."""
        while not self.loaded_kind:
            async with self.reserve_worker() as worker:
                if not self.loaded_kind:
                    await worker.start()
                    self.loaded_kind = worker.kind
        return self.loaded_kind

    async def open_session(self, row: Json, tokenizer: Any) -> FunctionSession:
        """Open a session for one episode of `row`. Raises GymError."""
        kind = await self.kind()
        session = FunctionSession(
            self.spec, kind, row, tokenizer, self.call, self.may_run_policy_code
        )
        await session.open()
        return session

    async def call(self, method: str, *arguments: Any) -> CallResult:
        """Call the verifier in an idle process. Waiting for one has no timeout. Raises GymError."""
        async with self.reserve_worker() as worker:
            return await worker.call(method, *arguments)

    @contextlib.asynccontextmanager
    async def reserve_worker(self) -> AsyncIterator[Worker]:
        """Wait for an idle worker. Other calls cannot use it until this context ends."""
        async with self.slots:
            worker = self.idle.pop()
            try:
                yield worker
            finally:
                self.idle.append(worker)

    async def close(self) -> None:
        """Kill all processes."""
        await asyncio.gather(*(worker.close() for worker in self.workers))


class Worker:
    """One process of a pool. The first call starts it, and so does a call after it was lost."""

    def __init__(self, spec: VerifierSpec, config: DictConfig, log: Path):
        self.spec = spec
        self.log = log
        self.settings = config.env.verifier_pool
        self.process: Process | None = None
        self.last_process: Process | None = None  # stays set after a kill
        self.kind = ""  # "verify" or "step", after the verifier was loaded

    async def call(self, method: str, *arguments: Any) -> CallResult:
        """Call the verifier. Raises GymError."""
        if self.process is None or self.process.returncode is not None:
            await self.start()
        return await self.request(self.settings.timeout_s, method, *arguments)

    # --- start and stop --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a process and load the verifier in it. Raises GymError."""
        command, environment = self.make_command()
        with self.log.open("ab") as log:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=log,
                    limit=MAX_ANSWER_BYTES,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise GymError(
                    "died", f"{self.spec.reference}: its process does not start: {error}"
                ) from None
        self.last_process = self.process
        spec = self.spec
        result = await self.request(LOAD_TIMEOUT_S, "load", spec.path, spec.name, spec.settings)
        self.kind = result.answer["kind"]

    def make_command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment variables of the process."""
        memory = int(self.settings.memory_gb * 2**30)
        # Skip kit/extras/__init__.py. It imports omegaconf: 0.1 s and 6 MB for each process.
        code = (
            f"import sys; sys.path.insert(0, {str(user_functions.ROOT)!r}); "
            "from kit.config.python_files import skip_package_init; "
            "skip_package_init('kit.extras'); "
            "from kit.extras.python_verifiers.verifier_process import serve; "
            f"serve({memory})"
        )
        command = [sys.executable, "-u", "-P", "-c", code]
        # Without secrets, except for those that env.verifier_pool.env names.
        environment = gym_servers.list_public_variables(self.settings.get("env") or ())
        environment["OMP_NUM_THREADS"] = "1"  # there is a process for each core
        if not self.settings.get("sandbox"):
            return command, environment
        folders = [Path.cwd()]
        if self.spec.path:
            folders.append(Path(self.spec.path).parent)
        environment["KIT_SANDBOX"] = "1"
        return sandbox.wrap_command(command, folders), environment

    def kill(self) -> None:
        """Kill the process and all that it has started, also in another process group."""
        if self.process is None:
            return
        if self.process.returncode is None:
            process_tree.kill_tree(self.process.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None

    async def close(self) -> None:
        """Kill the process and wait until it is gone."""
        self.kill()
        if self.last_process:
            await wait_for_exit(self.last_process)

    # --- requests --------------------------------------------------------------------------------

    async def request(self, timeout_s: float, method: str, *arguments: Any) -> CallResult:
        """Send a request and return its result. Raises GymError.

        Kills the process if it does not answer in time, or if the caller is cancelled.
        """
        process = self.process
        assert process
        log_start = self.empty_long_log()
        is_answered = False
        try:
            async with asyncio.timeout(timeout_s):
                text, env_state = await self.exchange(process, timeout_s, method, *arguments)
            answer = gym_client.sanitize_json(json.loads(text))
            is_answered = True
        except TimeoutError:
            await self.wait_for_traceback(log_start)
            raise self.make_timeout_error(timeout_s, method, log_start) from None
        except (asyncio.IncompleteReadError, OSError, ValueError):
            # ValueError: the answer is not JSON, so verifier_process.py did not write it.
            self.kill()
            status = describe_status(await wait_for_exit(process))
            raise GymError(
                "died",
                f"{self.spec.reference}: its process ended with {status}"
                f"{self.find_line(log_start)}. Read its log, {self.log}.",
            ) from None
        finally:
            if not is_answered:
                self.kill()
        # A function may return a dict with a key `failed`, but then the answer has a reward, too.
        if "failed" in answer and "reward" not in answer:
            raise self.make_failure(answer, method)
        return CallResult(answer, env_state)

    async def exchange(
        self, process: Process, timeout_s: float, method: str, *arguments: Any
    ) -> tuple[bytes, bytes]:
        """Send a request and read the answer: its JSON and the pickled environment.

        Raises GymError if the number or the size of the answer is wrong.
        """
        assert process.stdin and process.stdout
        number = secrets.randbits(64)
        payload = pickle.dumps([timeout_s, method, *arguments])
        process.stdin.write(REQUEST.pack(number, len(payload)) + payload)
        await process.stdin.drain()
        header = await process.stdout.readexactly(ANSWER.size)
        answered_number, text_size, env_state_size = ANSWER.unpack(header)
        if answered_number != number or text_size + env_state_size > MAX_ANSWER_BYTES:
            raise GymError(
                "bad_answer",
                f"{self.spec.reference}: its process wrote an answer that is too long, or belongs "
                f"to no request. Read its log, {self.log}.",
            )
        text = await process.stdout.readexactly(text_size)
        env_state = await process.stdout.readexactly(env_state_size)
        return text, env_state

    # --- errors and the log ----------------------------------------------------------------------

    def make_timeout_error(self, timeout_s: float, method: str, log_start: int) -> GymError:
        """Return the error of a call that took too long."""
        if method == "load":
            problem = "was not imported"
            hint = "Shorten its imports."
        else:
            problem = "gave no answer"
            hint = "Make it faster, or raise env.verifier_pool.timeout_s."
        line = self.find_line(log_start)
        message = f"{self.spec.reference} {problem} within {timeout_s:g} s{line}. {hint}"
        return GymError("timeout", message)

    async def wait_for_traceback(self, log_start: int) -> None:
        """Wait until the process has written its current line to its log.

        On a busy machine the process receives a request late, and so writes the line late.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRACEBACK_TIMEOUT_S):
                while not self.find_line(log_start):
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.05)  # the other lines of the traceback

    def make_failure(self, answer: Json, method: str) -> GymError:
        """Return the error in an answer. Kills the process if it cannot be used again."""
        reason = answer["failed"]
        if reason == "memory" or method == "load":
            self.kill()
        separator = ": " if method == "load" else " "
        message = f"{self.spec.reference}{separator}{answer['why']}"
        if reason == "memory":
            message += f"; a process has {self.settings.memory_gb:g} GiB "
            message += "(env.verifier_pool.memory_gb). Use less, or raise that."
        return GymError(reason, message)

    def find_line(self, log_start: int) -> str:
        """Return " at FILE:LINE", the current line as faulthandler wrote it into the log.

        log_start: size of the log before the call. Returns "" if there is no line.
        """
        with self.log.open("rb") as log:
            log.seek(max(log_start, self.log.stat().st_size - MAX_LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        frames = re.findall(r'File "(.+?)", line (\d+) in', text)
        own_frames = [frame for frame in frames if frame[0] == self.spec.path]
        for file, line in own_frames or frames:
            return f" at {file}:{line}"
        return ""

    def empty_long_log(self) -> int:
        """Return the size of the log in bytes. Empties it if it is over MAX_LOG_BYTES."""
        size = self.log.stat().st_size
        if size <= MAX_LOG_BYTES:
            return size
        os.truncate(self.log, 0)  # the process appends to it
        return 0


async def wait_for_exit(process: Process) -> int:
    """Return the exit status of a process that was killed.

    asyncio also waits until its pipes are closed. Another process may hold them open, so the wait
    has a timeout.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_TIMEOUT_S):
            return await process.wait()
    return process.returncode or 0


def describe_status(code: int) -> str:
    """Describe how a process ended: its exit status, or the signal that killed it."""
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name
