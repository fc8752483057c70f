"""Tests of tools, steps and agents of a Gym server: retries, checks, and text for the model."""

from __future__ import annotations

import asyncio
import json
import re
import time

import pytest

from gym_client import RESERVED, Gym, GymError, message_response
from tests.helpers.http import (
    MESSAGE,
    ROW,
    VERIFY_ROUTES,
    ScriptedServer,
    catch_reason,
    run_session,
    step_x,
)

RUN_ANSWER = {"reward": 0.5, "response": {"output": []}}


# --- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((200, {"found": 1}), '{"found": 1}'),
        ((422, {"detail": "no"}), '{"detail": "no"}'),
        ((404, {"detail": "Not Found"}), '{"detail": "Not Found"}'),
        ((500, "KeyError('x')"), "\"KeyError('x')\""),
    ],
    ids=["200", "422", "404", "500"],
)
def test_the_model_reads_the_answer_of_a_tool(answer, text):
    server = ScriptedServer(look=[answer], **VERIFY_ROUTES)
    result = run_session(server.url, lambda session: session.call_tool("look", '{"q": 1}'))
    assert result == text
    assert server.log[-1][:2] == ("/look", {"q": 1})


@pytest.mark.parametrize(
    ("name", "arguments"), [("gone", "{}"), ("verify", "{}"), ("look", '{"q": '), ("../look", "{}")]
)
def test_an_invalid_tool_call_does_not_reach_the_server(name, arguments):
    server = ScriptedServer(look=[(200, {})], **VERIFY_ROUTES)
    text = run_session(server.url, lambda session: session.call_tool(name, arguments))
    assert re.match("Unknown tool|Invalid tool call arguments", json.loads(text)["error"])
    assert server.paths() == ["/seed_session"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("reset", "connect"), ((503, "busy"), "http_503"), ((429, ""), "http_429")],
)
def test_a_tool_that_is_unavailable_ends_the_episode_without_a_retry(answer, reason):
    server = ScriptedServer(look=[answer], **VERIFY_ROUTES)
    with pytest.raises(GymError) as caught:
        run_session(server.url, lambda session: session.call_tool("look", "{}"))
    assert caught.value.reason == reason
    assert caught.value.session_lost == (reason != "http_429")
    assert len(server.paths()) == 2


def test_a_session_in_which_a_tool_was_called_is_not_retried():
    verify_script = ["reset", (200, {"reward": 0.0})]
    server = ScriptedServer(look=[(200, {})], seed_session=[(200, {})], verify=verify_script)

    async def conversation(session):
        await session.call_tool("look", "{}")
        return await session.verify(message_response("x"))

    # A new session would not have the effect of the tool, so its reward would be wrong.
    with pytest.raises(GymError) as caught:
        run_session(server.url, conversation)
    assert (caught.value.reason, caught.value.session_lost) == ("connect", True)
    assert len(server.paths()) == 3


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED), "../look", "a/b", "%76erify", "verify\n", ".", "..", ""]
)
def test_a_reserved_route_is_not_a_tool_even_if_a_row_lists_it(name):
    tools = [{"type": "function", "name": each} for each in (name, "look")]
    row = {"responses_create_params": {"input": "x", "tools": tools}}
    routes = {**VERIFY_ROUTES, "{tool_name}": [(200, {})], "look": [(200, {"found": 1})]}
    server = ScriptedServer(**routes)

    async def conversation(session):
        rejection = await session.call_tool(name, "{}")
        return session.executable, rejection, await session.call_tool("look", "{}")

    executable, rejection, text = run_session(server.url, conversation, row)
    assert executable == {"look"}
    assert "Unknown tool" in rejection
    assert json.loads(text) == {"found": 1}
    assert server.paths() == ["/seed_session", "/look"]


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routes", "kind", "executable"),
    [
        (["seed_session", "verify", "look"], "verify", {"look"}),
        (["seed_session", "verify", "{tool_name}"], "verify", {"look", "away"}),
        (["seed_session", "verify"], "verify", set()),
        (["reset", "step", "aggregate_metrics"], "step", set()),
    ],
)
def test_the_routes_of_a_server_determine_its_kind_and_its_tools(routes, kind, executable):
    server = ScriptedServer(**{name: [(200, {"observation": "hello"})] for name in routes})

    async def read(session):
        return session.kind, session.executable, session.observation

    observation = "hello" if kind == "step" else None
    assert run_session(server.url, read) == (kind, executable, observation)


