"""Tests the HTTP client with a server that fails in many ways. No failure becomes a reward."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from http.server import ThreadingHTTPServer
from typing import ClassVar

import pytest

import gym_client
from gym_client import Gym, GymError, ServerDownError, message_response, parse_verify_result
from kit.gym.network import find_free_port
from kit.gym.servers import running_servers
from tests.helpers.http import (
    ROW,
    VERIFY_ROUTES,
    JsonHandler,
    ScriptedServer,
    run_session,
    verify_x,
)
from tests.helpers.recipes import GYM_PYTHON, ROOT, row


class FaultyHandler(JsonHandler):
    """A Gym server that fails with one of the row's `faults` per call of /verify, in order.

    After the last fault, it answers with reward 1.
    """

    calls: ClassVar[Counter] = Counter()
    sessions: ClassVar[list] = []

    def do_GET(self):  # noqa: N802
        routes = ("/seed_session", "/verify", "/look")
        self.answer(200, {"paths": {route: {"post": {}} for route in routes}})

    def do_POST(self):  # noqa: N802
        body = self.read_json()
        key = body["question"]
        self.calls[key, self.path] += 1
        count = self.calls[key, self.path]
        self.sessions.append((key, self.path, self.headers.get("cookie")))
        if self.path == "/seed_session":
            self.answer(200, {}, cookie=f"sid={key}-{count}")
        else:
            faults = body["faults"]
            self.fail(faults[count - 1] if count <= len(faults) else "ok")

    def fail(self, fault):
        if fault == "reset":
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "truncated":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"reward": 1')
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "nan":
            self.answer(200, {"reward": float("nan")})
        elif fault == "html":
            self.answer(200, b"<html>")
        elif isinstance(fault, int):
            self.answer(fault, "error")
        else:
            if fault == "hang":
                time.sleep(3)
            self.answer(200, fault if isinstance(fault, dict) else {"reward": 1.0})


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), FaultyHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


async def verify(url, key, faults, **settings):
    """Return the result of one session; `key` identifies its calls."""
    async with Gym({"faulty": url}, **{"timeout_s": 1.0, **settings}) as gym:
        async with gym.session("faulty", row(key, faults=faults)) as session:
            return await session.verify(message_response("7"))


# --- retries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults", [["reset"], [503, 429], [502, 504], [408], [500], ["truncated"]], ids=str
)
def test_a_temporary_failure_is_retried_in_a_new_session(url, faults):
    key = f"retry {faults}"
    assert asyncio.run(verify(url, key, faults)).reward == 1.0
    count = FaultyHandler.calls[key, "/verify"]
    assert count == len(faults) + 1
    cookies = [c for k, path, c in FaultyHandler.sessions if k == key and path == "/verify"]
    assert len(set(cookies)) == count  # each attempt had its own session
    assert all(cookie for cookie in cookies)


@pytest.mark.parametrize(
    ("faults", "reason", "calls"),
    [
        (["hang"], "timeout", 1),
        ([422], "http_422", 1),
        ([404], "http_404", 1),
        ([500, 500, 500], "http_500", 2),
        ([503] * 9, "http_503", 3),
        (["reset"] * 9, "connect", 3),
        (["html"], "bad_answer", 1),
        ([{"reward": None}], "bad_answer", 1),
        ([{"reward": True}], "bad_answer", 1),
        (["nan"], "bad_answer", 1),
        ([{"reward": 10**400}], "bad_answer", 1),
        ([{"reward": 1.0, "reward_components": {"a": -(10**400)}}], "bad_answer", 1),
        ([{"reward": "1.0"}], "bad_answer", 1),
        ([{}], "bad_answer", 1),
        ([{"reward": 1.0, "reward_components": {"a": None}}], "bad_answer", 1),
        ([{"reward": 0.0, "mask_sample": True}], "masked", 1),
        ([{"reward": 0.0, "_ng_failure_class": "judge_failed"}], "masked", 1),
        ([{"reward": 0.0, "failure_kind": "infra"}], "masked", 1),
        ([{"reward": 0.0, "proof_status": "error"}], "masked", 1),
        ([{"reward": 0.0, "num_steps_total": 0}], "masked", 1),
    ],
    ids=str,
)
def test_a_permanent_failure_is_an_error_with_its_reason(url, faults, reason, calls):
    key = f"fail {faults}"
    with pytest.raises(GymError) as caught:
        asyncio.run(verify(url, key, faults))
    assert caught.value.reason == reason
    assert FaultyHandler.calls[key, "/verify"] == calls


def test_an_unused_port_counts_as_a_server_that_is_down():
    message = r"faulty \(http://\S+\) unreachable .*Cannot connect .* resume"
    url = f"http://127.0.0.1:{find_free_port()}"
    with pytest.raises(ServerDownError, match=message):
        asyncio.run(verify(url, "nobody", [], outage_budget_s=1.0))


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
    verify_script = [(503, "busy")] * 7 + [(200, {"reward": 1.0})]
    server = ScriptedServer(**{**VERIFY_ROUTES, "verify": verify_script})

    async def run():
        async with Gym({"s": server.url}, attempts=9) as gym, gym.session("s", ROW) as session:
            return (await verify_x(session)).reward

    assert asyncio.run(run()) == 1.0
    expected = [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert bounds == [(0.0, pause) for pause in expected]
    assert [seconds for seconds in sleeps if seconds] == expected


@pytest.mark.parametrize(
    "status", [201, 202, 204, 206, 401, 403, 409, 413, 418, 451, 501, 505, 511, 599]
)
def test_only_an_answer_with_status_200_is_a_result(status):
    """The client does not retry, because another attempt would get the same answer."""
    server = ScriptedServer(**{**VERIFY_ROUTES, "verify": [(status, {"reward": 1.0})]})
    with pytest.raises(GymError) as caught:
        run_session(server.url, verify_x)
    assert (caught.value.reason, caught.value.session_lost) == (f"http_{status}", False)
    assert server.paths() == ["/seed_session", "/verify"]


# --- sessions and servers ------------------------------------------------------------------------


def test_sessions_do_not_share_cookies(url):
    async def run():
        async with Gym({"faulty": url}, concurrency=16) as gym:

            async def run_one(number):
                async with gym.session("faulty", row(f"own {number}", faults=[])) as session:
                    await session.verify(message_response("7"))

            await asyncio.gather(*[run_one(number) for number in range(32)])

    asyncio.run(run())
    calls = [call for call in FaultyHandler.sessions if call[0].startswith("own")]
    cookies = {key: cookie for key, path, cookie in calls if path == "/verify"}
    assert cookies == {f"own {i}": f"sid=own {i}-1" for i in range(32)}


def test_reward_components_are_part_of_the_result():
    result = parse_verify_result({"reward": 1, "reward_components": {"a": 0.25, "b": 0.75}})
    assert result.reward == 1.0
    assert result.components == {"a": 0.25, "b": 0.75}


def test_an_error_names_an_unknown_server():
    async def run():
        async with Gym({"faulty": "http://127.0.0.1:1"}) as gym, gym.session("x", row()):
            pass

    with pytest.raises(GymError, match="no Gym server named 'x'; configured: faulty"):
        asyncio.run(run())


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
