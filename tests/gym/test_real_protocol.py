"""The protocol of Gym with the servers of nemo-gym 0.7."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest

import env
import inference
from extras.judges.judge_proxy import JudgeProxy
from extras.judges.judge_settings import build_judges
from gym_client import Gym, GymError, message_response
from kit.gym.network import HOST, find_free_port
from kit.gym.servers import GymServers, running_servers
from kit.rollout import openai_server
from kit.rollout.sampling import repeat_per_group, request_group
from tests.helpers.http import StubJudge, completion
from tests.helpers.recipes import GYM_PYTHON, row
from tests.helpers.rollouts import Script, chatml_tokenizer, context_of, encode_turns

KEY = "a key of this test"


# --- sessions ------------------------------------------------------------------------------------


# A server that keeps a sandbox for each open session. A row sets the answer of /verify.
SANDBOX_SERVER = """
from typing import Any, Optional

from fastapi import Body, Request
from pydantic import ConfigDict

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


class VerifyRequest(BaseVerifyRequest):
    outcome: dict[str, Any]


class VerifyResponse(BaseVerifyResponse):
    model_config = ConfigDict(extra="allow")


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

    async def verify(self, body: VerifyRequest) -> VerifyResponse:
        if "crash" in body.outcome:
            raise ValueError("crash")
        return VerifyResponse(**{**body.model_dump(exclude={"outcome"}), **body.outcome})


if __name__ == "__main__":
    Server.run_webserver()
"""


@pytest.fixture(scope="module")
def sandbox_server(tmp_path_factory):
    """The URL of SANDBOX_SERVER."""
    folder = tmp_path_factory.mktemp("sandboxes")
    (folder / "sandboxes").mkdir()
    (folder / "sandboxes" / "app.py").write_text(SANDBOX_SERVER)
    start = {"python": str(GYM_PYTHON), "path": str(folder / "sandboxes")}
    with running_servers({"sandboxes": {"start": start}}, folder) as urls:
        yield urls["sandboxes"]


async def verify_outcome(gym, **outcome):
    """Return the result of a response to a row that sets the answer of /verify."""
    task_row = {"responses_create_params": {"input": "x"}, "outcome": outcome}
    async with gym.session("sandboxes", task_row) as session:
        return await session.verify(message_response("x"))


def test_no_sandbox_stays_open_for_sessions_that_ended_failed_or_were_canceled(sandbox_server):
    async def cancel(gym):
        task_row = {"responses_create_params": {"input": "x"}, "outcome": {}}
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
        return during

    async def run():
        async with Gym({"sandboxes": sandbox_server}) as gym:
            result = await verify_outcome(gym, reward=0.25)
            with pytest.raises(GymError, match="crash"):
                await verify_outcome(gym, crash=True)
            return result.reward, await cancel(gym)

    before = httpx.get(f"{sandbox_server}/sandboxes").json()
    reward, during = asyncio.run(run())
    assert reward == 0.25
    assert during["open"] == 1
    after = httpx.get(f"{sandbox_server}/sandboxes").json()
    assert after["open"] == 0
    assert after["seeded"] - before["seeded"] == 4  # a crash has one retry, in a new session


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        ({}, ""),
        ({"failure_kind": "agent_run_error", "failure_reason": "because"}, ""),
        ({"mask_sample": True, "failure_reason": "because"}, "mask_sample"),
        (
            {"instance_config": {"mask_sample": True}, "failure_reason": "because"},
            "instance_config.mask_sample",
        ),
    ],
    ids=str,
)
def test_the_reward_of_a_server_of_gym_counts_unless_it_masks_the_sample(
    sandbox_server, outcome, reason
):
    """Each answer has mask_sample, a field of Gym's response class. Its default is false."""

    async def run():
        async with Gym({"sandboxes": sandbox_server}) as gym:
            return await verify_outcome(gym, reward=0.5, **outcome)

    if reason:
        with pytest.raises(GymError, match=f"invalid by {reason}: because"):
            asyncio.run(run())
        return
    assert asyncio.run(run()).reward == 0.5


# --- a verifier that compares a group ------------------------------------------------------------


@pytest.fixture
def comparing_verifier(tmp_path):
    """The URL of genrm_compare, which waits for both responses of a group and compares them."""
    judge = StubJudge((200, completion('{"score_1": 4, "score_2": 4, "ranking": 3}')))
    start = {"python": str(GYM_PYTHON), "server": "genrm_compare"}
    start["config"] = {
        "num_rollouts_per_prompt": 2,
        "genrm_model_server": {"type": "responses_api_models", "name": "judge_model"},
    }
    judges = build_judges({"judge_model": {"base_url": judge.url, "model": "stub"}}, 60.0)
    with JudgeProxy(judges) as proxy:
        specs = proxy.process_specs(tmp_path, str(GYM_PYTHON))
        with running_servers({"groups": {"start": start}}, tmp_path, other_specs=specs) as urls:
            yield urls["groups"]


