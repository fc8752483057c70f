"""Fuzz tests: random data gives a result that can be written, or an error of the kit."""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

import env
import gym_client
from gym_client import (
    BodyFields,
    Gym,
    GymError,
    StepResult,
    VerifyResult,
    message_response,
    parse_verify_result,
    sanitize_json,
)
from kit.data import rollout_files
from kit.data.episode import Episode, append_tokens
from kit.data.row_files import parse_object
from kit.data.tasks import TaskLoader
from kit.data.verl_rows import check_gym_row

set_hypothesis_home_dir(f"{tempfile.gettempdir()}/hypothesis")  # outside the repository
many_examples = settings(
    max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)

# --- JSON that is nearly correct ------------------------------------------------------------------
texts = st.text(st.sampled_from('aé🙂\ud800\x00\n"\\{[/?%._-'), max_size=6) | st.text(max_size=6)
numbers = (
    st.integers(-3, 3) | st.floats() | st.sampled_from([10**400, -(10**400), 2**31, 1e308, True])
)
KEYS = """
reward reward_components mask_sample failure_kind _episode info tool_outputs output observation
supports_explicit_close response type role content text name arguments generation_token_ids
responses_create_params input instructions tools function agent_ref question audio_path
""".split()  # noqa: SIM905
KINDS = ["message", "reasoning", "function_call", "function", "input_text", "output_text"]
ROLES = ["user", "assistant", "system"]
nested = st.sampled_from([70, 700]).map(lambda depth: json.loads("[" * depth + "]" * depth))
scalars = st.none() | st.booleans() | numbers | texts | st.sampled_from(KINDS + ROLES)
json_values = st.recursive(
    scalars | nested,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | texts, inner, max_size=6)
    ),
    max_leaves=8,
)


def nearly(**shape):
    """Return objects of this shape. In one of six, a value may be of another type or missing."""

    def change(valid, dice, removed, replacement):
        if dice:
            return valid
        changed = valid | replacement
        return {name: value for name, value in changed.items() if name != removed}

    replacements = st.dictionaries(st.sampled_from(sorted(shape)), json_values, max_size=1)
    valid_objects = st.fixed_dictionaries(shape)
    removed_keys = st.sampled_from([*shape, ""])
    return st.builds(change, valid_objects, st.integers(0, 5), removed_keys, replacements)


finite = st.floats(-9, 9) | st.integers(-3, 3)
rewards = st.sampled_from([0.0, 1, 0.5]) | numbers
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
verify_answers = nearly(
    reward=rewards,
    reward_components=st.none() | st.dictionaries(texts, rewards, max_size=2),
    response=nearly(output=items),
    judge=st.sampled_from(["x", "x" * 70_000]),
    mask_sample=st.just(False),
)
step_info = nearly(
    tool_outputs=st.lists(nearly(call_id=texts, output=texts), max_size=2),
    supports_step_idempotency=st.booleans(),
    supports_explicit_close=st.booleans(),
)
step_answers = nearly(
    reward=rewards,
    observation=st.none() | texts,
    terminated=st.booleans(),
    truncated=st.booleans(),
    info=step_info,
)
failures = nearly(
    failure_reason=texts,
    terminal=st.booleans(),
    stage=st.sampled_from([None, "seed", "agent", "x"]),
    partial_response=st.none() | nearly(output=items),
)
environment_answers = nearly(result=st.none() | verify_answers, failure=st.none() | failures)
answers = verify_answers | step_answers | environment_answers
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


def encode_json(value) -> bytes:
    """Return JSON as a server may send it, also with NaN and half surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


bodies = (
    answers.map(encode_json)
    | json_values.map(encode_json)
    | st.binary(max_size=20)
    | st.just(b"[" * 5000)
)


def is_writable(value) -> bool:
    """Return whether every writer and tokenizer accepts the value."""
    return bool(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())


# --- servers -------------------------------------------------------------------------------------


ROW = {
    "responses_create_params": {"input": "x", "tools": [{"type": "function", "name": "look"}]},
    "half": "\ud800",
}
UNTYPED = BodyFields(frozenset(), frozenset())
TYPED = BodyFields(frozenset(), frozenset({"episode_id", "task"}))
ROUTES = {
    "verify": dict.fromkeys(["/verify", "/look"], UNTYPED),
    "step": dict.fromkeys(["/reset", "/step"], UNTYPED),
    "agent": dict.fromkeys(["/run", "/aggregate_metrics"], UNTYPED),
    "environment": dict.fromkeys(["/run", "/aggregate_metrics"], TYPED),
}


async def run_episode(gym, kind, results, arguments):
    """Run an episode, and append each result of the client to `results`. Raises GymError."""
    if kind in ("agent", "environment"):
        results += await gym.run("s", ROW, 1.0, vocabulary=9)
        results.append(await gym.aggregate("s", []))
        return
    async with gym.session("s", ROW) as session:
        results.append(session.observation)
        if kind == "step":
            results += [await session.step(message_response("x")) for _ in range(2)]
        else:
            text = await session.call_tool("look", arguments)
            results += [text, await session.verify(message_response("x"))]


def run_client(kind: str, script: list[tuple[int, bytes]], arguments: str = "{}") -> list:
    """Run an episode with a server whose last answer repeats -> the client's results."""
    script = [*script]
    results = []

    async def request(self, method, path, *_):
        return script.pop(0) if len(script) > 1 else script[0]

    async def run():
        async with Gym({"s": "http://s"}, attempts=2) as gym:
            gym._routes["s"] = asyncio.get_running_loop().create_future()
            gym._routes["s"].set_result(ROUTES[kind])
            try:
                await run_episode(gym, kind, results, arguments)
            except GymError as error:
                assert is_writable([str(error), error.details])
                assert len(json.dumps(error.details)) < 70_000
                assert error.reason != "server_down"

    no_pause = SimpleNamespace(uniform=lambda *_: 0.0)
    with (
        mock.patch.object(gym_client.Connection, "request", request),
        mock.patch.object(gym_client, "random", no_pause),
    ):
        asyncio.run(run())
    return results