def test_a_step_is_retried_only_if_the_server_recognizes_it():
    end = {"observation": None, "reward": 1, "terminated": True, "truncated": False, "info": {}}
    opening = {"observation": "go", "info": {}}
    server = ScriptedServer(reset=[(200, opening)], step=["reset", (200, end)])
    with pytest.raises(GymError) as caught:
        run_session(server.url, step_x)
    assert server.paths() == ["/reset", "/step"]
    assert caught.value.session_lost

    info = {"supports_step_idempotency": True, "supports_explicit_close": True}
    opening = {"observation": "go", "info": info}
    server = ScriptedServer(reset=[(200, opening)], step=["reset", (200, end)], close=[(200, {})])
    result = run_session(server.url, step_x)
    assert result.reward == 1.0
    assert result.terminated and not result.truncated
    assert server.paths() == ["/reset", "/step", "/step", "/close"]
    bodies = [body for path, body, _ in server.log if path == "/step"]
    first, second = (body["_ng_step_request_id"] for body in bodies)
    assert first == second


@pytest.mark.parametrize(
    "answer", [{"reward": None}, {"reward": True}, {"reward": 1, "terminated": 1}, [], {}], ids=str
)
def test_a_step_without_a_reward_is_a_failure(answer):
    server = ScriptedServer(reset=[(200, {"observation": "go"})], step=[(200, answer)])
    with pytest.raises(GymError) as caught:
        run_session(server.url, step_x)
    assert caught.value.reason == "bad_answer"


def test_an_invalid_answer_of_reset_or_step_is_a_failure():
    output = {"output": "no call_id"}
    body = {"observation": None, "reward": 1.0, "info": {"tool_outputs": [output]}}
    for routes in (
        {"reset": [(200, [])], "step": [(200, {})]},
        {"reset": [(200, {})], "step": [(200, body)]},
    ):
        with pytest.raises(GymError) as caught:
            run_session(ScriptedServer(**routes).url, step_x)
        assert caught.value.reason == "bad_answer"


@pytest.mark.parametrize(
    "changes",
    [
        {"info": []},
        {"info": [1]},
        {"info": 1},
        {"info": "x"},
        {"info": {"tool_outputs": 1}},
        {"info": {"tool_outputs": {"call_id": "c"}}},
        {"info": {"tool_outputs": ["x"]}},
        {"info": {"tool_outputs": [{"call_id": "c", "output": 7}]}},
        {"info": {"tool_outputs": [{"call_id": 7, "output": "o"}]}},
        {"observation": 1},
        {"observation": ["x"]},
        {"terminated": "no"},
        {"reward": 10**400},
    ],
    ids=lambda changes: str(changes)[:80],
)
def test_a_step_answer_with_a_wrong_type_is_a_failure(changes):
    good = {
        "observation": "go",
        "reward": 1.0,
        "terminated": False,
        "truncated": None,
        "info": None,
    }
    server = ScriptedServer(reset=[(200, good)], step=[(200, good)])
    assert run_session(server.url, step_x).observation == "go"
    server = ScriptedServer(reset=[(200, good)], step=[(200, {**good, **changes})])
    assert catch_reason(run_session, server.url, step_x) == "bad_answer"
    if changes.keys() & {"info", "observation"}:
        server = ScriptedServer(reset=[(200, {**good, **changes})], step=[(200, good)])
        assert catch_reason(run_session, server.url, step_x) == "bad_answer"


# --- agents --------------------------------------------------------------------------------------


def run_agent(url, timeout_s=5.0, after=None, vocabulary=None, **settings):
    """Return the result of /run. after: (seconds, function that is then called with the Gym)."""

    async def run():
        async with Gym({"a": url}, **settings) as gym:
            assert await gym.kind("a") == "agent"
            if after:
                asyncio.get_running_loop().call_later(after[0], after[1], gym)
            return await gym.run("a", ROW, timeout_s, vocabulary=vocabulary)

    return asyncio.run(run())


def make_slow_agent(seconds):
    """Return a server whose /run takes this many seconds."""
    server = ScriptedServer(run=[(200, RUN_ANSWER)])
    answer = server.server.RequestHandlerClass.do_POST

    def answer_slowly(handler):
        time.sleep(seconds)
        answer(handler)

    server.server.RequestHandlerClass.do_POST = answer_slowly
    return server


