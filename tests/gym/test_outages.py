"""Outages and restarts of a Gym server, and the sessions that are lost in them."""

from __future__ import annotations

import asyncio
import re
import time

from gym_client import Gym, GymError, ServerDownError, message_response
from kit.gym.network import find_free_port
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
    return None


async def verify(gym):
    async with gym.session("s", ROW) as session:
        return await session.verify(RESPONSE)


# --- outages -------------------------------------------------------------------------------------


def test_a_server_that_refuses_connections_ends_the_run():
    async def run():
        async with Gym({"s": url}, outage_budget_s=1.0) as gym:
            return await asyncio.gather(*[catch(verify(gym)) for _ in range(16)])

    url = f"http://127.0.0.1:{find_free_port()}"
    began = time.monotonic()
    for error in asyncio.run(run()):
        assert type(error) is ServerDownError
        assert (error.reason, error.retryable, error.session_lost) == ("server_down", False, False)
        message = (
            rf"Gym server s \({url}\) unreachable for \d+ s \(gym\.outage_budget_s=1\)\. "
            r"Last error: http\S+: ClientConnectorError: .* Restart it, then rerun .* resume"
        )
        assert re.match(message, str(error))
    assert 1.0 < time.monotonic() - began < 30.0


# --- lost sessions -------------------------------------------------------------------------------


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
