"""Whatever a server, a row, a policy or a verifier says: an error of its own kind or a result that can be written."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import re
import tempfile
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import env
import gym_client
from gym_client import Gym, GymError, Turn, Verdict, message_response, parse_verdict
from kit.data import episodes
from kit.data.episodes import Episode
from kit.data.verl_rows import parse as parse_row
from kit.extras import convert

set_hypothesis_home_dir(f"{tempfile.gettempdir()}/hypothesis")  # not into the repository
often = settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
seldom = settings(often, max_examples=80)

# --- JSON that is nearly what is asked for -------------------------------------------------------
texts = st.text(st.sampled_from('aé🙂\ud800\x00\n"\\{[/?%._-'), max_size=6) | st.text(max_size=6)
numbers = (
    st.integers(-3, 3) | st.floats() | st.sampled_from([10**400, -(10**400), 2**31, 1e308, True])
)
KEYS = """reward reward_components mask_sample failure_kind failure_reason _ng_failure_class _episode info tool_outputs
call_id output observation terminated truncated supports_step_idempotency supports_explicit_close response type role
content text name arguments prompt_token_ids generation_token_ids generation_log_probs paths responses_create_params
input instructions metadata tools function parameters summary agent_ref question audio_path""".split()  # noqa: SIM905
KINDS = [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "function",
    "input_text",
    "output_text",
]
ROLES = ["user", "assistant", "system"]


def nested(depth: int):
    """A list in a list in a list, `depth` times, without a call for each."""
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


plain = st.none() | st.booleans() | numbers | texts | st.sampled_from(KINDS + ROLES)
json_values = st.recursive(
    plain | st.builds(nested, st.sampled_from([70, 700])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=6)
    ),
    max_leaves=8,
)


def nearly(**shape):
    """An object of this shape, of which now and then a value is another, or missing."""

    def bend(good, dice, key, other):
        return (
            good if dice else {name: value for name, value in (good | other).items() if name != key}
        )

    others = st.dictionaries(st.sampled_from(sorted(shape)), json_values, max_size=1)
    return st.builds(
        bend, st.fixed_dictionaries(shape), st.integers(0, 5), st.sampled_from([*shape, ""]), others
    )


finite = st.floats(-9, 9) | st.integers(-3, 3)
worth = st.sampled_from([0.0, 1, 0.5]) | numbers
a_part = nearly(type=st.sampled_from(["output_text", "input_text"]), text=texts)
parts = st.lists(a_part, max_size=2)
ids = st.lists(st.integers(0, 8), max_size=3)
sampled = {
    "prompt_token_ids": ids,
    "generation_token_ids": ids,
    "generation_log_probs": st.lists(finite, max_size=3),
}
arguments = texts | st.sampled_from(['{"x": 1}', '{"x": "\\ud800"}', "[" * 5000])
items = st.lists(
    nearly(type=st.just("message"), role=st.just("assistant"), content=parts, **sampled)
    | nearly(type=st.just("message"), role=st.sampled_from(ROLES), content=parts | texts)
    | nearly(type=st.just("reasoning"), summary=parts)
    | nearly(type=st.just("function_call"), call_id=texts, name=texts, arguments=arguments)
    | nearly(type=st.just("function_call_output"), call_id=texts, output=texts),
    max_size=3,
)
verdicts = nearly(
    reward=worth,
    reward_components=st.none() | st.dictionaries(texts, worth, max_size=2),
    response=nearly(output=items),
    judge=st.sampled_from(["x", "x" * 70_000]),
    mask_sample=st.just(False),
)
worlds = nearly(
    reward=worth,
    observation=st.none() | texts,
    terminated=st.booleans(),
    truncated=st.booleans(),
    info=nearly(
        tool_outputs=st.lists(nearly(call_id=texts, output=texts), max_size=2),
        supports_step_idempotency=st.booleans(),
        supports_explicit_close=st.booleans(),
    ),
)
answers = verdicts | worlds
a_tool = nearly(type=st.just("function"), name=texts, parameters=json_values, function=st.none())
rows = nearly(
    responses_create_params=nearly(
        input=items | texts,
        instructions=texts,
        tools=st.lists(a_tool, max_size=2),
        metadata=st.dictionaries(st.sampled_from(KEYS), texts, max_size=2),
    ),
    agent_ref=nearly(name=texts) | texts,
    question=json_values,
)


def as_bytes(value) -> bytes:
    """JSON as a server may send it: with NaN, halves of surrogate pairs, as escapes or as bytes, and in any depth."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


bodies = (
    answers.map(as_bytes)
    | json_values.map(as_bytes)
    | st.binary(max_size=20)
    | st.just(b"[" * 5000)
)


def is_sound(value) -> bool:
    """Whether every writer and tokenizer takes it."""
    return bool(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())


