"""The HTTP client against a server that fails in every way: no failure is ever a reward."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from conftest import GYM_PYTHON, row

from gym_client import Gym, GymError, message_response, parse_verdict
from gym_servers import GymStartError, check_server, free_port, running_servers, wait_ready


class Faulty(BaseHTTPRequestHandler):
    """Does what the row asks for in `faults`, one per /verify call, then answers reward 1."""

    protocol_version = "HTTP/1.1"
    calls: ClassVar[Counter] = Counter()
    sessions: ClassVar[list] = []

    def do_GET(self):
        self.answer(200, {"paths": {"/seed_session": {"post": {}}, "/verify": {"post": {}}, "/look": {"post": {}}}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = body["question"]
        self.calls[key, self.path] += 1
        self.sessions.append((key, self.path, self.headers.get("cookie")))
        if self.path == "/seed_session":
            return self.answer(200, {}, cookie=f"sid={key}-{self.calls[key, self.path]}")
        faults = body["faults"]
        fault = faults[self.calls[key, self.path] - 1] if self.calls[key, self.path] <= len(faults) else "ok"
        if fault == "hang":
            time.sleep(3)
        elif fault == "reset":
            return self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "truncated":
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'{"reward": 1')
            return self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "nan":
            return self.answer(200, {"reward": float("nan")})
        elif fault == "html":
            return self.answer(200, None)
        elif isinstance(fault, int):
            return self.answer(fault, "error")
        self.answer(200, fault if isinstance(fault, dict) else {"reward": 1.0})

    def answer(self, status, body, cookie=None):
        data = b"<html>" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if cookie:
            self.send_header("set-cookie", cookie + "; path=/")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


async def verdict_of(url, key, faults, **settings):
    async with Gym({"faulty": url}, **{"timeout_s": 1.0, **settings}) as gym:
        async with gym.session("faulty", row(key, faults=faults)) as session:
            return await session.verify(message_response("7"))


@pytest.mark.parametrize("faults", [["reset"], [503, 429], [502, 504], [408], [500], ["truncated"]], ids=str)
def test_what_passes_is_retried_in_a_new_session(url, faults):
    key = f"retry {faults}"
    assert asyncio.run(verdict_of(url, key, faults)).reward == 1.0
    verifies = Faulty.calls[key, "/verify"]
    assert verifies == len(faults) + 1
    cookies = [cookie for k, path, cookie in Faulty.sessions if k == key and path == "/verify"]
    assert len(set(cookies)) == verifies  # each try had a session of its own
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
        ([{"reward": "1.0"}], "bad_answer", 1),
        ([{}], "bad_answer", 1),
        ([{"reward": 1.0, "reward_components": {"a": None}}], "bad_answer", 1),
        ([{"reward": 0.0, "mask_sample": True}], "masked", 1),
        ([{"reward": 0.0, "_ng_failure_class": "judge_failed"}], "masked", 1),
        ([{"reward": 0.0, "failure_kind": "infra"}], "masked", 1),
    ],
    ids=str,
)
def test_what_stays_broken_is_an_error_with_its_reason(url, faults, reason, calls):
    key = f"fail {faults}"
    with pytest.raises(GymError) as caught:
        asyncio.run(verdict_of(url, key, faults))
    assert caught.value.reason == reason
    assert Faulty.calls[key, "/verify"] == calls


def test_nobody_listens():
    with pytest.raises(GymError, match="Cannot connect") as caught:
        asyncio.run(verdict_of(f"http://127.0.0.1:{free_port()}", "nobody", []))
    assert caught.value.reason == "connect"


def test_sessions_do_not_share_cookies(url):
    async def many():
        async with Gym({"faulty": url}, concurrency=16) as gym:

            async def one(i):
                async with gym.session("faulty", row(f"own {i}", faults=[])) as session:
                    await session.verify(message_response("7"))

            await asyncio.gather(*[one(i) for i in range(32)])

    asyncio.run(many())
    seen = {k: cookie for k, path, cookie in Faulty.sessions if k.startswith("own") and path == "/verify"}
    assert seen == {f"own {i}": f"sid=own {i}-1" for i in range(32)}


def test_components_are_kept():
    verdict = parse_verdict({"reward": 1, "reward_components": {"a": 0.25, "b": 0.75}})
    assert verdict.reward == 1.0 and verdict.components == {"a": 0.25, "b": 0.75}


def test_an_unknown_server_is_named():
    with pytest.raises(GymError, match="no Gym server named 'x'; configured: faulty"):

        async def ask():
            async with Gym({"faulty": "http://127.0.0.1:1"}) as gym, gym.session("x", row()):
                pass

        asyncio.run(ask())


# --- real servers of nemo-gym --------------------------------------------------------------------


def test_real_servers_start_verify_and_stop(tmp_path):
    start = {"python": str(GYM_PYTHON)}
    servers = {"reasoning_gym": {"start": start}, "math": {"start": {**start, "server": "math_with_judge"}}}
    math_row = row("What is 1/2 + 1/4?", expected_answer="\\frac{3}{4}")

    async def ask(urls):
        async with Gym(urls, concurrency=4) as gym:
            rewards = []
            for server, a_row, text in [
                ("reasoning_gym", row(), "7"),
                ("reasoning_gym", row(), "it is 7"),
                ("reasoning_gym", row(), "8"),
                ("reasoning_gym", row(), ""),
                ("math", math_row, "It is \\boxed{0.75}."),
                ("math", math_row, "It is \\boxed{0.5}."),
            ]:
                async with gym.session(server, a_row) as session:
                    rewards.append((await session.verify(message_response(text))).reward)
            with pytest.raises(GymError) as caught:
                async with gym.session("reasoning_gym", {"responses_create_params": {"input": "x"}}) as session:
                    await session.verify(message_response("7"))
            assert caught.value.reason == "http_422"  # the row lacks what this verifier needs
            return rewards

    with running_servers(servers, tmp_path) as urls:
        assert asyncio.run(ask(urls)) == [1.0, pytest.approx(1 / 7), 0.0, 0.0, 1.0, 0.0]
    for name, url in urls.items():
        with pytest.raises(GymStartError, match="does not answer"):
            wait_ready(name, url)


def test_what_cannot_start_says_why(tmp_path, url):
    with pytest.raises(GymStartError, match=r"no interpreter at nowhere/python; `make gym`"):
        check_server("x", {"start": {"python": "nowhere/python"}})
    with pytest.raises(GymStartError, match=r"port \d+ on 127.0.0.1 is in use"):
        check_server("x", {"start": {"python": str(GYM_PYTHON), "port": int(url.rsplit(":", 1)[1])}})
    spec = {"start": {"python": str(GYM_PYTHON), "server": "nosuch"}}
    with pytest.raises(GymStartError, match="no resources server 'nosuch'"), running_servers({"x": spec}, tmp_path):
        pass


def test_a_url_nobody_listens_on_says_how_to_start_it():
    begin, port = time.monotonic(), free_port()
    with pytest.raises(GymStartError, match=f"`python gym_servers.py reasoning_gym --port {port}`"):
        check_server("reasoning_gym", {"url": f"http://127.0.0.1:{port}"})
    assert time.monotonic() - begin < 10
