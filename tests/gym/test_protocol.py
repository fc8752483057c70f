"""Fields and routes of Gym 0.7: masks of rewards, indices for /verify, closing of sessions."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time

import pytest

import gym_client
from gym_client import EpisodeIndex, Gym, GymError, parse_verify_result
from tests.helpers.http import ROW, VERIFY_ROUTES, ScriptedServer, run_session, step_x, verify_x

SESSION_ID = "5f0e1c7a-0000-4000-8000-a12345678901"  # ends like the id of an attempt
SESSION = base64.b64encode(json.dumps({"session_id": SESSION_ID}).encode()).decode()
OPEN = (200, {}, f"Gym={SESSION}.x")
CLOSED = (200, {"closed": True})


def describe_fields(server, path, *names):
    """Add required fields of the body of a path to the OpenAPI description of a server."""
    schema = {"properties": {name: {} for name in names}, "required": list(names)}
    operation = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    server.openapi["paths"][path] = {"post": operation}


# --- masks ---------------------------------------------------------------------------------------


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
        ({"mask_sample": False, "proof_status": "error"}, "proof_status"),
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
        ({"games": [{"verdict": "A>B"}, {"verdict": None}], "policy_answer": "x"}, "games"),
        ({"games": [{"verdict": "A>B"}], "policy_answer": "x"}, ""),
        ({"games": None, "policy_answer": None}, ""),
    ],
    ids=str,
)
def test_mask_sample_decides_before_failure_kind(fields, mask):
    body = {"reward": 0.0, "failure_reason": "because", **fields}
    if not mask:
        assert parse_verify_result(body).reward == 0.0
        return
    with pytest.raises(GymError, match=f"invalid by {mask}: because") as caught:
        parse_verify_result(body)
    assert caught.value.reason == "masked"


# --- index of an episode -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [[], ["_ng_rollout_index"], ["_ng_task_index", "_ng_rollout_index"]]
)
def test_verify_gets_the_indices_that_its_server_expects(names):
    server = ScriptedServer(**VERIFY_ROUTES)
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


# --- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [{}, {"responses_create_params": None}, {"responses_create_params": {"tools": ["x"]}}],
    ids=str,
)
def test_a_row_that_is_no_row_of_gym_is_an_error_before_any_call(row):
    server = ScriptedServer(**VERIFY_ROUTES)
    with pytest.raises(GymError, match=r"Correct the row\.") as caught:
        run_session(server.url, verify_x, row)
    assert caught.value.reason == "bad_row"
    assert not server.log


# --- closing of sessions -------------------------------------------------------------------------


def make_closing_server(**routes):
    """Make a verify server that keeps sessions and has a route to close them."""
    closing_routes = {"seed_session": [OPEN], "close_session": [CLOSED]}
    return ScriptedServer(**{**VERIFY_ROUTES, **closing_routes, **routes})


def run_and_read_log(server, conversation=verify_x):
    """Run a session. Return the log of the server, and the result or the error of the session."""
    try:
        result = run_session(server.url, conversation)
    except GymError as error:
        result = error
    return server.log, result


def test_a_session_is_closed_with_its_cookie_after_its_result():
    log, result = run_and_read_log(make_closing_server())
    assert result.reward == 1.0
    path, body, cookie = log[-1]
    assert (path, body, cookie) == ("/close_session", {}, OPEN[2])
    assert [path for path, _, _ in log] == ["/seed_session", "/verify", "/close_session"]


def test_a_server_that_requires_a_typed_body_gets_the_id_of_the_cookie():
    server = make_closing_server()
    describe_fields(server, "/close_session", "resources_session_id", "episode_id")
    log, _ = run_and_read_log(server)
    # Gym rejects a rollout id that ends with "-a" and a number.
    episode_id = {"rollout_id": SESSION_ID.replace("-", ""), "attempt": 0}
    assert log[-1][:2] == (
        "/close_session",
        {"resources_session_id": SESSION_ID, "episode_id": episode_id},
    )


@pytest.mark.parametrize("answer", [(500, "crash"), (422, ""), (200, {"reward": None})], ids=str)
def test_a_session_is_closed_after_a_failure(answer):
    log, result = run_and_read_log(make_closing_server(verify=[answer]))
    assert isinstance(result, GymError)
    assert log[-1][0] == "/close_session"


def test_the_session_of_each_attempt_is_closed():
    cookies = [f"sid={number}" for number in range(2)]
    server = make_closing_server(
        seed_session=[(200, {}, cookie) for cookie in cookies],
        verify=[(503, ""), (200, {"reward": 1.0})],
    )
    log, result = run_and_read_log(server)
    assert result.reward == 1.0
    closed = [cookie for path, _, cookie in log if path == "/close_session"]
    assert sorted(closed) == cookies


def test_a_session_is_closed_if_its_opening_failed_but_set_a_cookie():
    log, result = run_and_read_log(make_closing_server(seed_session=[(422, "", "sid=1")]))
    assert result.reason == "http_422"
    assert [(path, cookie) for path, _, cookie in log][-1] == ("/close_session", "sid=1")


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


def test_a_server_without_the_route_is_not_called():
    server = ScriptedServer(**{**VERIFY_ROUTES, "seed_session": [OPEN]})
    log, _ = run_and_read_log(server)
    assert [path for path, _, _ in log] == ["/seed_session", "/verify"]


@pytest.mark.parametrize("answer", [(500, "crash"), (404, ""), (503, "busy"), "reset"], ids=str)
def test_a_session_that_cannot_be_closed_keeps_its_result(answer, caplog):
    caplog.set_level(logging.WARNING, "gym_client")
    server = make_closing_server(close_session=[answer])
    log, result = run_and_read_log(server)
    assert result.reward == 1.0
    assert [path for path, _, _ in log].count("/close_session") == 1
    assert "/close_session: the session may be open: GymError" in caplog.text


def test_a_session_that_its_server_lost_is_not_closed(caplog):
    server = make_closing_server()

    async def run():
        async with Gym({"s": server.url}) as gym:
            async with gym.session("s", ROW) as session:
                await verify_x(session)
                gym.mark_restarted("s")

    asyncio.run(run())
    assert server.paths() == ["/seed_session", "/verify"]
    assert not caplog.text


def test_a_call_that_closes_a_session_has_a_timeout(monkeypatch, caplog):
    monkeypatch.setattr(gym_client, "CLOSE_TIMEOUT_S", 0.3)
    server = make_closing_server()
    answer = server.server.RequestHandlerClass.do_POST

    def hang(handler):
        if handler.path == "/close_session":
            time.sleep(3.0)
        answer(handler)

    server.server.RequestHandlerClass.do_POST = hang

    async def run():
        async with Gym({"s": server.url}, timeout_s=60.0) as gym:
            async with gym.session("s", ROW) as session:
                result = await verify_x(session)
                began = time.monotonic()
        return result, time.monotonic() - began

    result, seconds = asyncio.run(run())
    assert result.reward == 1.0
    assert 0.2 < seconds < 2.0
    assert "/close_session: the session may be open: TimeoutError" in caplog.text


def test_a_step_server_with_a_route_to_close_gets_one_call():
    end = {"observation": None, "reward": 1, "terminated": True, "truncated": False, "info": {}}
    opening = (200, {"observation": "go", "info": {"supports_explicit_close": True}}, OPEN[2])
    routes = {
        "reset": [opening],
        "step": [(200, end)],
        "close": [CLOSED],
        "close_session": [CLOSED],
    }
    log, _ = run_and_read_log(ScriptedServer(**routes), step_x)
    assert [path for path, _, _ in log] == ["/reset", "/step", "/close"]