def test_a_verifier_that_compares_a_group_gets_its_members(comparing_verifier):
    """All groups are of one row, as in two steps. Without indices the server answers 422."""
    tokenizer = chatml_tokenizer()
    task_row = {"responses_create_params": {"input": [{"role": "user", "content": "Say it."}]}}
    messages, _ = env.render_row(task_row, "x:1")
    ids = env.encode_messages(messages, [], tokenizer, "x:1")
    task = env.Task("x:1", task_row, "groups", messages, ids)

    async def run():
        async with Gym({"groups": comparing_verifier}, attempts=1) as gym:
            episodes = []
            for step in ("1", "2"):
                answers = encode_turns([f"answer {n} of {step}" for n in range(4)], tokenizer)
                context = context_of(Script(answers), tokenizer)
                requests = repeat_per_group([task] * 2, 2, step)
                episodes += await inference.rollout(requests, {}, context, gym)
            return episodes

    episodes = asyncio.run(run())
    assert [(e.status, e.error) for e in episodes] == [("ok", "")] * 8
    assert {e.reward for e in episodes} == {4.0}


# --- Environment Servers -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Start two Environment Servers, and return (their URLs, the port of the policy endpoint)."""
    port = find_free_port()
    policy = {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": KEY, "model": "policy"}
    start = {"python": str(GYM_PYTHON), "server": "reasoning_gym", "agent": "simple_agent"}
    servers = {
        name: {"start": {**start, "environment": name}}
        for name in ("single_agent_turn", "single_agent_turn_legacy")
    }
    folder = tmp_path_factory.mktemp("environment")
    with contextlib.closing(GymServers(servers, folder, policy=policy)) as group:
        group.start()
        yield group.wait_ready(), port


def run_episodes(environment, name, client, count):
    """Sample a group with this rollout engine. Return its episodes, and the kind of the server."""
    urls, port = environment
    tokenizer = chatml_tokenizer()
    context = context_of(client, tokenizer, timeout_s=60.0)
    task_row = row()
    messages, _ = env.render_row(task_row, "x:1")
    ids = env.encode_messages(messages, [], tokenizer, "x:1")
    task = env.Task("x:1", task_row, name, messages, ids)

    async def run():
        endpoint = openai_server.serve(context, HOST, port, KEY)
        async with endpoint, Gym({name: urls[name]}, attempts=2) as gym:
            episodes = await inference.rollout(request_group(task, "g", count), {}, context, gym)
            return episodes, await gym.kind(name)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "expected_kind"),
    [("single_agent_turn", "environment"), ("single_agent_turn_legacy", "agent")],
)
def test_an_environment_server_of_gym_returns_the_reward_and_the_sampled_ids(
    environment, name, expected_kind
):
    policy = Script(encode_turns(["7", "8"], chatml_tokenizer()))
    episodes, kind = run_episodes(environment, name, policy, 2)
    assert kind == expected_kind
    assert [e.status for e in episodes] == ["ok", "ok"], episodes[0].error
    assert {e.response: e.reward for e in episodes} == {"7": 1.0, "8": 0.0}
    for e in episodes:
        assert e.response_ids == encode_turns([e.response], chatml_tokenizer())[0]
        assert e.log_probs == [-0.5, -1.5] and e.ended == "stop"


class FailingPolicy:
    """A rollout engine that fails, and counts its requests."""

    count = 0

    async def generate(self, *_, **__):
        self.count += 1
        raise GymError("aborted", "no response")


@pytest.mark.parametrize(
    ("name", "status", "calls"),
    [("single_agent_turn", "environment_agent", 2), ("single_agent_turn_legacy", "masked", 1)],
)
def test_a_failure_of_an_environment_server_of_gym_is_no_reward(environment, name, status, calls):
    policy = FailingPolicy()
    (episode,), _ = run_episodes(environment, name, policy, 1)
    assert (episode.status, episode.reward) == (status, None)
    assert policy.count == calls  # a failure that is not terminal has one retry
    prefix = "" if name == "single_agent_turn" else "_ng_failure_"
    assert episode.failure[f"{prefix}stage"] == "agent"
    assert episode.failure[f"{prefix}terminal"] is False
    reason = episode.failure.get("failure_reason") or episode.failure["_ng_failure_message"]
    assert reason[:100] in episode.error
