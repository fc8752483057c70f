"""The client of Gym: answers, attempts, sessions, tools and steps. No failure becomes a reward."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import random
import re
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

import gym_client
from gym_client import RESERVED, EpisodeIndex, Gym, GymError, parse_verify_result
from kit.gym.servers import running_servers
from tests.helpers.http import (
    ROW,
    VERIFY_ROUTES,
    ScriptedServer,
    after,
    catch_reason,
    describe_fields,
    run_session,
    step_x,
    verify_x,
)
from tests.helpers.recipes import GYM_PYTHON, ROOT

SESSION_ID = "5f0e1c7a-0000-4000-8000-a12345678901"  # ends like the id of an attempt
SESSION = base64.b64encode(json.dumps({"session_id": SESSION_ID}).encode()).decode()
OPEN = (200, {}, f"Gym={SESSION}.x")
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
    [
        ["reset"],
        ["truncated"],
        [(503, ""), (429, "")],
        [(502, ""), (504, "")],
        [(408, "")],
        [(500, "")],
    ],
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
        ((404, ""), "http_404", 1),
        ((500, ""), "http_500", 2),
        ((503, ""), "http_503", 3),
        ((504, ""), "http_504", 3),
        ((200, b"<html>"), "bad_answer", 1),
        ((200, []), "bad_answer", 1),
        ((200, {}), "bad_answer", 1),
        ((200, {"reward": None}), "bad_answer", 1),
        ((200, {"reward": True}), "bad_answer", 1),
        ((200, {"reward": "1.0"}), "bad_answer", 1),
        ((200, b'{"reward": NaN}'), "bad_answer", 1),
        ((200, b'{"reward": 1.0, "reward": NaN}'), "bad_answer", 1),
        ((200, b'{"reward": %s}' % HUGE), "bad_answer", 1),
        ((200, b'{"reward": 1.0, "reward_components": {"a": -%s}}' % HUGE), "bad_answer", 1),
        ((200, {"reward": 1.0, "reward_components": {"a": "1"}}), "bad_answer", 1),
        ((200, {"reward": 1.0, "reward_components": [1]}), "bad_answer", 1),
        ((200, {"reward": 0.0, "mask_sample": True}), "masked", 1),
        ((200, {"reward": 0.0, "_ng_failure_class": "judge_failed"}), "masked", 1),
    ],
)
def test_a_failure_is_an_error_with_its_reason(answer, reason, calls):
    server = make_server(verify=[answer])
    assert catch_reason(run_session, server.url, verify_x) == reason
    assert count_calls(server) == calls


@pytest.mark.parametrize("status", [201, 204, 409, 501])
def test_only_an_answer_with_status_200_is_a_result(status):
    """The client does not retry, because another attempt would get the same answer."""
    server = make_server(verify=[(status, {"reward": 1.0})])
    error = catch_error(server.url, verify_x)
    assert (error.reason, error.session_lost) == (f"http_{status}", False)
    assert count_calls(server) == 1


def test_the_last_value_of_a_repeated_key_counts():
    server = make_server(verify=[(200, b'{"reward": 1.0, "reward": 0.25}')])
    assert run_session(server.url, verify_x).reward == 0.25


def test_reward_components_are_part_of_the_result():
    result = parse_verify_result({"reward": 1, "reward_components": {"a": 0.25, "b": 0.75}})
    assert result.reward == 1.0
    assert result.components == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, ""),
        ({"mask_sample": False}, ""),
        ({"mask_sample": True}, "mask_sample"),
        ({"failure_kind": "x"}, "failure_kind"),
        ({"failure_kind": "x", "mask_sample": None}, "failure_kind"),
        ({"failure_kind": "x", "mask_sample": False}, ""),
        ({"failure_kind": "x", "mask_sample": True}, "mask_sample"),
        ({"failure_kind": "x", "instance_config": {"mask_sample": False}}, ""),
        ({"failure_kind": "x", "instance_config": {}}, "failure_kind"),
        ({"failure_kind": "x", "instance_config": 7}, "failure_kind"),
        ({"instance_config": {"mask_sample": True}}, "instance_config.mask_sample"),
        (
            {"mask_sample": False, "instance_config": {"mask_sample": True}},
            "instance_config.mask_sample",
        ),
        ({"mask_sample": True, "instance_config": {"mask_sample": False}}, "mask_sample"),
        ({"mask_sample": False, "_ng_failure_class": "judge_failed"}, "_ng_failure_class"),
        ({"judge_error": "1/9 criteria unresolved"}, "judge_error"),
        ({"judge_error": None}, ""),
        ({"invalid_judge_response": True}, "invalid_judge_response"),
        ({"judge_evaluation": {"verdict_label": None, "error": "HTTP 500"}}, "judge_evaluation"),
        ({"judge_evaluation": {"verdict_label": None, "error": None}}, ""),
        ({"quality_judge_evaluation": {"error": "HTTP 500"}}, "quality_judge_evaluation"),
        ({"verifier_labels": {"safety_check": None}}, "verifier_labels"),
        ({"verifier_labels": {"safety_check": "[[SAFE]]"}}, ""),
        ({"n_error": 2, "isr_counted": 1}, "n_error"),
        ({"n_error": 0, "isr_counted": 1}, ""),
        ({"n_error": 2}, ""),  # of a verifier that counts the errors of the policy
        ({"games": [{"verdict": "A>B"}, {"verdict": None}]}, "games"),
        ({"games": [{"verdict": "A>B"}, {"score": None}, 7]}, ""),
        ({"games": None}, ""),
        ({"proof_status": "error", "mask_sample": False}, "proof_status"),
        ({"proof_status": "failed"}, ""),
        ({"num_steps_total": 0}, "num_steps_total"),
        ({"num_steps_total": 3}, ""),
    ],
)
def test_a_reward_that_its_server_marks_as_invalid_does_not_count(fields, mask):
    body = {"reward": 0.0, "failure_reason": "because", **fields}
    if not mask:
        assert parse_verify_result(body).reward == 0.0
        return
    with pytest.raises(GymError, match=f"invalid by {mask}: because") as caught:
        parse_verify_result(body)
    assert caught.value.reason == "masked"


@pytest.fixture
def pauses(monkeypatch):
    """(bounds, sleeps) of the pauses between attempts, in seconds. Nothing really sleeps."""
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
    return bounds, sleeps


def test_the_pauses_between_attempts_grow_to_five_seconds(pauses):
    bounds, sleeps = pauses
    server = make_server(verify=[(503, "busy")] * 7 + [(200, {"reward": 1.0})])

    async def run():
        async with Gym({"s": server.url}, attempts=9) as gym, gym.session("s", ROW) as session:
            return (await verify_x(session)).reward

    assert asyncio.run(run()) == 1.0
    expected = [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert bounds == [(0.0, pause) for pause in expected]
    assert [seconds for seconds in sleeps if seconds] == expected


# --- rows, servers and sessions ------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [{}, {"responses_create_params": None}, {"responses_create_params": {"tools": ["x"]}}],
)
def test_a_row_that_is_no_row_of_gym_is_an_error_before_any_call(row):
    server = make_server()
    error = catch_error(server.url, verify_x, row)
    assert error.reason == "bad_row"
    assert str(error).endswith("Correct the row.")
    assert not server.log


def test_an_error_names_an_unknown_server():
    async def run():
        async with Gym({"faulty": "http://127.0.0.1:1"}) as gym, gym.session("x", ROW):
            pass

    with pytest.raises(GymError, match="no Gym server named 'x'; configured: faulty"):
        asyncio.run(run())


def test_sessions_do_not_share_cookies():
    seeds = [(200, {}, f"sid={number}") for number in range(32)]
    server = ScriptedServer(**{**VERIFY_ROUTES, "seed_session": seeds})

    async def run():
        async with Gym({"s": server.url}, concurrency=16) as gym:

            async def run_one():
                async with gym.session("s", ROW) as session:
                    await verify_x(session)

            await asyncio.gather(*[run_one() for _ in range(32)])

    asyncio.run(run())
    cookies = [cookie for path, _, cookie in server.log if path == "/verify"]
    assert sorted(cookies) == sorted(cookie for _, _, cookie in seeds)


@pytest.mark.parametrize(
    "names", [[], ["_ng_rollout_index"], ["_ng_task_index", "_ng_rollout_index"]]
)
def test_verify_gets_the_indices_that_its_server_expects(names):
    server = make_server()
    describe_fields(server, "/verify", "response", *names)

    async def run():
        async with Gym({"s": server.url}) as gym:
            async with gym.session("s", ROW, EpisodeIndex(41, 1)) as session:
                await verify_x(session)

    asyncio.run(run())
    seed, verify = [body for _, body, _ in server.log]
    assert seed == ROW
    indices = {"_ng_task_index": 41, "_ng_rollout_index": 1}
    expected = {name: indices[name] for name in names}
    assert {k: v for k, v in verify.items() if k.startswith("_ng_")} == expected


def test_the_example_in_the_docstring_needs_only_the_file_of_the_client(tmp_path):
    header = gym_client.__doc__
    code = textwrap.dedent(header.split("and pydantic:")[1].split("Why aiohttp")[0])
    shutil.copy(ROOT / "gym_client.py", tmp_path)
    packages = GYM_PYTHON.parent.parent
    examples = packages.glob("lib/*/site-packages/resources_servers/mcqa/data/example.jsonl")
    shutil.copy(next(examples), tmp_path / "rows.jsonl")
    with running_servers({"mcqa": {"start": {"python": str(GYM_PYTHON)}}}, tmp_path) as urls:
        program = code.replace("http://127.0.0.1:8001", urls["mcqa"])
        assert program != code
        command = [sys.executable, "-c", program]
        process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (process.stdout, process.stderr) == ("1.0\n", ""), program


# --- closing of sessions -------------------------------------------------------------------------


def make_closing_server(**routes):
    """Make a verify server that keeps sessions and has a route to close them."""
    closing_routes = {"seed_session": [OPEN], "close_session": [(200, {"closed": True})]}
    return ScriptedServer(**{**VERIFY_ROUTES, **closing_routes, **routes})


def test_a_session_is_closed_with_its_cookie_after_its_result():
    server = make_closing_server()
    assert run_session(server.url, verify_x).reward == 1.0
    assert server.log[-1] == ("/close_session", {}, OPEN[2])
    assert server.paths() == ["/seed_session", "/verify", "/close_session"]


def test_a_server_that_requires_a_typed_body_gets_the_id_of_the_cookie():
    server = make_closing_server()
    describe_fields(server, "/close_session", "resources_session_id", "episode_id")
    run_session(server.url, verify_x)
    # Gym rejects a rollout id that ends with "-a" and a number.
    episode_id = {"rollout_id": SESSION_ID.replace("-", ""), "attempt": 0}
    body = {"resources_session_id": SESSION_ID, "episode_id": episode_id}
    assert server.log[-1][:2] == ("/close_session", body)


def test_the_session_of_each_attempt_is_closed_also_after_failures():
    for routes in (
        {"verify": [(500, "crash")]},
        {"verify": [(422, "")]},
        {"verify": [(200, {"reward": None})]},
        {"seed_session": [(422, "", OPEN[2])]},
    ):
        server = make_closing_server(**routes)
        catch_error(server.url, verify_x)
        assert server.log[-1][0] == "/close_session", routes
        assert server.log[-1][2] == OPEN[2]
    cookies = [f"sid={number}" for number in range(2)]
    server = make_closing_server(
        seed_session=[(200, {}, cookie) for cookie in cookies],
        verify=[(503, ""), (200, {"reward": 1.0})],
    )
    assert run_session(server.url, verify_x).reward == 1.0
    closed = [cookie for path, _, cookie in server.log if path == "/close_session"]
    assert sorted(closed) == cookies


def test_a_session_is_closed_if_its_episode_is_canceled():
    server = make_closing_server()

    async def run():
        async with Gym({"s": server.url}, concurrency=1) as gym:
            is_open = asyncio.Event()

            async def play():
                async with gym.session("s", ROW) as session:
                    is_open.set()
                    await asyncio.sleep(60)
                    await verify_x(session)

            episode = asyncio.create_task(play())
            await is_open.wait()
            async with gym._slot("s", "/look"):  # another call has the only slot
                episode.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(episode, 5)

    asyncio.run(run())
    assert server.paths() == ["/seed_session", "/close_session"]


@pytest.mark.parametrize(
    "answer", [(500, "crash"), (404, ""), (503, "busy"), "reset", after(3.0, (200, {}))]
)
def test_a_session_that_cannot_be_closed_keeps_its_result(answer, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "gym_client")
    monkeypatch.setattr(gym_client, "CLOSE_TIMEOUT_S", 0.3)
    server = make_closing_server(close_session=[answer])
    began = time.monotonic()
    assert run_session(server.url, verify_x).reward == 1.0
    assert time.monotonic() - began < 2.0
    assert count_calls(server, "/close_session") == 1
    error = "TimeoutError" if callable(answer) else "GymError"
    assert f"/close_session: the session may be open: {error}" in caplog.text


def test_a_session_that_its_server_lost_is_not_closed(caplog):
    server = make_closing_server()

    async def lose(session):
        await verify_x(session)
        session.gym.mark_restarted("s")

    run_session(server.url, lose)
    assert server.paths() == ["/seed_session", "/verify"]
    assert not caplog.text


def test_a_route_that_closes_is_called_only_if_the_server_has_it():
    server = ScriptedServer(**{**VERIFY_ROUTES, "seed_session": [OPEN]})
    run_session(server.url, verify_x)
    assert server.paths() == ["/seed_session", "/verify"]
    end = {"observation": None, "reward": 1, "terminated": True, "truncated": False, "info": {}}
    opening = {"observation": "go", "info": {"supports_explicit_close": True}}
    routes = {"reset": [(200, opening, OPEN[2])], "step": [(200, end)]}
    server = ScriptedServer(**routes, close=[(200, {})], close_session=[(200, {})])
    run_session(server.url, step_x)
    assert server.paths() == ["/reset", "/step", "/close"]


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
    server = make_server(look=[answer])
    result = run_session(server.url, lambda session: session.call_tool("look", '{"q": 1}'))
    assert result == text
    assert server.log[-1][:2] == ("/look", {"q": 1})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gone", "{}"),
        ("verify", "{}"),
        ("../look", "{}"),
        ("look", '{"q": '),
        ("look", "[" * 5000),
        ("look", "[" * 5000 + "]" * 5000),
    ],
    ids=lambda text: text[:8],
)
def test_an_invalid_tool_call_does_not_reach_the_server(name, arguments):
    server = make_server(look=[(200, {})])
    text = run_session(server.url, lambda session: session.call_tool(name, arguments))
    assert re.match("Unknown tool|Invalid tool call arguments: ", json.loads(text)["error"])
    assert server.paths() == ["/seed_session"]


def test_a_name_of_another_route_is_no_tool_even_if_a_row_lists_it():
    names = [*sorted(RESERVED), ".", "..", "/", "../look", "verify/", "a/b", "%2e", "%76erify"]
    names += ["\\verify", "verify\n", "", None, 7]
    good = "what is it?#"
    tools = [{"type": "function", "name": name} for name in [*names, good]]
    row = {"responses_create_params": {"input": "x", "tools": tools}}
    path = "what%20is%20it%3F%23"
    server = make_server(**{"{tool_name}": [(200, {})], path: [(200, {"found": 1})]})

    async def conversation(session):
        assert session.tools == session.executable == {good}
        return [await session.call_tool(name, "{}") for name in [*names, good]]

    texts = [json.loads(text) for text in run_session(server.url, conversation, row)]
    assert texts == [{"error": f"Unknown tool: {name}"} for name in names] + [{"found": 1}]
    assert server.paths() == ["/seed_session", f"/{path}"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("reset", "connect"), ((503, "busy"), "http_503"), ((429, ""), "http_429")],
)
def test_a_tool_that_is_unavailable_ends_the_episode_without_a_retry(answer, reason):
    server = make_server(look=[answer])
    error = catch_error(server.url, lambda session: session.call_tool("look", "{}"))
    assert (error.reason, error.session_lost) == (reason, reason != "http_429")
    assert len(server.paths()) == 2


def test_a_session_in_which_a_tool_was_called_is_not_retried():
    """A new session would not have the effect of the tool, so its reward would be wrong."""
    server = make_server(look=[(200, {})], verify=["reset", (200, {"reward": 0.0})])

    async def conversation(session):
        await session.call_tool("look", "{}")
        return await verify_x(session)

    error = catch_error(server.url, conversation)
    assert (error.reason, error.session_lost) == ("connect", True)
    assert len(server.paths()) == 3


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
        {"info": 1},
        {"info": {"tool_outputs": 1}},
        {"info": {"tool_outputs": ["x"]}},
        {"info": {"tool_outputs": [{"output": "no call_id"}]}},
        {"info": {"tool_outputs": [{"call_id": "c", "output": 7}]}},
        {"observation": 1},
        {"terminated": 1},
        {"reward": None},
        {"reward": True},
        {"reward": 10**400},
        [],
    ],
    ids=lambda changes: str(changes)[:80],
)
def test_a_step_answer_of_another_form_is_a_failure(changes):
    good = {
        "observation": "go",
        "reward": 1.0,
        "terminated": False,
        "truncated": None,
        "info": None,
    }
    bad = {**good, **changes} if isinstance(changes, dict) else changes
    server = ScriptedServer(reset=[(200, good)], step=[(200, good)])
    assert run_session(server.url, step_x).observation == "go"
    server = ScriptedServer(reset=[(200, good)], step=[(200, bad)])
    assert catch_reason(run_session, server.url, step_x) == "bad_answer"
    if {*changes} & {"info", "observation"} or not changes:
        server = ScriptedServer(reset=[(200, bad)], step=[(200, good)])
        assert catch_reason(run_session, server.url, step_x) == "bad_answer"
