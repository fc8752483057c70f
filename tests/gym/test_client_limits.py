"""The limits of the client of Gym: redirects, sizes, nesting, surrogates and blocking time."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest

from gym_client import (
    MAX_ANSWER_BYTES,
    MAX_RESULT_BYTES,
    Gym,
    GymError,
    function_call,
    message_response,
)
from tests.helpers.http import (
    ROW,
    VERIFY_ROUTES,
    ScriptedServer,
    catch_reason,
    measure_longest_pause,
    run_session,
    verify_result,
    verify_x,
)

RUN_ANSWER = {"reward": 0.5, "response": {"output": []}}
DEEP = b"[" * 5000 + b"]" * 5000


def run_agent(url):
    """Return the result of /run."""

    async def run():
        async with Gym({"a": url}) as gym:
            return await gym.run("a", ROW, 60.0)

    return asyncio.run(run())


# --- redirects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status):
    """Otherwise another host would get the row, and could send a tool output or a reward."""
    other = ScriptedServer(
        verify=[(200, {"reward": 1.0})], look=[(200, {"found": 1})], run=[(200, RUN_ANSWER)]
    )
    location = f"Location: http://user:secret@127.0.0.1:{other.server.server_port}"

    def script(path):
        # The server writes this text after "Set-Cookie: ", so it can contain more headers.
        return [(status, "", f"stolen=1\r\n{location}{path}\r\nSet-Cookie: more=1")]

    calls = {
        "/verify": verify_x,
        "/look": lambda session: session.call_tool("look", "{}"),
    }
    for path, call in calls.items():
        server = ScriptedServer(
            look=script("/look"), seed_session=[(200, {})], verify=script("/verify")
        )
        cookies = {}

        async def conversation(session, call=call, cookies=cookies):
            with pytest.raises(GymError) as caught:
                await call(session)
            cookies.update(session.connection.cookies)
            return caught.value

        error = run_session(server.url, conversation)
        assert (error.reason, error.retryable) == (f"http_{status}", False), path
        assert "host 127.0.0.1" in str(error)
        assert "set the final URL" in str(error)
        assert "secret" not in str(error)
        assert not cookies
        assert server.paths() == ["/seed_session", path]

    server = ScriptedServer(run=script("/run"))
    assert catch_reason(run_agent, server.url) == f"http_{status}"
    assert server.paths() == ["/run"]
    assert not other.log


@pytest.mark.parametrize("location", ["", "x", "http://[", "//", "\x1b[31m", "x" * 5000])
def test_a_redirect_to_an_invalid_location_is_a_one_line_error(location):
    answer = (307, "", f"a=b\r\nLocation: {location}")
    assert catch_reason(verify_result, 0, seed_session=[answer]) == "http_307"


# --- sizes ---------------------------------------------------------------------------------------

TEXT = b'{"reward": 1.0, "x": "' + b"answer " * 140_000 + b'"}'
LISTS = b'{"reward": 1.0, "x": [' + b"[]," * 90_000 + b"[]]}"
NUMBERS = b'{"reward": 1.0, "x": [' + b"1.5," * 250_000 + b"1]}"


@pytest.mark.parametrize("answer", [TEXT, LISTS, NUMBERS], ids=["text", "lists", "numbers"])
def test_no_answer_blocks_the_event_loop(answer):
    server = ScriptedServer(**{**VERIFY_ROUTES, "verify": [(200, answer)]})
    rewards = []

    async def run():
        rewards.clear()  # of an earlier measurement
        async with Gym({"s": server.url}) as gym, gym.session("s", ROW) as session:
            rewards.append((await verify_x(session)).reward)

    assert measure_longest_pause(run, 0.1) < 0.1
    assert rewards == [1.0]


def test_an_answer_may_be_as_long_as_its_request():
    """Verifiers echo the row with its images. An agent's answer holds the ids of every turn."""
    text = "x" * (2 * MAX_RESULT_BYTES)
    row = {**ROW, "image": text}
    assert run_session(ScriptedServer(**VERIFY_ROUTES).url, verify_x, row).reward
    assert verify_result({"reward": 1.0, "said": text[: MAX_RESULT_BYTES // 2]}).reward == 1.0
    assert catch_reason(verify_result, {"reward": 1.0, "said": text}) == "too_large"
    echo = ScriptedServer(**{**VERIFY_ROUTES, "verify": [(200, {"reward": 1.0, "image": text})]})
    assert run_session(echo.url, verify_x, row).reward == 1.0
    agent = ScriptedServer(run=[(200, {**RUN_ANSWER, "said": text})])
    assert run_agent(agent.url).result.reward == 0.5


@pytest.mark.parametrize("declared", [False, True])
def test_an_endless_answer_is_not_read_to_its_end(declared):
    sent = 0

    async def send_endlessly(_, writer):
        nonlocal sent
        length = b"Content-Length: 999999999999\r\n" if declared else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        while sent < 2**28:  # far over the limit
            writer.write(b" " * 2**16)
            await writer.drain()
            sent += 2**16

    async def run():
        server = await asyncio.start_server(send_endlessly, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server, Gym({"s": url}) as gym:
            await gym.routes("s")

    assert catch_reason(asyncio.run, run()) == "too_large"
    assert sent < MAX_ANSWER_BYTES + 16 * 2**20  # the buffers of the sockets hold more


def test_details_and_components_of_a_result_are_bounded():
    answer = {"reward": 1.0, "extracted": "B", "_ng_x": 1, "judge": "x" * 10**6}
    details = verify_result(answer).details
    assert details.pop("_cut").startswith('{"judge": "xxx')
    assert len(json.dumps(details)) < 100
    assert details == {"extracted": "B"}
    deep = b'{"reward": 1.0, "deep": ' + b"[" * 900 + b"]" * 900 + b"}"
    # The answer itself is one of the 64 levels.
    assert str(verify_result(deep).details["deep"]).count("[") == 63
    many = {"reward": 1.0, **{f"key {i}": i for i in range(9000)}}
    assert verify_result(many).details.keys() == {"_cut"}

    parts = {f"{'x' * 999}": 1, **{str(i): i % 10 for i in range(999)}}
    components = verify_result({"reward": 1, "reward_components": parts}).components
    assert len(components) == 100
    assert components.keys() > {"x" * 100, "0"}
    assert all(type(value) is float for value in components.values())


# --- text and nesting ----------------------------------------------------------------------------


def test_deep_nesting_does_not_crash_the_client():
    server = ScriptedServer(look=[(200, DEEP)], **VERIFY_ROUTES)
    text = run_session(server.url, lambda session: session.call_tool("look", "{}"))
    assert text == DEEP.decode()
    assert catch_reason(verify_result, DEEP) == "bad_answer"
    assert catch_reason(verify_result, {}, seed_session=[(200, DEEP)]) == "bad_answer"
    for openapi in (DEEP, b'{"paths": 1}', b'{"paths": {"/verify": ' + DEEP + b"}}", b"[]"):
        server = ScriptedServer(**VERIFY_ROUTES)
        server.openapi = openapi
        assert catch_reason(run_session, server.url, None) == "bad_answer"
    cookie = "Gym=" + base64.b64encode(DEEP[:5000]).decode()
    assert verify_result({"reward": 1.0}, seed_session=[(200, {}, cookie)]).reward == 1.0


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
    # The chat template shows the name with the tool's output.
    assert function_call("c", "f\ud800", half)["name"] == "f?"

    assert catch_reason(verify_result, {"reward": 1.0, "extracted": "\ud800"}) == "bad_answer"
    for raw in (b'{"observation": "go\\ud800"}', b'{"observation": "go\xed\xa0\x80"}'):
        server = ScriptedServer(reset=[(200, raw)], step=[])
        assert catch_reason(run_session, server.url, None) == "bad_answer"


def test_errors_have_no_control_characters():
    text = "\x1b]0;title\x07\x1b[31mred\x9b2J\r\u202eright"
    with pytest.raises(GymError) as caught:
        verify_result(0, verify=[(422, text.encode())])
    assert "red" in str(caught.value)
    assert not {*str(caught.value)} & {*"\x1b\x07\x9b\r\u202e"}
    assert str(GymError("x", "one\n\ttwo é中🙂\x00")) == "one\n\ttwo é中🙂?"
