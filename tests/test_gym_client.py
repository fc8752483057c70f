"""The HTTP client against a server that fails in every way: no failure is ever a reward."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import queue
import random
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from conftest import GYM_PYTHON, row

from gym_client import (
    MAX_ANSWER_BYTES,
    RESERVED,
    Gym,
    GymError,
    ServerDownError,
    function_call,
    message_response,
    parse_verdict,
)
from kit.data.episodes import uncollected
from kit.gym import servers as gym_servers
from kit.gym.servers import (
    GymStartError,
    check_server,
    discover,
    free_port,
    port_in_use,
    running_servers,
    wait_ready,
)


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body, cookie=None):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if cookie:
            self.send_header("set-cookie", cookie + "; path=/")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(data)

    def log_message(self, *_):
        pass


class Faulty(Answers):
    """Does what the row asks for in `faults`, one per /verify call, then answers reward 1."""

    calls: ClassVar[Counter] = Counter()
    sessions: ClassVar[list] = []

    def do_GET(self):
        self.answer(
            200,
            {
                "paths": {
                    "/seed_session": {"post": {}},
                    "/verify": {"post": {}},
                    "/look": {"post": {}},
                }
            },
        )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        key = body["question"]
        self.calls[key, self.path] += 1
        self.sessions.append((key, self.path, self.headers.get("cookie")))
        if self.path == "/seed_session":
            return self.answer(200, {}, cookie=f"sid={key}-{self.calls[key, self.path]}")
        faults = body["faults"]
        fault = (
            faults[self.calls[key, self.path] - 1]
            if self.calls[key, self.path] <= len(faults)
            else "ok"
        )
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
            return self.answer(200, b"<html>")
        elif isinstance(fault, int):
            return self.answer(fault, "error")
        self.answer(200, fault if isinstance(fault, dict) else {"reward": 1.0})


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


@pytest.mark.parametrize(
    "faults", [["reset"], [503, 429], [502, 504], [408], [500], ["truncated"]], ids=str
)
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
def test_what_stays_broken_is_an_error_with_its_reason(url, faults, reason, calls):
    key = f"fail {faults}"
    with pytest.raises(GymError) as caught:
        asyncio.run(verdict_of(url, key, faults))
    assert caught.value.reason == reason
    assert Faulty.calls[key, "/verify"] == calls


def test_nobody_listens():
    with pytest.raises(
        ServerDownError, match=r"faulty \(http://\S+\) gave no answer .*Cannot connect .* resume"
    ):
        asyncio.run(
            verdict_of(f"http://127.0.0.1:{free_port()}", "nobody", [], outage_budget_s=1.0)
        )


def test_sessions_do_not_share_cookies(url):
    async def many():
        async with Gym({"faulty": url}, concurrency=16) as gym:

            async def one(i):
                async with gym.session("faulty", row(f"own {i}", faults=[])) as session:
                    await session.verify(message_response("7"))

            await asyncio.gather(*[one(i) for i in range(32)])

    asyncio.run(many())
    seen = {
        k: cookie
        for k, path, cookie in Faulty.sessions
        if k.startswith("own") and path == "/verify"
    }
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


# --- tools, agents, kinds of server: what is repeated, and what goes to the model -----------------


class Scripted:
    """A server over real HTTP whose routes answer from a script: {path: [answer, ...]}, the last one for ever.

    An answer is (status, JSON or bytes, perhaps a cookie), or "reset". `log` has the path and the cookie of each call.
    """

    def __init__(self, **routes):
        script, log = {f"/{name}": list(answers) for name, answers in routes.items()}, []
        self.described, scripted = {"paths": {path: {"post": {}} for path in script}}, self

        class Handler(Answers):
            def do_GET(self):
                self.answer(200, scripted.described)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                log.append((self.path, body, self.headers.get("cookie")))
                answers = script[self.path]
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if answer == "reset":
                    return self.connection.shutdown(socket.SHUT_RDWR)
                self.answer(*answer)

        self.log, self.server = log, ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def paths(self):
        return [path for path, _, _ in self.log]


TOOLS = [{"type": "function", "name": name} for name in ("look", "away", "verify")]
ASKING = {"responses_create_params": {"input": "x", "tools": TOOLS}}
SEEDED = {"seed_session": [(200, {})], "verify": [(200, {"reward": 1.0})]}


def talk(url, conversation, row=ASKING):
    """Run `conversation(session)` in a session of its own."""

    async def run():
        async with Gym({"s": url}, timeout_s=1.0) as gym, gym.session("s", row) as session:
            return await conversation(session)

    return asyncio.run(run())


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
def test_what_a_tool_says_goes_to_the_model(answer, text):
    server = Scripted(look=[answer], **SEEDED)
    assert talk(server.url, lambda session: session.call_tool("look", '{"q": 1}')) == text
    assert server.log[-1][:2] == ("/look", {"q": 1})


@pytest.mark.parametrize(
    ("name", "arguments"), [("gone", "{}"), ("verify", "{}"), ("look", '{"q": '), ("../look", "{}")]
)
def test_what_the_policy_got_wrong_reaches_no_server(name, arguments):
    server = Scripted(look=[(200, {})], **SEEDED)
    answer = json.loads(talk(server.url, lambda session: session.call_tool(name, arguments)))
    assert re.match("Unknown tool|Invalid tool call arguments", answer["error"])
    assert server.paths() == ["/seed_session"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("reset", "connect"), ((503, "busy"), "http_503"), ((429, ""), "http_429")],
)
def test_a_tool_that_is_down_ends_the_episode_at_once(answer, reason):
    server = Scripted(look=[answer], **SEEDED)
    with pytest.raises(GymError) as caught:
        talk(server.url, lambda session: session.call_tool("look", "{}"))
    assert (caught.value.reason, caught.value.lost, len(server.paths())) == (
        reason,
        reason != "http_429",
        2,
    )


def test_a_session_that_a_tool_has_changed_is_not_begun_again():
    server = Scripted(
        look=[(200, {})], seed_session=[(200, {})], verify=["reset", (200, {"reward": 0.0})]
    )

    async def conversation(session):
        await session.call_tool("look", "{}")
        return await session.verify(message_response("x"))

    with pytest.raises(
        GymError
    ) as caught:  # a new session would not have the tool's doing, and earn less
        talk(server.url, conversation)
    assert (caught.value.reason, caught.value.lost, len(server.paths())) == ("connect", True, 3)


@pytest.mark.parametrize(
    ("routes", "kind", "executable"),
    [
        (["seed_session", "verify", "look"], "verify", {"look"}),
        (["seed_session", "verify", "{tool_name}"], "verify", {"look", "away"}),
        (["seed_session", "verify"], "verify", set()),
        (["reset", "step", "aggregate_metrics"], "step", set()),
    ],
)
def test_kinds_and_tools_follow_from_the_routes(routes, kind, executable):
    server = Scripted(**{name: [(200, {"observation": "hello"})] for name in routes})

    async def look(session):
        return session.kind, session.executable, session.observation

    assert talk(server.url, look) == (kind, executable, "hello" if kind == "step" else None)


def test_a_step_is_not_repeated_unless_the_server_can_tell():
    end = {"observation": None, "reward": 1, "terminated": True, "truncated": False, "info": {}}
    opening = {"observation": "go", "info": {}}
    server = Scripted(reset=[(200, opening)], step=["reset", (200, end)])
    with pytest.raises(GymError) as caught:
        talk(server.url, lambda session: session.step(message_response("x")))
    assert server.paths() == ["/reset", "/step"] and caught.value.lost

    opening = {
        "observation": "go",
        "info": {"supports_step_idempotency": True, "supports_explicit_close": True},
    }
    server = Scripted(reset=[(200, opening)], step=["reset", (200, end)], close=[(200, {})])
    turn = talk(server.url, lambda session: session.step(message_response("x")))
    assert turn.reward == 1.0 and turn.terminated and not turn.truncated
    assert server.paths() == ["/reset", "/step", "/step", "/close"]
    first, second = (body["_ng_step_request_id"] for path, body, _ in server.log if path == "/step")
    assert first == second


@pytest.mark.parametrize(
    "answer", [{"reward": None}, {"reward": True}, {"reward": 1, "terminated": 1}, [], {}], ids=str
)
def test_a_step_without_a_reward_is_a_failure(answer):
    server = Scripted(reset=[(200, {"observation": "go"})], step=[(200, answer)])
    with pytest.raises(GymError) as caught:
        talk(server.url, lambda session: session.step(message_response("x")))
    assert caught.value.reason == "bad_answer"


def test_a_reset_or_step_that_makes_no_sense_is_a_failure():
    body = {
        "observation": None,
        "reward": 1.0,
        "info": {"tool_outputs": [{"output": "no call_id"}]},
    }
    for routes in (
        {"reset": [(200, [])], "step": [(200, {})]},
        {"reset": [(200, {})], "step": [(200, body)]},
    ):
        with pytest.raises(GymError) as caught:
            talk(Scripted(**routes).url, lambda session: session.step(message_response("x")))
        assert caught.value.reason == "bad_answer"


def test_an_agents_run_is_repeated_only_while_it_says_not_now():
    async def play(url):
        async with Gym({"a": url}) as gym:
            assert await gym.kind("a") == "agent"
            return await gym.run("a", ASKING, 1.0)

    body = {"reward": 0.5, "response": {"output": []}, "extra": 1, **ASKING}
    server = Scripted(run=[(503, ""), (200, body)])
    verdict, response = asyncio.run(play(server.url))
    assert verdict.reward == 0.5 and verdict.details == {"extra": 1} and response == {"output": []}
    for answer, reason in [((500, "boom"), "http_500"), ((200, {"reward": 1.0}), "bad_answer")]:
        server = Scripted(run=[answer])
        with pytest.raises(GymError) as caught:
            asyncio.run(play(server.url))
        assert caught.value.reason == reason and server.paths() == ["/run"]


def verdict_in(
    answer, conversation=lambda session: session.verify(message_response("x")), **routes
):
    return talk(
        Scripted(**{"look": [(200, {})], **SEEDED, "verify": [(200, answer)], **routes}).url,
        conversation,
    )


def reason_of(call, *args, **routes):
    with pytest.raises(GymError) as caught:
        call(*args, **routes)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return caught.value.reason


DEEP = b"[" * 5000 + b"]" * 5000


def test_nesting_of_any_depth_is_no_crash():
    url, calls = Scripted(look=[(200, {})], **SEEDED), ("[" * 5000, "[" * 5000 + "]" * 5000)
    for arguments in calls:
        answer = json.loads(
            talk(url.url, lambda session, a=arguments: session.call_tool("look", a))
        )
        assert answer["error"].startswith("Invalid tool call arguments: ")
    assert set(url.paths()) == {"/seed_session"}

    assert (
        talk(Scripted(look=[(200, DEEP)], **SEEDED).url, lambda s: s.call_tool("look", "{}"))
        == DEEP.decode()
    )
    assert reason_of(verdict_in, DEEP) == "bad_answer"
    assert reason_of(verdict_in, {}, seed_session=[(200, DEEP)]) == "bad_answer"
    for paths in (DEEP, b'{"paths": 1}', b'{"paths": {"/verify": ' + DEEP + b"}}", b"[]"):
        server = Scripted(**SEEDED)
        server.described = paths
        assert reason_of(talk, server.url, None) == "bad_answer"
    cookie = "Gym=" + base64.b64encode(DEEP[:5000]).decode()
    assert verdict_in({"reward": 1.0}, seed_session=[(200, {}, cookie)]).reward == 1.0


def test_what_a_verifier_says_beside_the_reward_is_bounded_and_sound():
    said = {
        "reward": 1.0,
        "extracted": "B",
        "_ng_x": 1,
        "judge": "x" * 10**6,
        "nan": float("nan"),
        "half": "\ud800a",
    }
    deep = b'{"reward": 1.0, "deep": ' + b"[" * 900 + b"]" * 900 + b"}"
    details = verdict_in(said).details
    assert details.pop("_cut").startswith('{"judge": "xxx') and len(json.dumps(details)) < 100
    assert details == {"extracted": "B", "nan": None, "half": "?a"}
    assert (
        str(verdict_in(deep).details["deep"]).count("[") == 63
    )  # of the 64 levels one is the answer's
    assert verdict_in({"reward": 1.0, **{f"key {i}": i for i in range(9000)}}).details.keys() == {
        "_cut"
    }
    parts = verdict_in(
        {"reward": 1, "reward_components": {f"{'x' * 999}": 1, **{str(i): i for i in range(999)}}}
    ).components
    assert (
        len(parts) == 100
        and parts.keys() > {"x" * 100, "0"}
        and all(type(v) is float for v in parts.values())
    )
    for answer in (
        {"reward": 1, "reward_components": [1]},
        {"reward": 1, "reward_components": {"a": "1"}},
        7,
    ):
        assert reason_of(verdict_in, answer) == "bad_answer"


def test_half_a_surrogate_pair_ends_nothing():
    server = Scripted(look=[(200, b'"\xed\xa0\x80"')], **SEEDED)
    half = '{"q": "\ud83d"}'

    async def conversation(session):
        return await session.call_tool("look", half), await session.verify(
            message_response("\udc00")
        )

    text, verdict = talk(server.url, conversation, {**ASKING, "question": "\ud800 or 🙂"})
    assert text.encode() and verdict.reward == 1.0
    assert server.log[0][1]["question"] == "? or 🙂" and server.log[1][1] == {"q": "?"}
    assert server.log[2][1]["response"]["output"][0]["content"][0]["text"] == "?"
    assert (
        function_call("c", "f\ud800", half)["name"] == "f?"
    )  # which the chat template shows with the tool's answer

    outputs = [{"call_id": "c\ud800", "output": "o\ud800"}]
    step = {"observation": "\ud800", "reward": 1, "info": {"tool_outputs": outputs}}
    server = Scripted(reset=[(200, {"observation": "go\ud800"})], step=[(200, step)])

    async def play(session):
        return session.observation, await session.step(message_response("x"))

    first, turn = talk(server.url, play)
    assert (first, turn.observation, turn.tool_outputs) == (
        "go?",
        "?",
        [{"call_id": "c?", "output": "o?"}],
    )


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
def test_an_environment_that_says_other_than_text_is_a_failure(changes):
    def step(session):
        return session.step(message_response("x"))

    good = {
        "observation": "go",
        "reward": 1.0,
        "terminated": False,
        "truncated": None,
        "info": None,
    }
    assert talk(Scripted(reset=[(200, good)], step=[(200, good)]).url, step).observation == "go"
    server = Scripted(reset=[(200, good)], step=[(200, {**good, **changes})])
    assert reason_of(talk, server.url, step) == "bad_answer"
    if changes.keys() & {"info", "observation"}:
        server = Scripted(reset=[(200, {**good, **changes})], step=[(200, good)])
        assert reason_of(talk, server.url, step) == "bad_answer"


SAID = {
    **message_response("hi")["output"][0],
    "prompt_token_ids": [1, 2],
    "generation_token_ids": [3],
}
SAID["generation_log_probs"] = [-0.5]
CALL = {
    "type": "function_call",
    "call_id": "c",
    "name": "f",
    "arguments": "{}",
    "prompt_token_ids": None,
}
RETURNED = {"type": "function_call_output", "call_id": "c", "output": "o"}


@pytest.mark.parametrize(
    "output",
    [
        None,
        {},
        ["x"],
        [{}],
        [{"type": 1}],
        [{**SAID, "content": None}],
        [{**SAID, "content": "hi"}],
        [{**SAID, "content": ["hi"]}],
        [{**SAID, "content": [{"type": "refusal", "refusal": "no"}]}],
        [{**SAID, "content": [{"text": 1}]}],
        [{**CALL, "name": None}],
        [{**CALL, "arguments": {}}],
        [{**RETURNED, "output": 7}],
        [{**SAID, "prompt_token_ids": "12"}],
        [{**SAID, "prompt_token_ids": [1.0]}],
        [{**SAID, "prompt_token_ids": ["1"]}],
        [{**SAID, "prompt_token_ids": [True]}],
        [{**SAID, "prompt_token_ids": [-1]}],
        [{**SAID, "generation_token_ids": [10**400]}],
        [{**SAID, "generation_token_ids": [2**31]}],
        [{**SAID, "generation_token_ids": [[3]]}],
        [{**SAID, "generation_log_probs": [None]}],
        [{**SAID, "generation_log_probs": [float("nan")]}],
        [{**SAID, "generation_log_probs": [float("inf")]}],
        [{**SAID, "generation_log_probs": [-(10**400)]}],
        [{**SAID, "generation_log_probs": -0.5}],
    ],
    ids=lambda output: str(output)[-80:],
)
def test_an_agents_items_are_checked(output):
    async def play(url, **limits):
        async with Gym({"a": url}) as gym:
            return await gym.run("a", ASKING, 1.0, **limits)

    def run(output, **limits):
        return asyncio.run(
            play(
                Scripted(run=[(200, {"reward": 1.0, "response": {"output": output}})]).url, **limits
            )
        )

    good = [
        {"type": "reasoning", "summary": []},
        SAID,
        CALL,
        RETURNED,
        {"type": "message", "role": "user", "content": "x"},
    ]
    assert run(good)[1]["output"] == good and run(good, vocabulary=4) and run([])
    assert reason_of(run, good, vocabulary=3) == "bad_answer"
    assert reason_of(run, output) == "bad_answer"


# --- what is not followed, not read, not repeated at once -----------------------------------------


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_a_redirect_is_followed_nowhere(status):
    """The other host would be paid attention, sent the row, and heard as a tool."""
    other = Scripted(
        verify=[(200, {"reward": 1.0})], look=[(200, {"found": 1})], run=[(200, PLAYED)]
    )
    location = f"Location: http://user:secret@127.0.0.1:{other.server.server_port}"

    def headers(path):
        return f"stolen=1\r\n{location}{path}\r\nSet-Cookie: more=1"  # written after "Set-Cookie: "

    def script(path):
        return [(status, "", headers(path))]

    calls = {
        "/verify": lambda session: session.verify(message_response("x")),
        "/look": lambda session: session.call_tool("look", "{}"),
    }
    for path, conversation in calls.items():
        server = Scripted(
            **{"look": script("/look"), "seed_session": [(200, {})], "verify": script("/verify")}
        )
        kept = {}

        async def talking(session, kept=kept, conversation=conversation):
            with pytest.raises(GymError) as caught:
                await conversation(session)
            kept.update(session._http.cookies)
            return caught.value

        error = talk(server.url, talking)
        assert (error.reason, error.retry) == (f"http_{status}", False), path
        assert (
            "host 127.0.0.1" in str(error)
            and "set the final URL" in str(error)
            and "secret" not in str(error)
        )
        assert not kept and server.paths() == ["/seed_session", path]

    async def run(url):
        async with Gym({"a": url}) as gym:
            return await gym.run("a", ASKING, 1.0)

    server = Scripted(run=script("/run"))
    assert reason_of(
        lambda: asyncio.run(run(server.url))
    ) == f"http_{status}" and server.paths() == ["/run"]
    assert not other.log


@pytest.mark.parametrize("location", ["", "x", "http://[", "//", "\x1b[31m", "x" * 5000])
def test_a_redirect_to_nowhere_is_an_error_of_one_line(location):
    answer = (307, "", f"a=b\r\nLocation: {location}")
    assert reason_of(verdict_in, 0, seed_session=[answer]) == "http_307"


PLAYED = {"reward": 0.5, "response": {"output": []}}


async def longest_pause(work) -> float:
    """The longest time, in seconds, for which nothing else could run while `work` did."""
    pauses, ended = [], False

    async def watch():
        while not ended:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - began)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    with contextlib.suppress(GymError):
        await work
    ended = True
    await watcher
    return max(pauses)


LISTS = b'{"reward": 1.0, "x": [' + b"[]," * 2_700_000 + b"[]]}"
MOST_LISTS = b'{"reward": 1.0, "x": [' + b"[]," * 90_000 + b"[]]}"
NUMBERS = b'{"reward": 1.0, "x": [' + b"1.5," * 1_000_000 + b"1]}"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(LISTS, "too_large"), (MOST_LISTS, ""), (NUMBERS, "")],
    ids=["lists", "most lists", "numbers"],
)
def test_no_answer_stops_the_event_loop(answer, reason):
    """Measured: 8 MiB of empty lists took 3.8 s and 377 MiB, in which no other episode went on."""
    server, found = Scripted(**{**SEEDED, "verify": [(200, answer)]}), []

    async def one(gym):
        async with gym.session("s", ASKING) as session:
            found.append((await session.verify(message_response("x"))).reward)

    async def run():
        async with Gym({"s": server.url}) as gym:
            with uncollected():  # as a rollout is: the collector alone may take longer
                return await longest_pause(one(gym))

    pauses = []
    while (
        len(pauses) < 10 and min(pauses, default=1.0) >= 0.15
    ):  # until other processes leave a core free
        found.clear()
        pauses.append(asyncio.run(run()))
    print("longest pauses", [f"{pause:.3f} s" for pause in pauses])
    assert found == ([] if reason else [1.0]) and min(pauses) < 0.15
    if reason:
        assert reason_of(verdict_in, answer) == reason


def test_an_answer_may_be_as_long_as_its_request_is():
    """Verifiers echo the row, images and all; an agent's answer holds the ids of every turn."""
    text = "x" * (MAX_ANSWER_BYTES + 2**20)
    assert talk(
        Scripted(**SEEDED).url, lambda s: s.verify(message_response("x")), {**ASKING, "image": text}
    ).reward
    assert verdict_in({"reward": 1.0, "said": text[: 2**22]}).reward == 1.0
    assert reason_of(verdict_in, {"reward": 1.0, "said": text}) == "too_large"
    echo = Scripted(**{**SEEDED, "verify": [(200, {"reward": 1.0, "image": text})]})
    assert (
        talk(echo.url, lambda s: s.verify(message_response("x")), {**ASKING, "image": text}).reward
        == 1.0
    )

    async def run(url):
        async with Gym({"a": url}) as gym:
            return (await gym.run("a", ASKING, 30.0))[0].reward

    assert asyncio.run(run(Scripted(run=[(200, {**PLAYED, "said": text})]).url)) == 0.5


