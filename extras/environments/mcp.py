"""Episodes with the tools of an MCP server. env.verifier gives their rewards.

Over stdio, each episode has a process and a folder, {dir}. The verifier finds the folder as
`extra_info["dir"]`. Since protocol 2026-07-28 a server over HTTP has no sessions, so all episodes
share its state.

Why not the package mcp: its client has other names in each version, and cancels its caller if a
server is lost. The three requests that are needed have been the same since 2025.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp

import gym_client
from extras.environments import KEY, Command, McpSettings, processes, show
from gym_client import GymError, Json, VerifyResult
from kit.chat.parsed_response import ParsedResponse
from kit.errors import ConfigError
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings
from kit.verify.python_verifiers.pool import EXIT_TIMEOUT_S, SessionSource, kill_process
from kit.verify.python_verifiers.session import EpisodeSession

PROTOCOL = "2025-11-25"
CLIENT = {"name": "quintet", "version": "0"}
HELLO = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": CLIENT}
# Errors of JSON-RPC that the policy causes: an unknown tool, wrong arguments
POLICY_ERRORS = (-32601, -32602)
UNSUPPORTED = {"code": -32601, "message": "not supported"}  # for a server that asks something


class Client(abc.ABC):
    """A connection to a server. Each subclass has a transport: `exchange` and `close`."""

    def __init__(self, name: str, timeout_s: float):
        self.name = name  # for messages
        self.timeout_s = timeout_s  # of one answer
        self.numbers = itertools.count(1)
        self.tools: list[Json] = []  # in the form of MCP

    async def open(self) -> None:
        """Greet the server, and list its tools. Raises GymError."""
        await self.get_result("initialize", HELLO)
        await self.exchange({"jsonrpc": "2.0", "method": "notifications/initialized"})
        params: Json = {}
        while params or not self.tools:
            page = await self.get_result("tools/list", params)
            self.tools += page["tools"]
            params = {"cursor": page["nextCursor"]} if page.get("nextCursor") else {}
            if not page["tools"]:
                return

    async def call_tool(self, name: str, arguments: Json) -> str:
        """Return the output of a tool, or the error that the policy caused. Raises GymError."""
        answer = await self.request("tools/call", {"name": name, "arguments": arguments})
        error = answer.get("error")
        if isinstance(error, dict) and error.get("code") in POLICY_ERRORS:
            return f"Error: {error.get('message')}"
        parts = gym_client.find_nested(answer, "result", "content")
        if error or not isinstance(parts, list):
            raise GymError("raised", f"{self.name}: {name}: {error or answer!s:.300}")
        shown = []
        for part in parts:
            text = gym_client.find_nested(part, "text")
            kind = gym_client.find_nested(part, "type")
            shown.append(text if isinstance(text, str) else f"<{kind}>")
        return gym_client.cut_middle("\n".join(shown), gym_client.MAX_TOOL_CHARS)

    async def get_result(self, method: str, params: Json) -> Json:
        """Return the result of a request. Raises GymError for an error, too."""
        answer = await self.request(method, params)
        result = answer.get("result")
        if not isinstance(result, dict) or (method == "tools/list" and "tools" not in result):
            raise GymError("bad_answer", f"{self.name} is no MCP server: {method}: {answer!s:.300}")
        return result

    async def request(self, method: str, params: Json) -> Json:
        """Return the answer to a request, with `result` or `error`. Raises GymError."""
        message = {"jsonrpc": "2.0", "id": next(self.numbers), "method": method, "params": params}
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self.exchange(message)
        except TimeoutError:
            problem = f"{self.name}: no answer to {method} in gym.timeout_s={self.timeout_s:g} s"
            raise GymError("timeout", problem) from None

    @abc.abstractmethod
    async def exchange(self, message: Json) -> Json:
        """Send a message. Return the answer to a request. Raises GymError."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End the connection."""

    def lost(self, problem: str) -> GymError:
        """Return the error of a server that is lost."""
        return GymError("session_lost", f"{self.name}: {problem}", session_lost=True)


class StdioClient(Client):
    """The server is a process."""

    process: Process
    log = Path()

    async def exchange(self, message: Json) -> Json:
        """Write a line, and read until the answer. Lines that are no messages are prints."""
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(OSError):  # that the process ended is found below
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            await self.process.stdin.drain()
        if "method" not in message or "id" not in message:
            return {}
        try:
            while line := await self.process.stdout.readline():
                answer = read_message(line)
                if answer.get("id") == message["id"] and "method" not in answer:
                    return answer
                if "id" in answer and "method" in answer:
                    refusal = {"jsonrpc": "2.0", "id": answer["id"], "error": UNSUPPORTED}
                    await self.exchange(refusal)
        except ValueError:
            raise GymError("too_large", f"{self.name}: an answer is too long") from None
        raise self.lost(f"its process ended. {processes.describe_log(self.log)}")

    async def close(self) -> None:
        """End the process."""
        await kill_process(self.process)