def test_an_agents_run_is_retried_only_while_its_server_is_busy():
    body = {"reward": 0.5, "response": {"output": []}, "extra": 1, **ROW}
    server = ScriptedServer(run=[(503, ""), (200, body)])
    result, response = run_agent(server.url, 1.0)
    assert result.reward == 0.5
    assert result.details == {"extra": 1}
    assert response == {"output": []}
    for answer, reason in [((500, "boom"), "http_500"), ((200, {"reward": 1.0}), "bad_answer")]:
        server = ScriptedServer(run=[answer])
        with pytest.raises(GymError) as caught:
            run_agent(server.url, 1.0)
        assert caught.value.reason == reason
        assert server.paths() == ["/run"]


def test_an_agents_run_has_a_separate_timeout():
    url = make_slow_agent(1.0).url
    began = time.monotonic()
    with pytest.raises(GymError) as caught:
        run_agent(url, 0.3)
    assert caught.value.reason == "timeout"
    assert time.monotonic() - began < 0.9

    async def run():
        async with Gym({"a": url}, timeout_s=0.5) as gym:
            return await gym.run("a", ROW, 5.0)

    result, _ = asyncio.run(run())  # /run may take longer than timeout_s, other calls may not
    assert result.reward == 0.5
    assert result.latency_s > 0.9


def test_an_agents_run_does_not_count_if_its_server_restarted_during_it():
    url = make_slow_agent(0.6).url
    with pytest.raises(GymError) as caught:
        run_agent(url, after=(0.2, lambda gym: gym.mark_restarted("a")), attempts=1)
    assert (caught.value.reason, caught.value.session_lost) == ("session_lost", True)
    result, _ = run_agent(url, after=(0.2, lambda gym: gym.mark_restarted("another")))
    assert result.reward == 0.5


CALL = {
    "type": "function_call",
    "call_id": "c",
    "name": "f",
    "arguments": "{}",
    "prompt_token_ids": None,
}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "o"}


@pytest.mark.parametrize(
    "output",
    [
        None,
        {},
        ["x"],
        [{}],
        [{"type": 1}],
        [{**MESSAGE, "content": None}],
        [{**MESSAGE, "content": "hi"}],
        [{**MESSAGE, "content": ["hi"]}],
        [{**MESSAGE, "content": [{"type": "refusal", "refusal": "no"}]}],
        [{**MESSAGE, "content": [{"text": 1}]}],
        [{**CALL, "name": None}],
        [{**CALL, "arguments": {}}],
        [{**OUTPUT, "output": 7}],
        [{**MESSAGE, "prompt_token_ids": "12"}],
        [{**MESSAGE, "prompt_token_ids": [1.0]}],
        [{**MESSAGE, "prompt_token_ids": ["1"]}],
        [{**MESSAGE, "prompt_token_ids": [True]}],
        [{**MESSAGE, "prompt_token_ids": [-1]}],
        [{**MESSAGE, "generation_token_ids": [10**400]}],
        [{**MESSAGE, "generation_token_ids": [2**31]}],
        [{**MESSAGE, "generation_token_ids": [[3]]}],
        [{**MESSAGE, "generation_log_probs": [None]}],
        [{**MESSAGE, "generation_log_probs": [float("nan")]}],
        [{**MESSAGE, "generation_log_probs": [float("inf")]}],
        [{**MESSAGE, "generation_log_probs": [-(10**400)]}],
        [{**MESSAGE, "generation_log_probs": -0.5}],
    ],
    ids=lambda output: str(output)[-80:],
)
def test_the_items_of_an_agent_are_checked(output):
    def run(items, **limits):
        answer = {"reward": 1.0, "response": {"output": items}}
        return run_agent(ScriptedServer(run=[(200, answer)]).url, 1.0, **limits)

    good = [
        {"type": "reasoning", "summary": []},
        MESSAGE,
        CALL,
        OUTPUT,
        {"type": "message", "role": "user", "content": "x"},
    ]
    assert run(good)[1]["output"] == good
    assert run(good, vocabulary=4)
    assert run([])
    assert catch_reason(run, good, vocabulary=3) == "bad_answer"
    assert catch_reason(run, output) == "bad_answer"
