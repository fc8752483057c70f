"""Episodes with an OpenEnv server, over its WebSocket: a session for each.

Its HTTP routes /reset and /step keep no state. A row may have the arguments of `reset` in its field
`reset`, such as {"seed": 7}: the episodes of a group then see the same task.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from pydantic import FiniteFloat

import gym_client
from extras.environments import Command, OpenEnvSettings, processes
from gym_client import GymError, Json, StepResult
from kit.chat.parsed_response import ParsedResponse
from kit.recipe.recipe import Recipe
from kit.verify.network import find_free_port
from kit.verify.python_verifiers.pool import kill_process
from kit.verify.python_verifiers.session import EpisodeSession
from kit.verify.python_verifiers.settings import VerifierSpec
from kit.verify.servers import list_public_variables

PAUSE_S = 0.5  # between two attempts to reach a server that starts, or to get a place on a full one
MAX_MESSAGE_BYTES = 64 * 2**20
FULL = "CAPACITY_REACHED"  # codes of a server's errors
INVALID_ACTION = "VALIDATION_ERROR"
ADVICE = "Start it, or name its command: {openenv: {command: [...]}}."


class StepData(gym_client.Part):
    """What the server answers to reset and step."""

    observation: Json | str | None = None
    reward: FiniteFloat | None = None
    done: bool = False


class OpenEnvClient:
    """The sessions of an OpenEnv server, as a pool of a Python verifier has them."""

    def __init__(self, spec: VerifierSpec, settings: OpenEnvSettings, recipe: Recipe, logs: Path):
        self.spec = spec
        self.settings = settings
        self.recipe = recipe
        self.log = logs / "environment_openenv.log"
        self.url = "" if isinstance(settings.openenv, Command) else settings.openenv.rstrip("/")
        self.process: Process | None = None
        self.http: aiohttp.ClientSession | None = None  # None until the first session
        self.action_field: str | None = None  # that gets the text of the policy. "": it writes JSON
        self.open_sessions = 0
        self.starting = asyncio.Lock()
        self.waiting = asyncio.Lock()  # for a place on a full server: one episode asks

    async def kind(self) -> str:
        """Return the kind of the sessions."""
        return "step"

    @contextlib.asynccontextmanager
    async def session(self, row: Json) -> AsyncIterator[OpenEnvSession]:
        """Open a session for one episode of `row`, and close it at exit. Raises GymError.

        If no step had a reward, the exit raises GymError('no_reward'), so that the episode fails.
        """
        async with self.starting:
            await self.prepare()
        session = await self.try_to_open(row) or await self.wait_for_place(row)
        self.open_sessions += 1
        try:
            yield session
            session.check_reward()
        finally:
            self.open_sessions -= 1
            await session.socket.close()

    async def close(self) -> None:
        """End the connections, and the server if this object started it."""
        if self.http:
            await self.http.close()
        if self.process:
            await kill_process(self.process)

    # --- the server ------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Start the server if it does not run, and read the schema once. Raises GymError."""
        if self.http is None:
            self.http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        command = self.settings.openenv
        is_running = self.process is not None and self.process.returncode is None
        if isinstance(command, Command) and not is_running:
            await self.start(command)
        if self.action_field is None:
            schema = gym_client.find_nested(await self.get("/schema"), "action", "properties")
            if not isinstance(schema, dict):
                raise GymError("bad_answer", f"{self.url}/schema describes no action of OpenEnv.")
            self.action_field = self.settings.action or find_text_field(schema)

    async def start(self, command: Command) -> None:
        """Start the server on a free port, and wait until it answers. Raises GymError."""
        port = find_free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)) for word in command.command]
        variables = self.recipe.env.verifier_pool.env
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *processes.wrap(words, Path.cwd()),
                env=list_public_variables(variables),
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + command.start_timeout_s
        while True:
            try:
                await self.get("/health")
                return
            except GymError as error:
                is_over = time.monotonic() > end or self.process.returncode is not None
                if error.reason != "connect" or is_over:
                    end_of_log = processes.describe_log(self.log)
                    problem = f"{' '.join(words)} does not start. {end_of_log}"
                    raise GymError("connect", problem) from None
            await asyncio.sleep(PAUSE_S)

    async def get(self, path: str) -> object:
        """Return the JSON of an answer. Raises GymError."""
        assert self.http
        try:
            async with asyncio.timeout(self.recipe.gym.timeout_s):
                async with self.http.get(self.url + path) as answer:
                    return gym_client.parse_json(await answer.read(), self.url + path)
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"no OpenEnv server answers at {self.url} ({error}). {ADVICE}"
            raise GymError("connect", problem) from None

    # --- sessions --------------------------------------------------------------------------------

    async def try_to_open(self, row: Json) -> OpenEnvSession | None:
        """Open a session and reset it. Return None if the server is full. Raises GymError."""
        assert self.http
        url = f"{self.url.replace('http', 'ws', 1)}/ws"
        try:
            async with asyncio.timeout(self.recipe.gym.timeout_s):
                connection = await self.http.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES)
        except (TimeoutError, aiohttp.ClientError) as error:
            await asyncio.sleep(PAUSE_S)  # before the episode is tried again
            raise GymError("connect", f"{url}: no connection {error}", session_lost=True) from None
        session = OpenEnvSession(self, connection)
        try:
            data = await session.ask("reset", row.get("reset") or {})
            session.check_field(data.observation)
            session.observation = session.show(data.observation)
        except BaseException as error:
            await connection.close()
            if isinstance(error, GymError) and error.details.get("code") == FULL:
                return None
            raise
        return session

    async def wait_for_place(self, row: Json) -> OpenEnvSession:
        """Open a session when another one ends. Raises GymError if only others use the server."""
        patience_s = self.recipe.gym.outage_budget_s
        async with self.waiting:
            since = time.monotonic()
            while time.monotonic() - since <= patience_s:
                await asyncio.sleep(PAUSE_S)
                session = await self.try_to_open(row)
                if session:
                    return session
                if self.open_sessions:  # one of these will end: each of their calls has a timeout
                    since = time.monotonic()
        problem = f"{self.url} has no place for {patience_s:g} s, and this run uses none"
        raise GymError("capacity", f"{problem}. Raise its max_concurrent_envs.")