class HttpClient(Client):
    """The server is at a URL."""

    http: aiohttp.ClientSession
    headers: dict[str, str]

    async def exchange(self, message: Json) -> Json:
        """Post a message. The answer is JSON, or an event of a stream."""
        try:
            async with self.http.post(self.name, json=message, headers=self.headers) as answer:
                if answer.status >= 400:
                    raise self.lost(f"HTTP {answer.status}")
                session = answer.headers.get("Mcp-Session-Id")
                if session:
                    self.headers |= {"Mcp-Session-Id": session, "MCP-Protocol-Version": PROTOCOL}
                text = await answer.read()
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: no URL
            raise self.lost(f"does not answer: {error}") from None
        is_whole = answer.content_type == "application/json"
        for line in [text] if is_whole else text.splitlines():
            event = read_message(line.removeprefix(b"data:"))
            if event.get("id") == message.get("id"):
                return event
        return {}

    async def close(self) -> None:
        """End the session, if there is one, and the connection."""
        timeout = aiohttp.ClientTimeout(EXIT_TIMEOUT_S)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # it may end by itself
            if "Mcp-Session-Id" in self.headers:
                await self.http.delete(self.name, headers=self.headers, timeout=timeout)
        await self.http.close()


def read_message(line: bytes) -> Json:
    """Return a message of JSON-RPC, {} for anything else."""
    try:
        message = gym_client.parse_json(line.strip(), "MCP")
    except GymError:
        return {}
    return message if isinstance(message, dict) else {}


@contextlib.asynccontextmanager
async def connect(
    settings: McpSettings, timeout_s: float, variables: Sequence[str], log: Path
) -> AsyncIterator[tuple[Client, Path]]:
    """Open a client with its folder {dir}, and remove both at exit. Raises GymError."""
    address = settings.mcp
    client: Client
    with tempfile.TemporaryDirectory(prefix="quintet_mcp_") as parent:
        folder = Path(parent) / "dir"
        if settings.files:
            shutil.copytree(settings.files, folder, symlinks=True)
        else:
            folder.mkdir()
        if isinstance(address, Command):
            words = [word.replace("{dir}", str(folder)) for word in address.command]
            client = StdioClient(show(address), timeout_s)
            client.log = log
            client.process = await processes.start(words, folder, variables, log)
        else:
            client = HttpClient(address, timeout_s)
            client.http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
            client.headers = {"Accept": "application/json, text/event-stream"}
        try:
            await client.open()
            yield client, folder
        finally:
            await client.close()


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
        async with self.places, opening as (client, folder):
            extra_info = {**(row.get("extra_info") or {}), "dir": str(folder)}
            async with self.pool.session({**row, "extra_info": extra_info}) as verifier:
                yield McpSession(client, verifier)

    async def close(self) -> None:
        """Close the verifier."""
        await self.pool.close()


class McpSession(EpisodeSession):
    """One episode."""

    def __init__(self, client: Client, verifier: EpisodeSession):
        self.client = client
        self.verifier = verifier
        self.kind = "verify"
        self.observation: str | None = None
        self.executable = frozenset(str(tool.get("name")) for tool in client.tools)

    async def call_tool(self, name: str, arguments: str) -> str:
        """Return the output of a tool. arguments: JSON, as the policy wrote it. Raises GymError."""
        try:
            parsed = dict(json.loads(arguments))
        except (ValueError, TypeError, RecursionError) as error:
            return f"Error: the arguments are not a JSON object: {error}"
        return await self.client.call_tool(name, parsed)

    async def verify(self, body: Json, response: ParsedResponse) -> VerifyResult:
        """Return the verifier's reward. Raises GymError."""
        return await self.verifier.verify(body, response)


def list_tools(settings: McpSettings, recipe: Settings) -> list[Json]:
    """Return the server's tools in the form of rows, before a run. Raises ConfigError."""

    async def ask(log: Path) -> list[Json]:
        opening = connect(settings, recipe.gym.timeout_s, recipe.env.verifier_pool.env, log)
        async with opening as (client, _):
            return client.tools

    with tempfile.NamedTemporaryFile(prefix="quintet_mcp_", suffix=".log") as log:
        try:
            tools = asyncio.run(ask(Path(log.name)))
        except GymError as error:
            problem = str(error).rstrip(".")
            raise ConfigError(f"{KEY}.mcp={problem}. Correct it.") from None
    described = []
    for tool in tools:
        texts = {"name": tool.get("name"), "description": tool.get("description") or ""}
        schema = tool.get("inputSchema") or {}
        described.append({"type": "function", **texts, "parameters": schema})
    return described