def test_no_error_steers_a_terminal():
    steering = "\x1b]0;title\x07\x1b[31mred\x9b2J\r\u202eright"
    with pytest.raises(GymError) as caught:
        verdict_in(0, verify=[(422, steering.encode())])
    assert "red" in str(caught.value) and not {*str(caught.value)} & {*"\x1b\x07\x9b\r\u202e"}
    assert str(GymError("x", "one\n\ttwo é中🙂\x00")) == "one\n\ttwo é中🙂?"


def run_of(url, timeout_s=5.0, after=None, **settings):
    """/run of an agent; `after` = (seconds, what to do to the Gym then)."""

    async def run():
        async with Gym({"a": url}, **settings) as gym:
            await gym.kind("a")
            if after:
                asyncio.get_running_loop().call_later(after[0], after[1], gym)
            return await gym.run("a", ASKING, timeout_s)

    return asyncio.run(run())


def slow_agent(seconds):
    server = Scripted(run=[(200, PLAYED)])
    answer = server.server.RequestHandlerClass.do_POST

    def slowly(handler):
        time.sleep(seconds)
        answer(handler)

    server.server.RequestHandlerClass.do_POST = slowly
    return server


def test_an_agents_run_has_its_own_deadline():
    url = slow_agent(1.0).url
    began = time.monotonic()
    with pytest.raises(GymError) as caught:
        run_of(url, 0.3)
    assert caught.value.reason == "timeout" and time.monotonic() - began < 0.9

    async def patient():
        async with Gym({"a": url}, timeout_s=0.5) as gym:
            return (await gym.run("a", ASKING, 5.0))[0]

    verdict = asyncio.run(patient())  # longer than any other call may take
    assert verdict.reward == 0.5 and verdict.latency_s > 0.9


