"""Episodes with the tools of an MCP server, over the package mcp. env.verifier gives their rewards.

Over stdio, each episode has a process and a folder, {dir}. The verifier finds the folder as
`extra_info["dir"]`. Since protocol 2026-07-28 a server over HTTP has no sessions, so all episodes
share its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mcp_types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client

import gym_client
from extras.environments import KEY, Command, McpSettings, processes, show
from gym_client import GymError, Json, VerifyResult
from kit.chat.parsed_response import ParsedResponse
from kit.errors import ConfigError
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings
from kit.verify.python_verifiers.pool import SessionSource
from kit.verify.python_verifiers.session import EpisodeSession
from kit.verify.servers import list_public_variables

# Errors that the policy causes: an unknown tool, wrong arguments
POLICY_ERRORS = (mcp_types.METHOD_NOT_FOUND, mcp_types.INVALID_PARAMS)
logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs each line that a server prints


@contextlib.asynccontextmanager
async def connect(
    settings: McpSettings, timeout_s: float, variables: Sequence[str], log: Path
) -> AsyncIterator[tuple[Client, list[mcp_types.Tool], Path]]:
    """Open a client with its tools and its folder {dir}, and remove both at exit.

    Raises GymError.
    """
    address = settings.mcp
    with tempfile.TemporaryDirectory(prefix="quintet_mcp_") as parent, log.open("a") as errors:
        folder = Path(parent) / "dir"
        if settings.files:
            shutil.copytree(settings.files, folder, symlinks=True)
        else:
            folder.mkdir()
        if isinstance(address, Command):
            words = [word.replace("{dir}", str(folder)) for word in address.command]
            program, *arguments = processes.wrap(words, folder)
            parameters = StdioServerParameters(
                command=program,
                args=arguments,
                env=list_public_variables(variables),
                cwd=folder,
                encoding_error_handler="replace",
            )
            # A server of the package mcp 1 would log each request of the newer protocol.
            client = Client(
                stdio_client(parameters, errors), mode="legacy", read_timeout_seconds=timeout_s
            )
        else:
            client = Client(address, read_timeout_seconds=timeout_s)
        opened = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(stay_open(client, opened))
        try:
            await asyncio.wait({task, opened}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                raise explain(task.exception(), settings, log)
            yield client, opened.result(), folder
        finally:
            if isinstance(address, Command):  # mcp would leave what the program has started
                await asyncio.to_thread(processes.kill_programs, folder.resolve())
            task.cancel()
            # The calls have failed with what a lost server has raised here.
            await asyncio.gather(task, return_exceptions=True)


async def stay_open(client: Client, opened: asyncio.Future[list[mcp_types.Tool]]) -> None:
    """Connect, list the tools, and stay connected until this task is cancelled.

    This is a task, since mcp cancels the task that connects if the server is lost.
    """
    async with client:
        page = await client.list_tools()
        tools = page.tools
        while page.next_cursor and page.tools:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        opened.set_result(tools)
        await asyncio.sleep(math.inf)


def explain(error: BaseException | None, settings: McpSettings, log: Path) -> GymError:
    """Return the failure of an episode for an exception of mcp."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    name = show(settings.mcp)
    code = error.code if isinstance(error, MCPError) else None
    if code == mcp_types.REQUEST_TIMEOUT:
        return GymError("timeout", f"{name}: {error}. Raise gym.timeout_s")
    is_answer = code not in (None, mcp_types.CONNECTION_CLOSED)
    if is_answer or isinstance(error, RuntimeError | ValueError):  # not as the schema says
        return GymError("raised", f"{name}: {error!s:.300}")
    problem = f"does not answer: {error}"
    if isinstance(settings.mcp, Command):
        problem = f"its process ended. {processes.describe_log(log)}"
    return GymError("session_lost", f"{name}: {problem}", session_lost=True)


