"""The client of Gym: attempts, sessions, tools, steps and limits. No failure becomes a reward."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import re
import time
from collections import defaultdict

import pytest

import gym_client
import inference
from env import Task
from gym_client import (
    MAX_RESULT_BYTES,
    RESERVED,
    Gym,
    GymError,
    ServerDownError,
    message_response,
    parse_verify_result,
)
from kit.engine.sampling import repeat_per_group
from kit.verify.masks import find_mask
from kit.verify.network import find_free_port
from tests.helpers.http import (
    ROW,
    VERIFY_ROUTES,
    ScriptedServer,
    after,
    catch_reason,
    measure_longest_pause,
    run_session,
    step_x,
    verify_result,
    verify_x,
)
from tests.helpers.rollouts import chatml_tokenizer, context_of, one_turn_each

OPEN = (200, {}, "sid=0")
HUGE = b"1" + b"0" * 400  # a valid number of JSON, but no finite float


def make_server(**routes):
    """Make a verify server. Each call of /seed_session opens a session with another cookie."""
    seeds = [(200, {}, f"sid={number}") for number in range(9)]
    return ScriptedServer(**{**VERIFY_ROUTES, "seed_session": seeds, **routes})


def count_calls(server, path="/verify"):
    return server.paths().count(path)


def catch_error(url, conversation, row=ROW) -> GymError:
    """Return the GymError that ends a session."""
    with pytest.raises(GymError) as caught:
        run_session(url, conversation, row)
    return caught.value


# --- answers and attempts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults",
    [["reset"], ["truncated"], [(503, ""), (429, "")], [(500, "")]],
)
def test_a_temporary_failure_is_retried_in_a_new_session(faults):
    server = make_server(verify=[*faults, (200, {"reward": 1.0})])
    assert run_session(server.url, verify_x).reward == 1.0
    cookies = [cookie for path, _, cookie in server.log if path == "/verify"]
    assert cookies == [f"sid={number}" for number in range(len(faults) + 1)]


@pytest.mark.parametrize(
    ("answer", "reason", "calls"),
    [
        (after(3.0, (200, {"reward": 1.0})), "timeout", 1),
        ("reset", "connect", 3),
        ((422, ""), "http_422", 1),
        ((500, ""), "http_500", 2),
        ((503, ""), "http_503", 3),
        ((200, {"reward": None}), "bad_answer", 1),
        ((200, {"reward": "1.0"}), "bad_answer", 1),
        ((200, b'{"reward": %s}' % HUGE), "bad_answer", 1),
        ((200, b'{"reward": 1.0, "reward_components": {"a": -%s}}' % HUGE), "bad_answer", 1),
        ((200, {"reward": 0.0, "mask_sample": True}), "masked", 1),
    ],
)
def test_a_failure_is_an_error_with_its_reason(answer, reason, calls):
    server = make_server(verify=[answer])
    assert catch_reason(run_session, server.url, verify_x) == reason
    assert count_calls(server) == calls


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, ""),
        ({"mask_sample": True}, "mask_sample"),
        ({"failure_kind": "x"}, "failure_kind"),
        ({"failure_kind": "x", "mask_sample": False}, ""),
        ({"instance_config": {"mask_sample": True}}, "instance_config.mask_sample"),
        ({"mask_sample": False, "_ng_failure_class": "judge_failed"}, "_ng_failure_class"),
        ({"judge_error": "1/9 criteria unresolved"}, "judge_error"),
        ({"invalid_judge_response": True}, "invalid_judge_response"),
        ({"judge_evaluation": {"verdict_label": None, "error": "HTTP 500"}}, "judge_evaluation"),
        ({"judge_evaluation": {"verdict_label": None, "error": None}}, ""),
        ({"verifier_labels": {"safety_check": None}}, "verifier_labels"),
        ({"n_error": 2, "isr_counted": 1}, "n_error"),
        ({"n_error": 2}, ""),  # of a verifier that counts the errors of the policy
        ({"games": [{"verdict": "A>B"}, {"verdict": None}]}, "games"),
        ({"proof_status": "error", "mask_sample": False}, "proof_status"),
        ({"num_steps_total": 0}, "num_steps_total"),
    ],
)
def test_a_reward_that_its_server_marks_as_invalid_does_not_count(fields, mask):
    body = {"reward": 0.0, "failure_reason": "because", **fields}
    if not mask:
        assert parse_verify_result(body, find_mask=find_mask).reward == 0.0
        return
    with pytest.raises(GymError, match=f"invalid by {mask}: because") as caught:
        parse_verify_result(body, find_mask=find_mask)
    assert caught.value.reason == "masked"


def test_the_pauses_between_attempts_grow_to_five_seconds(monkeypatch):
    bounds = []
    sleeps = []
    sleep = asyncio.sleep

    def draw_upper_bound(low, high):
        bounds.append((low, high))
        return high

    def skip_sleep(seconds):
        sleeps.append(seconds)
        return sleep(0)

    monkeypatch.setattr(random, "uniform", draw_upper_bound)
    monkeypatch.setattr(asyncio, "sleep", skip_sleep)
    server = make_server(verify=[(503, "busy")] * 7 + [(200, {"reward": 1.0})])

    async def run():
        async with Gym({"s": server.url}, attempts=9) as gym, gym.session("s", ROW) as session:
            return (await verify_x(session)).reward

    assert asyncio.run(run()) == 1.0
    expected = [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert bounds == [(0.0, pause) for pause in expected]
    assert [seconds for seconds in sleeps if seconds] == expected


# --- rows, servers and sessions ------------------------------------------------------------------


def test_a_row_that_is_no_row_of_gym_is_an_error_before_any_call():
    server = make_server()
    for params in (None, {"tools": ["x"]}):
        error = catch_error(server.url, verify_x, {"responses_create_params": params})
        assert error.reason == "bad_row"
    assert not server.log


def test_a_verifier_that_compares_a_group_gets_its_members():
    """All groups are of one row, as in two steps. genrm_compare needs their numbers."""
    tokenizer = chatml_tokenizer()
    server = make_server()
    schema = {"properties": {"_ng_task_index": {}, "_ng_rollout_index": {}}}
    body = {"content": {"application/json": {"schema": schema}}}
    server.openapi["paths"]["/verify"] = {"post": {"requestBody": body}}
    task = Task("x:1", ROW, "s", [{"role": "user", "content": "x"}], [1])

    async def run():
        async with Gym({"s": server.url}) as gym:
            for step in ("1", "2"):
                context = context_of(one_turn_each("abcd", tokenizer), tokenizer)
                await inference.rollout(repeat_per_group([task] * 2, 2, step), {}, context, gym)

    asyncio.run(run())
    groups = defaultdict(list)
    for path, sent, _ in server.log:
        if path == "/verify":
            groups[sent["_ng_task_index"]].append(sent["_ng_rollout_index"])
    assert [sorted(members) for members in groups.values()] == [[0, 1]] * 4


# --- closing of sessions -------------------------------------------------------------------------


def make_closing_server(**routes):
    """Make a verify server that keeps sessions and has a route to close them."""
    closing_routes = {"seed_session": [OPEN], "close_session": [(200, {"closed": True})]}
    return ScriptedServer(**{**VERIFY_ROUTES, **closing_routes, **routes})


def test_a_server_that_requires_a_typed_body_gets_the_id_of_the_cookie():
    text = base64.b64encode(b'{"session_id": "5f0e1c7a-0000-4000-8000-a12345678901"}').decode()
    server = make_closing_server(seed_session=[(200, {}, f"Gym={text}.x")])
    schema = {"properties": {"resources_session_id": {}}}
    body = {"content": {"application/json": {"schema": schema}}}
    server.openapi["paths"]["/close_session"] = {"post": {"requestBody": body}}
    assert run_session(server.url, verify_x).reward == 1.0
    # Gym rejects a rollout id that ends with "-a" and a number.
    episode_id = {"rollout_id": "5f0e1c7a000040008000a12345678901", "attempt": 0}
    session_id = "5f0e1c7a-0000-4000-8000-a12345678901"
    assert server.log[-1][1] == {"resources_session_id": session_id, "episode_id": episode_id}


def test_a_session_that_cannot_be_closed_keeps_its_result(caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "gym_client")
    monkeypatch.setattr(gym_client, "CLOSE_TIMEOUT_S", 0.3)
    server = make_closing_server(close_session=[after(3.0, (200, {}))])
    began = time.monotonic()
    assert run_session(server.url, verify_x).reward == 1.0
    assert time.monotonic() - began < 2.0
    assert count_calls(server, "/close_session") == 1
    assert "/close_session: the session may be open: TimeoutError" in caplog.text


# --- outages and restarts ------------------------------------------------------------------------


def test_a_server_that_refuses_connections_ends_the_run():
    async def verify(gym):
        with pytest.raises(ServerDownError) as caught:
            async with gym.session("s", ROW):
                pass
        return caught.value

    async def run():
        async with Gym({"s": f"http://127.0.0.1:{find_free_port()}"}, outage_budget_s=1.0) as gym:
            return await asyncio.gather(*[verify(gym) for _ in range(16)])

    began = time.monotonic()
    for error in asyncio.run(run()):
        assert (error.reason, error.retryable, error.session_lost) == ("server_down", False, False)
        assert re.match(r"Gym server s \(\S+\) unreachable for \d+ s \(gym\.outage_", str(error))
    assert 1.0 < time.monotonic() - began < 30.0


def test_a_restart_by_the_run_loses_sessions():
    server = make_server(look=[(200, {})])

    async def run():
        async with Gym({"s": server.url}) as gym:
            async with gym.session("s", ROW) as mutated, gym.session("s", ROW) as new:
                await mutated.call_tool("look", "{}")
                gym.mark_restarted("s")
                with pytest.raises(GymError) as caught:  # a lost session must end the retries
                    call = gym._retry("s", mutated.call_tool, "look", "{}")
                    await asyncio.wait_for(call, 5)
                return (await verify_x(new)).reward, caught.value

    reward, error = asyncio.run(run())
    assert reward == 1.0
    assert (error.reason, error.session_lost) == ("session_lost", True)


# --- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ((200, {"found": 1}), '{"found": 1}'),
        ((422, {"detail": "no"}), '{"detail": "no"}'),
        ((500, "KeyError('x')"), "\"KeyError('x')\""),
    ],
    ids=["200", "422", "500"],
)
def test_the_model_reads_the_answer_of_a_tool(answer, text):
    server = make_server(look=[answer])
    result = run_session(server.url, lambda session: session.call_tool("look", '{"q": 1}'))
    assert result == text
    assert server.log[-1][:2] == ("/look", {"q": 1})


def test_a_tool_call_that_is_no_json_does_not_reach_the_server():
    server = make_server(look=[(200, {})])
    text = run_session(server.url, lambda session: session.call_tool("look", '{"q": '))
    assert json.loads(text)["error"].startswith("Invalid tool call arguments: ")
    assert server.paths() == ["/seed_session"]


def test_a_name_of_another_route_is_no_tool_even_if_a_row_lists_it():
    names = [*sorted(RESERVED), "..", "../look", "%76erify", "verify\n", "", 7]
    good = "what is it?#"
    tools = [{"type": "function", "name": name} for name in [*names, good]]
    row = {"responses_create_params": {"input": "x", "tools": tools}}
    path = "what%20is%20it%3F%23"
    server = make_server(**{"{tool_name}": [(200, {})], path: [(200, {"found": 1})]})

    async def conversation(session):
        assert session.tools == session.executable == {good}
        return [json.loads(await session.call_tool(name, "{}")) for name in [*names, good]]

    errors = [{"error": f"Unknown tool: {name}"} for name in names]
    assert run_session(server.url, conversation, row) == [*errors, {"found": 1}]
    assert server.paths() == ["/seed_session", f"/{path}"]


# --- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routes", "kind", "executable"),
    [
        (["seed_session", "verify", "look"], "verify", {"look"}),
        (["seed_session", "verify", "{tool_name}"], "verify", {"look", "away"}),
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
    assert catch_error(server.url, step_x).session_lost
    assert server.paths() == ["/reset", "/step"]

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
    "changes",
    [
        {"info": {"tool_outputs": [{"output": "no call_id"}]}},
        {"info": {"tool_outputs": [{"call_id": "c", "output": [{"type": "input_image"}]}]}},
        {"observation": 1},
        {"terminated": 1},
        {"reward": True},
        [],
    ],
    ids=str,
)
def test_a_step_answer_of_another_form_is_a_failure(changes):
    parts = [{"type": "input_text", "text": "18 "}, {"type": "text", "text": "degrees"}]
    outputs = [{"call_id": "c", "output": parts}, {"call_id": "d", "output": None}]
    good = {"observation": "go", "reward": 1.0, "info": {"tool_outputs": outputs}}
    good |= {"terminated": False, "truncated": None}
    bad = {**good, **changes} if isinstance(changes, dict) else changes
    server = ScriptedServer(reset=[(200, good)], step=[(200, good)])
    result = run_session(server.url, step_x)
    assert [output["output"] for output in result.tool_outputs] == ["18 degrees", ""]
    server = ScriptedServer(reset=[(200, good)], step=[(200, bad)])
    assert catch_reason(run_session, server.url, step_x) == "bad_answer"
    if {*changes} & {"info", "observation"} or not changes:
        server = ScriptedServer(reset=[(200, bad)], step=[(200, good)])
        assert catch_reason(run_session, server.url, step_x) == "bad_answer"


# --- sizes ---------------------------------------------------------------------------------------


def test_no_answer_blocks_the_event_loop():
    answer = b'{"reward": 1.0, "x": [' + b"1.5," * 250_000 + b"1]}"
    server = ScriptedServer(**{**VERIFY_ROUTES, "verify": [(200, answer)]})

    async def run():
        async with Gym({"s": server.url}) as gym, gym.session("s", ROW) as session:
            assert (await verify_x(session)).reward == 1.0

    assert measure_longest_pause(run, 0.1) < 0.1


def test_an_answer_may_be_as_long_as_its_request():
    """Verifiers echo the row with its images. An agent's answer holds the ids of every turn."""
    text = "x" * (2 * MAX_RESULT_BYTES)
    row = {**ROW, "image": text}
    assert run_session(ScriptedServer(**VERIFY_ROUTES).url, verify_x, row).reward
    assert verify_result({"reward": 1.0, "said": text[: MAX_RESULT_BYTES // 2]}).reward == 1.0
    assert catch_reason(verify_result, {"reward": 1.0, "said": text}) == "too_large"
    echo = ScriptedServer(**{**VERIFY_ROUTES, "verify": [(200, {"reward": 1.0, "image": text})]})
    assert run_session(echo.url, verify_x, row).reward == 1.0
    output = {"reward": 0.5, "response": {"output": []}, "said": text}
    agent = ScriptedServer(run=[(200, output)])

    async def run():
        async with Gym({"a": agent.url}) as gym:
            return await gym.run("a", ROW, 60.0)

    assert asyncio.run(run()).result.reward == 0.5


# --- text ----------------------------------------------------------------------------------------


def test_half_a_surrogate_pair_is_sent_as_a_question_mark_and_not_received():
    server = ScriptedServer(look=[(200, b'"\xed\xa0\x80"')], **VERIFY_ROUTES)
    half = '{"q": "\ud83d"}'

    async def conversation(session):
        text = await session.call_tool("look", half)
        return text, await session.verify(message_response("\udc00"))

    text, result = run_session(server.url, conversation, {**ROW, "question": "\ud800 or 🙂"})
    assert text.encode()
    assert result.reward == 1.0
    assert server.log[0][1]["question"] == "? or 🙂"
    assert server.log[1][1] == {"q": "?"}
    assert server.log[2][1]["response"]["output"][0]["content"][0]["text"] == "?"