def test_an_agents_run_does_not_count_if_its_server_restarted_meanwhile():
    url = slow_agent(0.6).url
    with pytest.raises(GymError) as caught:
        run_of(url, after=(0.2, lambda gym: gym.restarted("a")), attempts=1)
    assert (caught.value.reason, caught.value.lost) == ("session_lost", True)
    assert run_of(url, after=(0.2, lambda gym: gym.restarted("another")))[0].reward == 0.5


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between tries, in seconds, which are not waited for: the upper bounds of what is drawn."""
    drawn, slept = [], []
    monkeypatch.setattr(random, "uniform", lambda low, high: drawn.append((low, high)) or high)
    wait = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: slept.append(seconds) or wait(0))
    return drawn, slept


def test_the_pauses_between_tries_grow_to_five_seconds(pauses):
    drawn, slept = pauses
    server = Scripted(**{**SEEDED, "verify": [(503, "busy")] * 7 + [(200, {"reward": 1.0})]})

    async def run():
        async with Gym({"s": server.url}, attempts=9) as gym, gym.session("s", ASKING) as session:
            return (await session.verify(message_response("x"))).reward

    assert asyncio.run(run()) == 1.0
    wanted = [0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert drawn == [(0.0, pause) for pause in wanted] and [s for s in slept if s] == wanted


@pytest.mark.parametrize(
    "name", [*sorted(RESERVED), "../look", "a/b", "%76erify", "verify\n", ".", "..", ""]
)
def test_no_route_of_the_server_is_a_tool_though_a_row_lists_it(name):
    tools = [{"type": "function", "name": each} for each in (name, "look")]
    row = {"responses_create_params": {"input": "x", "tools": tools}}
    server = Scripted(**{**SEEDED, "{tool_name}": [(200, {})], "look": [(200, {"found": 1})]})

    async def conversation(session):
        return (
            session.executable,
            await session.call_tool(name, "{}"),
            await session.call_tool("look", "{}"),
        )

    executable, refused, found = talk(server.url, conversation, row)
    assert (
        executable == {"look"} and "Unknown tool" in refused and json.loads(found) == {"found": 1}
    )
    assert server.paths() == ["/seed_session", "/look"]


@pytest.mark.parametrize(
    "status", [201, 202, 204, 206, 401, 403, 409, 413, 418, 451, 501, 505, 511, 599]
)
def test_no_status_but_200_holds_a_verdict(status):
    """None is repeated: another try would be answered alike."""
    server = Scripted(**{**SEEDED, "verify": [(status, {"reward": 1.0})]})
    with pytest.raises(GymError) as caught:
        talk(server.url, lambda session: session.verify(message_response("x")))
    assert (caught.value.reason, caught.value.lost) == (f"http_{status}", False)
    assert server.paths() == ["/seed_session", "/verify"]


# --- real servers of nemo-gym --------------------------------------------------------------------

HEAD = """
import os, sys, time
os.environ["NEMO_GYM_CONFIG_DICT"], os.environ["NEMO_GYM_CONFIG_PATH"] = sys.argv[1], "head_server"
from nemo_gym.server_utils import HeadServer
HeadServer.run_webserver()
time.sleep(600)
"""


def test_a_real_head_server_knows_who_serves_whom(tmp_path):
    port, served = free_port(), {"reasoning_gym": {"start": {"python": str(GYM_PYTHON)}}}
    with running_servers(served, tmp_path) as urls:
        serving = int(urls["reasoning_gym"].rpartition(":")[2])
        config = {
            "head_server": {"host": "127.0.0.1", "port": port},
            "puzzles": {
                "resources_servers": {"reasoning_gym": {"host": "0.0.0.0", "port": serving}}
            },
            "some_agent": {
                "responses_api_agents": {"simple_agent": {"resources_server": {"name": "puzzles"}}}
            },
            "not_started": {"resources_servers": {"mcqa": {"entrypoint": "app.py"}}},
            "policy_model": {
                "responses_api_models": {"vllm_model": {"base_url": "${policy_base_url}"}}
            },
            "policy_base_url": "http://127.0.0.1:1/v1",
        }
        with (tmp_path / "head.log").open("wb") as log:
            arguments = [str(GYM_PYTHON), "-c", HEAD, json.dumps(config)]
            head = subprocess.Popen(arguments, stdout=log, stderr=log, cwd=tmp_path)
        try:
            deadline, url = time.monotonic() + 60, f"http://127.0.0.1:{port}"
            while time.monotonic() < deadline:
                with contextlib.suppress(GymStartError):
                    servers, agents = discover(url)
                    break
                time.sleep(0.5)
            assert agents == {"some_agent": "puzzles"} and servers == {
                "puzzles": urls["reasoning_gym"]
            }

            async def ask():
                async with Gym(servers) as gym, gym.session("puzzles", row()) as session:
                    return (await session.verify(message_response("7"))).reward

            assert asyncio.run(ask()) == 1.0
        finally:
            head.kill()
            head.wait()


def test_real_servers_start_verify_come_back_and_stop(tmp_path, monkeypatch):
    start, started, processes = {"python": str(GYM_PYTHON)}, gym_servers.start_server, []
    monkeypatch.setattr(
        gym_servers, "start_server", lambda *a: processes.append(started(*a)) or processes[-1]
    )
    servers = {
        "reasoning_gym": {"start": start},
        "math": {"start": {**start, "server": "math_with_judge"}},
    }
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
                async with gym.session(
                    "reasoning_gym", {"responses_create_params": {"input": "x"}}
                ) as session:
                    await session.verify(message_response("7"))
            assert caught.value.reason == "http_422"  # the row lacks what this verifier needs
            return rewards

    with running_servers(servers, tmp_path) as urls:
        for _ in range(2):
            assert asyncio.run(ask(urls)) == [1.0, pytest.approx(1 / 7), 0.0, 0.0, 1.0, 0.0]
            processes[0].kill()
    assert len(processes) == 3 and all(process.poll() is not None for process in processes)
    for name, url in urls.items():
        with pytest.raises(GymStartError, match="does not answer"):
            wait_ready(name, url)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """({"a": a server that exits at once while the file `broken` is there}, `broken`, its processes, slow to come)"""
    port, broken, processes, start = free_port(), tmp_path / "broken", [], gym_servers.start_server
    serve = f"{sys.executable} -m http.server --bind 127.0.0.1 --directory {tmp_path} {port}"
    (tmp_path / "openapi.json").write_text('{"paths": {}}')
    (tmp_path / "python").write_text(
        f"#!/bin/sh\necho begins\ntest -e {broken} && exit 3\n{serve} & wait\n"
    )
    (tmp_path / "python").chmod(0o755)

    def slowly(*args):
        (tmp_path / f"start {len(processes)}").touch()
        time.sleep(len(processes) and 1.0)
        processes.append(start(*args))
        return processes[-1]

    monkeypatch.setattr(gym_servers, "start_server", slowly)
    return {"a": {"start": {"python": str(tmp_path / "python"), "port": port}}}, broken, processes


def test_a_server_that_dies_is_started_again_but_not_in_a_hurry(fake, tmp_path, caplog):
    (servers, broken, processes), told = fake, queue.Queue()
    with running_servers(
        servers, tmp_path, on_restart=lambda name: told.put(time.monotonic()) or name.no
    ) as urls:
        broken.touch()
        processes[0].kill()
        first = told.get(timeout=60)
        processes[1].wait(60)
        broken.unlink()
        second = told.get(timeout=60)  # although on_restart failed the first time
        wait_ready("a", urls["a"], processes[2])
    assert second - first > 4.5
    assert (tmp_path / "gym_a.log").read_text().count("begins") == 3
    for status in (-9, 3):
        assert (
            f"a ended with status {status}, and is started again; log {tmp_path}/gym_a.log"
            in caplog.text
        )


def test_nothing_is_left_of_a_server_that_is_being_started_again(fake, tmp_path):
    servers, _, processes = fake
    with running_servers(servers, tmp_path):
        processes[0].kill()  # but not what it forked
        while not (tmp_path / "start 1").exists():
            time.sleep(0.05)
    time.sleep(1.5)
    assert len(processes) == 2 and processes[1].poll() is not None
    assert not port_in_use("127.0.0.1", servers["a"]["start"]["port"])


def test_a_server_that_never_was_ready_is_not_started_again(fake, tmp_path):
    servers, broken, processes = fake
    broken.touch()
    with pytest.raises(GymStartError, match="did not start: it exited with status 3"):
        running_servers(servers, tmp_path, meanwhile=lambda: time.sleep(3.0)).__enter__()
    assert len(processes) == 1


def test_what_cannot_start_says_why(tmp_path, url):
    with pytest.raises(GymStartError, match=r"no interpreter at nowhere/python; `make gym`"):
        check_server("x", {"start": {"python": "nowhere/python"}})
    with pytest.raises(GymStartError, match=r"port \d+ on 127.0.0.1 is in use"):
        check_server(
            "x", {"start": {"python": str(GYM_PYTHON), "port": int(url.rsplit(":", 1)[1])}}
        )
    spec = {"start": {"python": str(GYM_PYTHON), "server": "nosuch"}}
    with (
        pytest.raises(GymStartError, match="no resources server 'nosuch'"),
        running_servers({"x": spec}, tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (
            {"path": "nowhere"},
            r"start\.path=nowhere: no such folder here .*; it takes a folder like temp",
        ),
        (
            {"path": "templates"},
            r"start\.path=templates: .*templates has no app\.py; it takes a folder like",
        ),
        ({"path": 7}, r"start\.path=7: no such folder"),
        (
            {"path": "templates/verifier", "server": "mcqa"},
            r"start has path, .*, and server, .*; leave server out",
        ),
        ({"path": "templates/verifier", "install": True}, r"start has path, .*; leave install out"),
    ],
)
def test_a_folder_that_is_no_server_is_told_in_one_line(start, told):
    with pytest.raises(GymStartError, match=told) as caught:
        check_server("x", {"start": {"python": str(GYM_PYTHON), **start}})
    assert "\n" not in str(caught.value)


def test_a_folder_of_ones_own_has_its_own_settings(tmp_path, monkeypatch):
    """Its YAML, as Gym's servers have theirs; a judge in it is asked for, though a namesake of nemo-gym's has none."""
    (tmp_path / "mcqa" / "configs").mkdir(parents=True)
    (tmp_path / "mcqa" / "app.py").touch()
    judge = "{type: responses_api_models, name: judge_model}"
    text = f"any: {{resources_servers: {{mcqa: {{depth: 3, judge_model_server: {judge}}}}}}}"
    (tmp_path / "mcqa" / "configs" / "any.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    start = {"python": str(GYM_PYTHON), "path": "mcqa"}
    with pytest.raises(
        GymStartError, match=r"/mcqa asks the model judge_model .*; set gym\.judges\.judge_model"
    ):
        gym_servers.plan("x", start, None)
    with pytest.raises(
        GymStartError, match=r"/mcqa pays for .*; gym\.unchecked_judges=\[x\] takes that as it is"
    ):
        gym_servers.plan("x", start, None, ["judge_model"])
    (block,) = gym_servers.plan("x", start, None, ["judge_model"], ["x"])
    assert block["impl"] == str(tmp_path / "mcqa")
    assert gym_servers.settings(block, tmp_path / "no package")["depth"] == 3


def test_a_url_nobody_listens_on_says_how_to_start_it():
    begin, port = time.monotonic(), free_port()
    with pytest.raises(
        GymStartError, match=f"`python -m kit.gym.servers reasoning_gym --port {port}`"
    ):
        check_server("reasoning_gym", {"url": f"http://127.0.0.1:{port}"})
    assert time.monotonic() - begin < 10


def test_the_ten_lines_of_the_header_work_with_this_file_alone(tmp_path):
    import gym_client

    code = textwrap.dedent(
        gym_client.__doc__.split("only aiohttp:")[1].split("Three kinds of server")[0]
    )
    shutil.copy(gym_client.__file__, tmp_path)
    examples = GYM_PYTHON.parent.parent.glob(
        "lib/*/site-packages/resources_servers/mcqa/data/example.jsonl"
    )
    shutil.copy(next(examples), tmp_path / "rows.jsonl")
    with running_servers({"mcqa": {"start": {"python": str(GYM_PYTHON)}}}, tmp_path) as urls:
        program = code.replace("http://127.0.0.1:8001", urls["mcqa"])
        assert program != code
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.stdout, done.stderr) == ("1.0\n", ""), program