class McpTools:
    """The sessions of a verifier, with the tools of an MCP server."""

    def __init__(self, pool: SessionSource, settings: McpSettings, recipe: Recipe, logs: Path):
        self.pool = pool
        self.spec = pool.spec
        self.settings = settings
        self.recipe = recipe
        self.log = logs / "environment_mcp.log"
        self.places = asyncio.Semaphore(settings.processes)

    async def kind(self) -> str:
        """Return the kind of the sessions. Raises GymError."""
        if await self.pool.kind() == "verify":
            return "verify"
        reference = self.spec.reference
        raise GymError("bad_answer", f"{reference} plays turns. With {KEY}.mcp, name a function.")

    @contextlib.asynccontextmanager
    async def session(self, row: Json) -> AsyncIterator[EpisodeSession]:
        """Open a session for one episode of `row`, and close it at exit. Raises GymError."""
        await self.kind()
        timeout_s = self.recipe.gym.timeout_s
        variables = self.recipe.env.verifier_pool.env
        opening = connect(self.settings, timeout_s, variables, self.log)
        async with self.places, opening as (client, tools, folder):
            extra_info = {**(row.get("extra_info") or {}), "dir": str(folder)}
            async with self.pool.session({**row, "extra_info": extra_info}) as verifier:
                names = frozenset(tool.name for tool in tools)
                yield McpSession(self, client, verifier, names)

    async def close(self) -> None:
        """Close the verifier."""
        await self.pool.close()


@dataclass
class McpSession(EpisodeSession):
    """One episode."""

    source: McpTools
    client: Client
    verifier: EpisodeSession
    executable: frozenset[str]  # the names of the tools
    kind: str = "verify"
    observation: str | None = None

    async def call_tool(self, name: str, arguments: str) -> str:
        """Return the output of a tool. arguments: JSON, as the policy wrote it. Raises GymError."""
        try:
            parsed = dict(json.loads(arguments))
        except (ValueError, TypeError, RecursionError) as error:
            return f"Error: the arguments are not a JSON object: {error}"
        try:
            result = await self.client.call_tool(name, parsed)
        except (MCPError, RuntimeError, ValueError) as error:
            if isinstance(error, MCPError) and error.code in POLICY_ERRORS:
                return f"Error: {error}"
            raise explain(error, self.source.settings, self.source.log) from None
        return gym_client.cut_middle(show_result(result), gym_client.MAX_TOOL_CHARS)

    async def verify(self, body: Json, response: ParsedResponse) -> VerifyResult:
        """Return the verifier's reward. Raises GymError."""
        return await self.verifier.verify(body, response)


def show_result(result: mcp_types.CallToolResult) -> str:
    """Return the text of a tool's result. Of an image or a sound, only its type is text."""
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    texts = []
    for part in result.content:
        if isinstance(part, mcp_types.ResourceLink):
            texts.append(f"<{part.type} {part.name}: {part.uri}>")
        else:
            embedded = getattr(part, "resource", part)
            texts.append(getattr(embedded, "text", f"<{part.type}>"))
    return "\n".join(texts)


def list_tools(settings: McpSettings, recipe: Settings) -> list[Json]:
    """Return the server's tools in the form of rows, before a run. Raises ConfigError."""

    async def ask(log: Path) -> list[mcp_types.Tool]:
        opening = connect(settings, recipe.gym.timeout_s, recipe.env.verifier_pool.env, log)
        async with opening as (_, tools, _):
            return tools

    with tempfile.NamedTemporaryFile(prefix="quintet_mcp_", suffix=".log") as log:
        try:
            tools = asyncio.run(ask(Path(log.name)))
        except GymError as error:
            problem = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(f"{KEY}.mcp={problem}. Correct it.") from None
    described = []
    for tool in tools:
        texts = {"name": tool.name, "description": tool.description or ""}
        described.append({"type": "function", **texts, "parameters": tool.input_schema})
    return described