# --- what a server says --------------------------------------------------------------------------
@often
@given(verdicts | json_values, st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3))
def test_a_verdict_is_finite_and_bounded_or_an_error(body, row):
    try:
        verdict = parse_verdict(body, row=row)
    except GymError as error:
        assert (
            error.reason in ("bad_answer", "masked")
            and is_sound(str(error))
            and len(str(error)) < 600
        )
        return
    assert math.isfinite(verdict.reward) and all(
        math.isfinite(part) for part in verdict.components.values()
    )
    assert is_sound(verdict.components) and is_sound(verdict.details)
    assert len(json.dumps(verdict.details)) < 70_000 and not verdict.details.keys() & row.keys()


ROW = {
    "responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "look"}]},
    "half": "\ud800",
}
ROUTES = {
    "verify": ["/verify", "/look"],
    "step": ["/reset", "/step"],
    "agent": ["/run", "/aggregate_metrics"],
}


def converse(kind: str, said: list[tuple[int, bytes]], arguments: str = "{}") -> list:
    """All that a client makes of a server of this kind that says this, its last word for ever."""
    said = [*said]

    async def ask(self, method, path, *_):
        status, body = said.pop(0) if len(said) > 1 else said[0]
        return status, body

    async def run():
        got = []
        async with Gym({"s": "http://s"}, attempts=2) as gym:
            gym._routes["s"] = asyncio.get_running_loop().create_future()
            gym._routes["s"].set_result(frozenset(ROUTES[kind]))
            try:
                if kind == "agent":
                    got += await gym.run("s", ROW, 1.0, vocabulary=9)
                    got.append(await gym.aggregate("s", []))
                    return got
                async with gym.session("s", ROW) as session:
                    got.append(session.observation)
                    if kind == "step":
                        got += [await session.step(message_response("x")) for _ in range(2)]
                    else:
                        got += [
                            await session.call_tool("look", arguments),
                            await session.verify(message_response("x")),
                        ]
            except GymError as error:
                assert is_sound(str(error)) and error.reason != "server_down"
        return got

    no_pause = SimpleNamespace(uniform=lambda *_: 0.0)
    with (
        mock.patch.object(gym_client._Caller, "ask", ask),
        mock.patch.object(gym_client, "random", no_pause),
    ):
        return asyncio.run(run())


@pytest.mark.parametrize("kind", ROUTES)
@often
@given(
    st.lists(st.tuples(st.sampled_from([200, 200, 200, 422, 500]), bodies), min_size=1, max_size=3),
    texts,
)
def test_a_server_may_say_anything(kind, said, arguments):
    for got in converse(kind, said, arguments):
        if isinstance(got, Turn):
            assert math.isfinite(got.reward) and is_sound([got.observation, got.tool_outputs])
            assert type(got.terminated) is bool and type(got.truncated) is bool
            assert all(
                type(o["call_id"]) is str and type(o["output"]) is str for o in got.tool_outputs
            )
        elif isinstance(got, Verdict):
            assert math.isfinite(got.reward) and is_sound([got.details, got.components])
        else:
            assert is_sound(got)


@often
@given(items)
def test_what_an_agent_says_makes_an_episode_or_an_error(output):
    got = converse("agent", [(200, as_bytes({"reward": 1.0, "response": {"output": output}}))])
    if not got:
        return
    episode = Episode("r", "g", "s", [], reward=1.0)
    try:
        episodes.fill(episode, got[1]["output"])
    except GymError as error:
        assert error.reason == "not_contiguous"
        return
    assert all(0 <= i < 9 for i in episode.prompt_ids + episode.response_ids)
    episodes.write(out := io.BytesIO(), episodes.as_record(episode, 0, 0))
    assert is_sound([episode.response, episode.transcript, json.loads(out.getvalue())])


headers = st.lists(
    st.tuples(
        st.sampled_from(
            [
                b"Set-Cookie",
                b"Content-Type",
                b"Content-Encoding",
                b"Location",
                b"Content-Length",
                b"X",
            ]
        ),
        st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))
        | st.sampled_from(
            [
                b"gzip",
                b"deflate",
                b"br",
                b"chunked",
                b"/",
                b"file:///x",
                b"http://[",
                b"//\xff",
                b"9",
            ]
        )
        | st.sampled_from(["[" * 5000, '{"session_id": 1}', "[]"]).map(
            lambda t: b"Gym=" + base64.b64encode(t.encode())
        ),
    ),
    max_size=4,
)


@seldom
@given(
    st.sampled_from([b"200", b"204", b"302", b"307", b"500", b"503", b"999", b"x"]),
    headers,
    bodies,
    st.booleans(),
)
def test_a_server_may_send_any_bytes(status, pairs, body, framed):
    """Over a real connection, which the server closes."""
    lines = [b"HTTP/1.1 " + status + b" OK", *(key + b": " + value for key, value in pairs)]
    lines += [b"Content-Length: %d" % len(body)] if framed else []
    sent = b"\r\n".join([*lines, b"", body])

    async def answer(reader, writer):
        await reader.read(2**16)
        writer.write(sent)
        writer.close()

    async def run():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        async with server, Gym({"s": url}, timeout_s=5.0, attempts=1, outage_budget_s=-1.0) as gym:
            caller = gym_client._Caller(gym, "s")
            for _ in range(3):  # the second with the cookies of the first
                try:
                    assert is_sound(await caller.call("POST", "/verify", ROW))
                except GymError as error:
                    assert is_sound(str(error))

    asyncio.run(run())


