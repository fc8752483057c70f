"""Outages and lost sessions of a Gym server, and servers or rows that could harm the client."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

import gym_client
from gym_client import Gym, GymError, ServerDownError, message_response
from tests.helpers.fault_server import RunningServer
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


def test_a_server_that_refuses_connections_ends_the_run():
    async def conversation(gym, running):
        await asyncio.to_thread(running.__exit__)
        began = time.monotonic()
        errors = await asyncio.gather(*[catch(verify(gym)) for _ in range(64)])
        return errors, time.monotonic() - began

    errors, seconds = run_with_gym(conversation, concurrency=64, outage_budget_s=1.0)
    assert {(type(e), e.reason, e.retryable, e.session_lost) for e in errors} == {
        (ServerDownError, "server_down", False, False)
    }
    message = (
        r"Gym server s \(http://\S+\) unreachable for \d+ s \(gym\.outage_budget_s=1\)\. "
        r"Last error: http\S+: ClientConnectorError: .* Restart it, then rerun .* resume"
    )
    assert all(re.match(message, str(error)) for error in errors)
    assert 1.0 < seconds < 30.0


@pytest.mark.parametrize(("status", "calls"), [(503, 3), (504, 3), (0, 1)], ids=str)
def test_a_server_that_answers_no_call_fails_episodes_and_does_not_end_the_run(status, calls):
    """status 0: /verify has a timeout."""

    async def conversation(gym, running):
        running.server.hanging = set() if status else {"/verify"}
        async with gym.session("s", ROW) as session:
            running.server.status = status
            error = await catch(session.verify(RESPONSE))
        return error, running.server.paths

    error, paths = run_with_gym(conversation, timeout_s=1.0, outage_budget_s=0.1)
    assert type(error) is GymError
    assert error.reason == (f"http_{status}" if status else "timeout")
    assert len([path for path in paths if path != "/openapi.json"]) == 1 + calls


def test_a_call_that_breaks_and_is_then_refused_is_repeated_until_the_server_is_back():
    async def conversation(gym, running):
        running.server.hanging = {"/verify"}
        task = asyncio.create_task(verify(gym))
        while "/verify" not in running.server.paths:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(running.__exit__)
        await asyncio.sleep(1.0)
        with await asyncio.to_thread(RunningServer, port=running.port):
            return (await task).reward

    assert run_with_gym(conversation) == 1.0


# --- lost sessions -------------------------------------------------------------------------------


def test_a_session_that_is_older_than_its_server_is_not_continued():
    """The server accepts the old cookie with an empty session: the reward would be -1."""

    async def conversation(gym, running):
        with_tool = {**ROW, "with_tool": True}
        async with gym.session("s", with_tool) as mutated, gym.session("s", ROW) as new:
            await mutated.call_tool("look_up", "{}")
            await asyncio.to_thread(running.__exit__)
            task = asyncio.create_task(verify(gym))
            await asyncio.sleep(0.2)
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
    assert sent < gym_client.MAX_ANSWER_BYTES + 16 * 2**20  # the buffers of the sockets hold more


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
