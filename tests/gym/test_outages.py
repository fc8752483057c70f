"""Outages and lost sessions of a Gym server, and servers or rows that could harm the client."""

from __future__ import annotations

import asyncio
import json
import re
import time
from types import SimpleNamespace

import pytest

import gym_client
import gym_messages
from gym_client import Gym, GymError, ServerDownError, message_response
from tests.helpers.fault_server import RunningServer
from tests.helpers.http import Endpoint, send
from tests.helpers.rollouts import TOOL

RESPONSE = message_response("1.0")
ROW = {
    "responses_create_params": {"input": "x", "tools": [TOOL]},
    "question": "x",
    "with_tool": False,
}


def run_with_gym(conversation, **limits):
    """Return the result of `conversation(gym, running server)`. The client has read the routes."""

    async def run(running):
        async with Gym({"s": running.url}, **limits) as gym:
            await gym.routes("s")
            return await conversation(gym, running)

    with RunningServer() as running:
        return asyncio.run(run(running))


async def catch(call) -> GymError | None:
    """Return the GymError that a call raises."""
    try:
        await call
    except GymError as error:
        return error


async def verify(gym):
    async with gym.session("s", ROW) as session:
        return await session.verify(RESPONSE)


def test_a_server_that_stays_unavailable_ends_the_run():
    async def conversation(gym, running):
        running.server.status = 503
        began = time.monotonic()
        errors = await asyncio.gather(*[catch(verify(gym)) for _ in range(64)])
        return errors, time.monotonic() - began

    errors, seconds = run_with_gym(conversation, concurrency=64, outage_budget_s=1.0)
    assert {(type(e), e.reason, e.retryable, e.session_lost) for e in errors} == {
        (ServerDownError, "server_down", False, False)
    }
    message = (
        r"Gym server s \(http://\S+\) unreachable for \d+ s \(gym\.outage_budget_s=1\); "
        r"(\d+) calls failed\. Last error: http\S+: HTTP 503: \. Restart it, then rerun .* resume"
    )
    counts = [int(re.match(message, str(error))[1]) for error in errors]
    assert max(counts) > 64
    assert 1.0 < seconds < 30.0


@pytest.fixture
def skip_time(monkeypatch):
    """A function that advances the clock of the client: skip_time(seconds)."""
    skipped_s = []

    def read_clock():
        return time.monotonic() + sum(skipped_s)

    clock = vars(time) | {"monotonic": read_clock}
    monkeypatch.setattr(gym_client, "time", SimpleNamespace(**clock))
    return skipped_s.append


@pytest.mark.parametrize("other_status", [200, 404, 422, 429, 500, 503, None])
def test_an_outage_ends_with_an_answer_or_after_a_time_without_calls(other_status, skip_time):
    """Two calls are answered 503, one with another status or not made, and two again 503."""

    async def conversation(gym, running):
        async with gym.session("s", ROW) as session:
            for status in (503, 503, other_status, 503, 503):
                skip_time(6.0 if status else 20.0)
                if status:
                    running.server.status = status
                    error = await catch(session.call_tool("look_up", "{}"))
        return error

    error = run_with_gym(conversation, outage_budget_s=15.0)
    expected = ("server_down", False) if other_status == 503 else ("http_503", True)
    assert (error.reason, error.session_lost) == expected


async def start_hanging_verify(gym, running, skip_time, *paths):
    """Start an episode whose verifier does not answer, and advance the clock by 100 s.

    Return the task. The server does not answer on `paths` either.
    """
    running.server.hanging = {"/verify", *paths}
    task = asyncio.create_task(verify(gym))
    while "/verify" not in running.server.paths:
        await asyncio.sleep(0.01)
    skip_time(100.0)
    return task


@pytest.mark.parametrize(("paths", "reason"), [([], "timeout"), (["/openapi.json"], "server_down")])
def test_a_timeout_is_an_outage_only_if_the_server_does_not_answer_other_calls(
    paths, reason, skip_time
):
    async def conversation(gym, running):
        error = await catch(await start_hanging_verify(gym, running, skip_time, *paths))
        return error, running.server.paths

    error, paths = run_with_gym(conversation, timeout_s=1.5)
    assert error.reason == reason
    assert paths.count("/verify") == 1


def test_a_connection_that_breaks_during_a_long_call_is_no_long_outage(skip_time):
    async def conversation(gym, running):
        task = await start_hanging_verify(gym, running, skip_time)
        await asyncio.to_thread(running.__exit__)
        with await asyncio.to_thread(RunningServer, port=running.port):
            return (await task).reward

    assert run_with_gym(conversation) == 1.0