@pytest.mark.parametrize("kind", ROUTES)
@many_examples
@given(
    st.lists(st.tuples(st.sampled_from([200, 200, 200, 422, 500]), bodies), min_size=1, max_size=3),
    texts,
)
def test_a_server_may_answer_anything(kind, script, arguments):
    for result in run_client(kind, script, arguments):
        if isinstance(result, StepResult):
            assert math.isfinite(result.reward)
            assert is_writable([result.observation, result.tool_outputs])
            assert {type(result.terminated), type(result.truncated)} == {bool}
            outputs = [text for output in result.tool_outputs for text in output.values()]
            assert all(type(text) is str for text in outputs)
        elif isinstance(result, VerifyResult):
            assert math.isfinite(result.reward)
            assert is_writable([result.details, result.components])
            assert len(json.dumps(result.details)) < 70_000
            assert not result.details.keys() & ROW.keys()
        else:
            assert is_writable(result)


# --- rows ----------------------------------------------------------------------------------------


NO_TEMPLATE: Any = None  # finding the server of a row needs none


def load_row(text: str):
    """Return the row of a line, its messages and its tools; None if the row is invalid."""
    try:
        row = check_gym_row(parse_object(text, "x.jsonl:1"), "x.jsonl:1")
        TaskLoader(NO_TEMPLATE, {"a": "a"}, 100).find_server(row, "x.jsonl:1", "")
        return row, *env.render_row(row, "x.jsonl:1")
    except env.DataError as error:
        assert str(error).startswith("x.jsonl:1: ")


@many_examples
@given(rows.map(json.dumps) | json_values.map(json.dumps) | st.just("9" * 5000))
def test_a_row_is_rendered_or_its_error_names_the_line(text):
    loaded = load_row(text)
    if not loaded:
        return
    row, messages, tools = loaded
    assert is_writable(row)
    for message in messages:
        assert type(message["content"]) is str
        assert message["role"] in ("system", "user", "assistant", "tool")
    assert all(type(tool["function"]["name"]) is str for tool in tools)
    session = gym_client.Session(mock.Mock(), "s", row, ROUTES["verify"], gym_client.FIRST)
    assert all(type(name) is str and "/" not in name for name in session.tools)


# --- episodes in files ---------------------------------------------------------------------------


def make_call(text):
    return gym_client.function_call("c", text, text)


turns = st.lists(  # (observed ids before the turn, sampled ids, item builder, text, log-prob)
    st.tuples(
        ids,
        st.lists(st.integers(0, 9), min_size=1),
        st.sampled_from([gym_client.make_message, gym_client.make_reasoning, make_call]),
        texts,
        st.floats(-50, 0, width=32),
    ),
    min_size=1,
    max_size=3,
)
loadable_rows = st.builds(
    lambda extra, text: {**extra, "responses_create_params": {"input": text}},
    st.dictionaries(texts, json_values, max_size=3),
    texts,
)


@many_examples
@given(turns, verify_answers, loadable_rows, texts, st.sampled_from(["ok", "timeout"]))
def test_a_written_episode_is_read_again(tmp_path_factory, turns, body, row, text, status):
    try:
        result = parse_verify_result(sanitize_json(body), row=row)
    except GymError:
        result = VerifyResult(0.5)
    fields = {"row": row, "ended": "stop", "error": text, "status": status}
    episode = Episode(text, "train/0/1", "s", [1, 2], turn_rewards=[0.5], **fields)
    episode.reward = result.reward
    episode.reward_components = result.components
    episode.verify_result = result.details
    for number, (observed, sampled, build_item, words, log_prob) in enumerate(turns):
        if number and observed:
            episode.output.append(gym_client.function_call_output("c", words))
            append_tokens(episode, observed)
        episode.output.append(build_item(words))
        append_tokens(episode, sampled, [log_prob] * len(sampled))
    path = tmp_path_factory.getbasetemp() / "fuzz_rollouts.jsonl"
    with path.open("wb") as file:
        for index in (1, 2):
            rollout_files.write_record(file, rollout_files.to_record(episode, 3, index))
    records = list(rollout_files.read_records(path))
    assert [(number, record["_ng_rollout_index"]) for number, record in records] == [(1, 1), (2, 2)]
    again = rollout_files.from_record(records[0][1], row)
    again.log_probs = [float(np.float32(p)) for p in again.log_probs]
    assert again == episode