# --- what a row says -----------------------------------------------------------------------------
def to_row(text: str):
    """The row of a line, its messages and its tools; None where it is refused."""
    try:
        row = env.parse_row(text, "x.jsonl:1")
        env.server_of(row, {"a": "a"}, "x.jsonl:1")
        return row, *env.render(row, "x.jsonl:1")
    except env.DataError as error:
        assert str(error).startswith("x.jsonl:1: ")


@often
@given(
    rows.map(json.dumps)
    | json_values.map(json.dumps)
    | st.sampled_from(["[" * 5000, '{"a":' * 5000, "9" * 5000])
)
def test_a_row_is_rendered_or_refused_by_its_line(text):
    if made := to_row(text):
        row, messages, offered = made
        assert is_sound(row)
        assert all(
            type(m["content"]) is str and m["role"] in ("system", "user", "assistant", "tool")
            for m in messages
        )
        assert all(type(tool["function"]["name"]) is str for tool in offered)
        session = gym_client.Session(mock.Mock(), "s", row, frozenset(["/look"]), "verify")
        assert all(type(name) is str and "/" not in name for name in session.tools)


@seldom
@given(st.lists(rows.map(as_bytes) | json_values.map(as_bytes) | st.binary(max_size=9), max_size=4))
def test_check_takes_any_file(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        passed = convert.check(str(path))
    told = printed.getvalue()
    loaded, refused = map(
        int, re.search(r"fuzz\.jsonl: (\d+) rows load, (\d+) refused\n", told).groups()
    )
    errors = len(re.findall("^    error: ", told, re.MULTILINE))
    assert passed == (errors == 0)
    try:
        text = path.read_text(encoding="utf-8")  # with each end of a line as \n
    except UnicodeDecodeError:
        assert (loaded, refused, errors) == (0, 0, 1)
        return
    kinds = Counter(kind_of(line) for line in text.split("\n") if line.strip())
    assert (loaded, refused, errors) == (kinds["loads"], kinds["refused"], kinds["error"])


def kind_of(line: str) -> str:
    """Whether a line's row loads, is refused, or is an error."""
    try:
        env.render(parse_row(line, "x.jsonl:1"), "x.jsonl:1")
    except env.Refused:
        return "refused"
    except env.DataError:
        return "error"
    return "loads"


# --- what is written down ------------------------------------------------------------------------
ITEMS = [
    gym_client.message,
    gym_client.reasoning,
    lambda text: gym_client.function_call("c", text, text),
]
turns = st.lists(  # (ids observed before it, ids sampled, what it says, its text, a log-prob)
    st.tuples(
        ids,
        st.lists(st.integers(0, 9), min_size=1),
        st.sampled_from(ITEMS),
        texts,
        st.floats(-50, 0, width=32),
    ),
    min_size=1,
    max_size=3,
)


asked = st.lists(nearly(role=st.just("user"), content=parts | texts), max_size=3) | items
taken = st.builds(
    lambda extra, asked: {**extra, "responses_create_params": {"input": asked}},
    st.dictionaries(st.sampled_from(sorted(KEYS)) | texts, json_values, max_size=3),
    texts | asked,
).filter(lambda row: to_row(json.dumps(row)))


@often
@given(turns, verdicts, taken, texts, st.sampled_from(["ok", "timeout"]))
def test_an_episode_that_is_written_is_read_again(tmp_path_factory, said, body, row, text, status):
    try:
        verdict = parse_verdict(body, row=row)
    except GymError:
        verdict = Verdict(0.5)
    known = {
        "ended": "stop",
        "error": text,
        "status": status,
        "turn_rewards": [0.5],
        "timings": {"generate": 0.25},
    }
    episode = Episode(text, "train/0/1", "s", [1, 2], row=row, **known)
    episode.reward, episode.reward_components, episode.verdict = (
        verdict.reward,
        verdict.components,
        verdict.details,
    )
    for number, (observed, sampled, item, words, log_prob) in enumerate(said):
        if number and observed:
            episode.output.append(gym_client.function_call_output("c", words))
            episodes.append(episode, observed)
        episode.output.append(item(words))
        episodes.append(episode, sampled, [log_prob] * len(sampled))

    path = tmp_path_factory.getbasetemp() / "fuzz_rollouts.jsonl"
    with episodes.open_records(path, "w") as out:
        episodes.write(out, episodes.as_record(episode, 3, 1))
        episodes.write(out, episodes.as_record(episode, 3, 2))
    records = list(episodes.read_records(path))
    assert [(number, record["_ng_rollout_index"]) for number, record in records] == [(1, 1), (2, 2)]
    again = episodes.from_record(records[0][1], row)
    again.log_probs = [float(np.float32(p)) for p in again.log_probs]
    assert again == episode