class OpenEnvSession(EpisodeSession):
    """One episode."""

    def __init__(self, client: OpenEnvClient, connection: aiohttp.ClientWebSocketResponse):
        self.client = client
        self.socket = connection
        self.kind = "step"
        self.observation: str | None = None
        self.executable = frozenset()
        self.rewards: list[float | None] = []  # of the steps

    async def step(self, _: Json, response: ParsedResponse) -> StepResult:
        """Send the policy's text as an action. Raises GymError.

        If the action is invalid, the policy reads the error, and the reward of the step is 0.
        """
        try:
            action = make_action(response.written, self.client.action_field)
            data = await self.ask("step", action)
        except (ValueError, RecursionError) as error:
            data = StepData(observation=f"Error: {error}", reward=0.0)
        except GymError as error:
            if error.details.get("code") != INVALID_ACTION:
                raise
            data = StepData(observation=f"Error: {error.details['message']:.2000}", reward=0.0)
        reward = self.add_reward(data.reward)
        return StepResult(self.show(data.observation), reward, data.done, truncated=False)

    def add_reward(self, reward: float | None) -> float:
        """Return what a step adds to the reward of the episode. Raises GymError.

        With `reward: last`, the sum of these is the last reward.
        """
        earlier = sum(each or 0.0 for each in self.rewards)
        added = reward or 0.0
        if reward is not None and self.client.settings.reward == "last":
            added -= earlier
        self.rewards.append(None if reward is None else added)
        rewards = {"reward": reward or 0.0, "sum": earlier + added}
        gym_client.check_rewards(rewards, self.client.recipe.gym.max_reward, self.client.url)
        return added

    def check_reward(self) -> None:
        """Raise GymError if there were steps and none had a reward."""
        if self.rewards and all(reward is None for reward in self.rewards):
            problem = f"{self.client.url}: the reward of every step is null"
            raise GymError("no_reward", f"{problem}. Let the environment set one.")

    def check_field(self, observation: Json | str | None) -> None:
        """Raise GymError if the first observation has not the field of the recipe."""
        name = self.client.settings.observation
        if name and isinstance(observation, dict) and name not in observation:
            fields = ", ".join(observation)
            problem = f"{self.client.url}: an observation has the fields {fields}"
            raise GymError("bad_answer", f"{problem}. Name one as `observation`, not {name}.")

    def show(self, observation: Json | str | None) -> str | None:
        """Return the text that the policy reads: the field of the recipe, or all as JSON."""
        if isinstance(observation, dict):
            text = observation.get(self.client.settings.observation or "")
            return text if isinstance(text, str) else json.dumps(observation, ensure_ascii=False)
        return observation

    async def ask(self, kind: str, data: Json) -> StepData:
        """Send a request and return the data of its answer. Raises GymError."""
        at = f"{self.client.url}/ws: {kind}"
        timeout_s = self.client.recipe.gym.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self.socket.send_json({"type": kind, "data": data})
                message = await self.socket.receive()
        except TimeoutError:
            problem = f"{at}: no answer in gym.timeout_s={timeout_s:g} s"
            raise GymError("timeout", problem) from None
        except (aiohttp.ClientError, OSError) as error:
            raise GymError("session_lost", f"{at}: {error}", session_lost=True) from None
        if message.type is not aiohttp.WSMsgType.TEXT:
            problem = f"{at}: the server closed the connection ({message.type.name})"
            raise GymError("session_lost", problem, session_lost=True)
        answer = gym_client.parse_json(message.data.encode(), at)
        body = gym_client.find_nested(answer, "data")
        if gym_client.find_nested(answer, "type") == "error" and isinstance(body, dict):
            details = {"code": body.get("code"), "message": describe_error(body)}
            problem = f"{at}: {details['code']}: {details['message']:.300}"
            raise GymError("raised", problem, details=details)
        return gym_client.validate(StepData, body, at)


def describe_error(body: Json) -> str:
    """Return the message of a server's error, with what is wrong in each field of an action."""
    texts = [str(body.get("message"))]
    for error in body.get("errors") or []:
        field = ".".join(str(part) for part in error["loc"])
        texts.append(f"{field}: {error['msg']}")
    return "\n".join(texts)


def find_text_field(properties: Json) -> str:
    """Return the only field of an action if it is text, otherwise "". properties: of its schema."""
    fields = [name for name in properties if name != "metadata"]
    is_text = gym_client.find_nested(properties, *fields, "type") == "string"
    return fields[0] if is_text and len(fields) == 1 else ""


def make_action(text: str, field: str | None) -> Json:
    """Make an action of the policy's text. Raises ValueError for text that is no action."""
    if field:
        return {field: text}
    action = gym_client.sanitize_json(json.loads(text[: 2**20]))
    if not isinstance(action, dict):
        raise ValueError("write the action as one JSON object, and nothing else")
    return action