@pytest.mark.parametrize(
    ("answer", "seconds", "is_alive", "expected"),
    [
        (503, 0, True, ("http_503", 3)),
        (504, 60, True, ("http_504", 3)),
        ("reset", 0, True, ("connect", 3)),
        (504, 60, False, ("server_down", 2)),  # a proxy in front of a server that hangs
        ("reset", 60, False, ("connect", 4)),  # a proxy that closes idle connections
    ],
)
def test_the_last_episode_of_a_step_is_not_repeated_forever(
    answer, seconds, is_alive, expected, skip_time
):
    """No other call is made that the server could answer. Each attempt takes some seconds."""
    runs = []

    def handle(handler):
        if handler.command == "GET":
            is_up = is_alive or not runs
            send(200 if is_up else 504, {"paths": {"/run": {"post": {}}}})(handler)
            return
        runs.append(handler.path)
        skip_time(seconds)
        if answer != "reset":
            send(answer, {})(handler)

    async def run():
        async with Gym({"s": endpoint.url}) as gym:
            return await catch(gym.run("s", ROW, 30.0))

    endpoint = Endpoint(handle)
    error = asyncio.run(run())
    endpoint.close()
    assert (error.reason, len(runs)) == expected


# --- lost sessions -------------------------------------------------------------------------------


def test_a_session_that_is_older_than_its_server_is_not_continued():
    """The server accepts the old cookie with an empty session: the reward would be -1."""

    async def conversation(gym, running):
        with_tool = {**ROW, "with_tool": True}
        async with gym.session("s", with_tool) as mutated, gym.session("s", ROW) as new:
            await mutated.call_tool("look_up", "{}")
            await asyncio.to_thread(running.__exit__)
            task = asyncio.create_task(verify(gym))
            while gym._health["s"].failed_at < 0:
                await asyncio.sleep(0.01)
            running.server.forget()
            with await asyncio.to_thread(RunningServer, server=running.server, port=running.port):
                rewards = [(await task).reward, (await new.verify(RESPONSE)).reward]
                return rewards, await catch(mutated.verify(RESPONSE)), running.server.calls

    rewards, error, calls = run_with_gym(conversation)
    assert rewards == [1.0, 1.0]
    assert (error.reason, error.session_lost) == ("session_lost", True)
    assert calls["/seed_session"] == 4
    assert calls["/verify"] == 2


def test_a_restart_by_the_run_loses_sessions_too():
    async def conversation(gym, running):
        async with gym.session("s", ROW) as mutated, gym.session("s", ROW) as new:
            await mutated.call_tool("look_up", "{}")
            gym.mark_restarted("s")
            # a lost session must end the retries
            retried = gym._retry("s", lambda: mutated.call_tool("look_up", "{}"))
            reward = (await new.verify(RESPONSE)).reward
            return reward, await catch(asyncio.wait_for(retried, 5))

    reward, error = run_with_gym(conversation)
    assert reward == 1.0
    assert (error.reason, error.session_lost) == ("session_lost", True)


# --- servers or rows that could harm the client --------------------------------------------------


@pytest.mark.parametrize("declared", [False, True])
def test_an_endless_answer_is_not_read_to_its_end(declared):
    sent = 0

    async def send_endlessly(_, writer):
        nonlocal sent
        length = b"Content-Length: 999999999999\r\n" if declared else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        while sent < 2**28:  # far over the limit
            writer.write(b" " * 2**16)
            await writer.drain()
            sent += 2**16

    async def run():
        server = await asyncio.start_server(send_endlessly, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server, Gym({"s": url}) as gym:
            return await catch(gym.routes("s"))

    assert asyncio.run(run()).reason == "too_large"
    assert sent < gym_messages.MAX_ANSWER_BYTES + 16 * 2**20  # the buffers of the sockets hold more


def test_no_tool_is_called_through_another_route():
    names = [".", "..", "/", "../verify", "verify/", "a/b", "%2e", "\\verify", "verify\n"]
    names += ["", None, 7, "close"]
    good = "what is it?#"
    tools = [{"type": "function", "name": name} for name in [*names, good]]
    row = {**ROW, "responses_create_params": {"input": "x", "tools": tools}}

    async def conversation(gym, running):
        async with gym.session("s", row) as session:
            assert session.tools == {good}
            texts = [await session.call_tool(name, "{}") for name in [*names, good]]
        return texts, running.server.paths

    texts, paths = run_with_gym(conversation)
    errors = [json.loads(text) for text in texts[:-1]]
    assert errors == [{"error": f"Unknown tool: {name}"} for name in names]
    assert json.loads(texts[-1]) == {"found": "it"}
    assert paths[1:] == ["/seed_session", "/what%20is%20it%3F%23"]
