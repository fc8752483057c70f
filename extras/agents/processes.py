"""Run an agent in other processes: a function in one for all episodes, a command in one each."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

from extras.agents.runner import WORK, AgentCall
from gym_client import GymError
from kit.recipe.schema import AgentSpec
from kit.verify.python_verifiers.pool import kill_process
from kit.verify.servers import list_public_variables

MAX_ANSWER_BYTES = 2**26
REACTION_S = 5.0  # for the process of a function to react after a deadline
MAX_OUTPUT = 2**16  # characters of the end of a command's output, which is its answer
MAX_ERRORS = 500  # characters of the end of what a failed command wrote
# The variables that a command sees. By its TMPDIR, the supervisor finds a process of the run.
VISIBLE = ("PATH", "LANG", "TMPDIR")
# Runs a command, reports its exit status, and waits to be killed. What the command leaves behind
# becomes a child of this process (PR_SET_CHILD_SUBREAPER), so kill_tree finds it. The kernel kills
# this process with the driver (PR_SET_PDEATHSIG).
LAUNCHER = """
import ctypes, signal, subprocess, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
ctypes.CDLL(None).prctl(36, 1)
with open("../output", "wb") as output:
    print(subprocess.run(sys.argv[1:], stdout=output).returncode, flush=True)
signal.pause()
"""
logger = logging.getLogger("kit.agents")


# --- a function ----------------------------------------------------------------------------------


class FunctionAgent:
    """The process of a function. It is replaced if it dies, or if an agent blocks its event loop.

    Its other episodes then start again.
    """

    def __init__(self, spec: AgentSpec, log: Path):
        self.spec = spec
        self.log = log
        self.process: Process | None = None
        self.starting = asyncio.Lock()

    async def run(self, call: AgentCall) -> str | None:
        """Run the function for an episode, and return its answer. Raises GymError."""
        async with self.starting:
            if not self.process or self.process.returncode is not None:
                await self.start()
        process = self.process
        assert process
        arguments = {"row": call.row, "base_url": call.base_url, "key": call.key}
        try:
            line = await self.ask(json.dumps(arguments))
        except asyncio.CancelledError:
            await self.kill_if_blocked(process)
            raise
        if not line:
            problem = f"the process of {self.spec.function} ended. Read {self.log}."
            raise GymError("agent_lost", problem, session_lost=True)
        result = json.loads(line)
        if "error" in result:
            raise GymError("agent_raised", f"{self.spec.function} {result['error']}")
        call.result.update(result.get("result", {}))
        answer: str | None = result["answer"]
        return answer

    async def start(self) -> None:
        """Start the process, and wait until it listens. If it ends before, each episode fails."""
        self.socket = Path(tempfile.mkdtemp(prefix="agent-")) / "socket"
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *list_command(self.spec, str(self.socket)),
                env=list_variables(self.spec),
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout
        await self.process.stdout.readline()

    async def ask(self, request: str) -> bytes:
        """Send a line, and return the answer: nothing if the process ended, or to no request."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.socket, limit=MAX_ANSWER_BYTES)
            try:
                writer.write(f"{request}\n".encode())
                return await reader.readline()
            finally:
                writer.close()
        except OSError:
            return b""

    async def kill_if_blocked(self, process: Process) -> None:
        """Kill the process if it does not react."""
        try:
            async with asyncio.timeout(REACTION_S):
                await self.ask("")
        except TimeoutError:
            logger.warning(
                "The agent %s blocks its event loop, so its process is replaced. Use `await` or "
                "`asyncio.to_thread` for calls that take time.",
                self.spec.function,
            )
            await kill_process(process)

    async def aclose(self) -> None:
        """Kill the process."""
        if self.process:
            await kill_process(self.process)
            shutil.rmtree(self.socket.parent, ignore_errors=True)


def list_command(spec: AgentSpec, *socket: str) -> list[str]:
    """Return the command line of a function's process. Without a socket, it loads and ends."""
    script = Path(__file__).with_name("function_process.py")
    return [spec.python or sys.executable, "-P", str(script), str(spec.function), *socket]


def list_variables(spec: AgentSpec) -> dict[str, str]:
    """Return the environment variables of a function's process."""
    return list_public_variables(["PYTHONPATH", *spec.env])


# --- a command -----------------------------------------------------------------------------------


async def run_command(spec: AgentSpec, fails_on_status: bool, call: AgentCall) -> str:
    """Run a command for an episode, and return its output. Raises GymError.

    The folder of the episode is its home, and WORK in it its current folder.
    """
    work = call.folder / WORK
    work.mkdir()
    for name, text in spec.files.items():
        path = call.folder / name[2:] if name.startswith("~/") else work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(fill_in(text, call), encoding="utf-8")
    program, *arguments = (fill_in(word, call) for word in shlex.split(str(spec.command)))
    program = os.path.abspath(shutil.which(program) or program)  # it runs in another folder
    with (call.folder / "errors").open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", LAUNCHER),
            *(program, *arguments),
            env=make_environment(spec, call),
            cwd=work,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdout
    try:
        status = int(await process.stdout.readline() or -1)
    finally:
        await kill_process(process)
    output = read_end(call.folder / "output", MAX_OUTPUT)
    if status != 0 and fails_on_status:
        text = read_end(call.folder / "errors", MAX_ERRORS) or output[-MAX_ERRORS:]
        raise GymError("agent_exit", f"the agent's command ended with {status}: {text}")
    return output


def make_environment(spec: AgentSpec, call: AgentCall) -> dict[str, str]:
    """Return the environment variables of a command: the key of its episode, and no other."""
    names = [*VISIBLE, *spec.env]
    return {name: os.environ[name] for name in names if name in os.environ} | {
        "HOME": str(call.folder),
        "OPENAI_BASE_URL": f"{call.base_url}/v1",
        "OPENAI_API_KEY": call.key,
        "ANTHROPIC_BASE_URL": call.base_url,
        "ANTHROPIC_API_KEY": call.key,
    }


def fill_in(text: str, call: AgentCall) -> str:
    """Replace {prompt}, {row}, {base_url} and {key}. Other braces stay, as in JSON."""
    values = {"prompt": call.prompt, "row": json.dumps(call.row)}
    values |= {"base_url": call.base_url, "key": call.key}
    return re.sub(f"{{({'|'.join(values)})}}", lambda match: values[match[1]], text)


def read_end(path: Path, length: int) -> str:
    """Return the last characters of a file, which the command may have deleted."""
    text = path.read_text(errors="replace") if path.is_file() else ""
    return text.strip()[-length:]
