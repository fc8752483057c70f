"""The protocol of Gym with the servers of nemo-gym 0.7."""

from __future__ import annotations

import asyncio

import httpx
import pytest

import env
import inference
from gym_client import Gym, GymError, message_response
from kit.engine.endpoint import server as endpoint_server
from kit.engine.sampling import request_group
from kit.verify.network import HOST, find_free_port
from kit.verify.servers import running_servers
from tests.helpers.recipes import GYM_PYTHON, row
from tests.helpers.rollouts import Script, chatml_tokenizer, context_of, encode_turns

KEY = "a key of this test"


# --- sessions ------------------------------------------------------------------------------------


# A server that keeps a sandbox for each open session. The response `crash` makes it fail.
SANDBOX_SERVER = """
from typing import Any, Optional

from fastapi import Body, Request

from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseSeedSessionResponse,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.server_utils import SESSION_ID_KEY

SANDBOXES = []
SEEDED = []


class Server(SimpleResourcesServer):
    config: BaseResourcesServerConfig

    def setup_webserver(self):
        app = super().setup_webserver()
        app.get("/sandboxes")(self.list_sandboxes)
        return app

    async def list_sandboxes(self):
        return {"seeded": len(SEEDED), "open": len(SANDBOXES)}

    async def seed_session(self, request: Request):
        SEEDED.append(request.session[SESSION_ID_KEY])
        SANDBOXES.append(request.session[SESSION_ID_KEY])
        return BaseSeedSessionResponse()

    async def close_resources_session(
        self, request: Request, body: Optional[dict[str, Any]] = Body(None)
    ):
        SANDBOXES.remove(request.session[SESSION_ID_KEY])
        return {"closed": True}

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        if "crash" in body.response.output_text:
            raise ValueError("crash")
        return BaseVerifyResponse(**body.model_dump(), reward=0.25)


if __name__ == "__main__":
    Server.run_webserver()
"""


@pytest.fixture
def sandbox_server(tmp_path):
    """The URL of SANDBOX_SERVER."""
    (tmp_path / "sandboxes").mkdir()
    (tmp_path / "sandboxes" / "app.py").write_text(SANDBOX_SERVER)
    start = {"python": str(GYM_PYTHON), "path": str(tmp_path / "sandboxes")}
    with running_servers({"sandboxes": {"start": start}}, tmp_path) as urls:
        yield urls["sandboxes"]


def test_no_sandbox_stays_open_for_sessions_that_ended_failed_or_were_canceled(sandbox_server):
    task_row = {"responses_create_params": {"input": "x"}}

    async def verify(gym, text):
        async with gym.session("sandboxes", task_row) as session:
            return (await session.verify(message_response(text))).reward

    async def cancel(gym):
        is_open = asyncio.Event()

        async def wait():
            async with gym.session("sandboxes", task_row):
                is_open.set()
                await asyncio.sleep(60)

        episode = asyncio.create_task(wait())
        await is_open.wait()
        during = httpx.get(f"{sandbox_server}/sandboxes").json()
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        return during["open"]

    async def run():
        async with Gym({"sandboxes": sandbox_server}) as gym:
            with pytest.raises(GymError, match="crash"):
                await verify(gym, "crash")
            return await verify(gym, "x"), await cancel(gym)

    assert asyncio.run(run()) == (0.25, 1)
    # a crash has one retry, in a new session
    assert httpx.get(f"{sandbox_server}/sandboxes").json() == {"seeded": 4, "open": 0}


# --- Environment Servers -------------------------------------------------------------------------


class FailingPolicy(Script):
    """A rollout engine that fails after its script."""

    failed = 0

    async def generate(self, *args, **options):
        if not self.answers:
            self.failed += 1
            raise GymError("aborted", "no response")
        return await super().generate(*args, **options)


@pytest.mark.soak
def test_an_environment_server_of_gym_returns_the_reward_and_the_sampled_ids(tmp_path):
    """If the policy fails, so does the episode, without a reward."""
    port = find_free_port()
    endpoint = {"base_url": f"http://{HOST}:{port}/v1", "api_key": KEY, "model": "policy"}
    start = {"python": str(GYM_PYTHON), "server": "reasoning_gym", "agent": "simple_agent"}
    servers = {"turn": {"start": {**start, "environment": "single_agent_turn"}}}
    tokenizer = chatml_tokenizer()
    policy = FailingPolicy(encode_turns(["7", "8"], tokenizer))
    context = context_of(policy, tokenizer, timeout_s=60.0)
    messages, _ = env.render_row(row(), "x:1")
    ids = env.encode_messages(messages, [], tokenizer, "x:1")
    task = env.Task("x:1", row(), "turn", messages, ids)

    async def run(url):
        served = endpoint_server.serve(context, HOST, port, KEY)
        async with served, Gym({"turn": url}, attempts=2) as gym:
            sampled = await inference.rollout(request_group(task, "g", 2), {}, context, gym)
            failed = await inference.rollout(request_group(task, "h", 1), {}, context, gym)
            return sampled, failed[0], await gym.kind("turn")

    with running_servers(servers, tmp_path, policy=endpoint) as urls:
        sampled, failed, kind = asyncio.run(run(urls["turn"]))
    assert kind == "environment"
    assert [e.status for e in sampled] == ["ok", "ok"], sampled[0].error
    assert {e.response: e.reward for e in sampled} == {"7": 1.0, "8": 0.0}
    for e in sampled:
        assert e.response_ids == encode_turns([e.response], tokenizer)[0]
        assert e.log_probs == [-0.5, -1.5] and e.ended == "stop"
    assert (failed.status, failed.reward) == ("environment_agent", None)
    assert policy.failed == 2  # a failure that is not terminal has one retry
    assert (failed.failure["stage"], failed.failure["terminal"]) == ("agent", False)
    assert failed.failure["failure_reason"][:100] in failed.error
