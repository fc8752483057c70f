"""The policy endpoint over HTTP: the openai package as a client, streams, routes and keys."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

import env
from kit.errors import RunError
from kit.gym.network import find_free_port
from kit.rollout import openai_server
from tests.helpers.rollouts import (
    TOOL,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    one_turn_each,
)

KEY = "a key of this test"
TOOLS = env.render_tools([TOOL], "x:1")
USER = {"role": "user", "content": "Look it up."}
TOKENIZER = chatml_tokenizer()
THINKS = "<think>Plan: " + call('{"q": 1}') + " no</think>\n\nI look." + call('{"q": 2}')


def make_context(texts=("Hello.",), **changes):
    return context_of(one_turn_each(list(texts), TOKENIZER), TOKENIZER, **changes)


@contextlib.asynccontextmanager
async def serving(context, key=KEY):
    """Yield a client of the openai package for a new endpoint."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}/v1"
    async with openai_server.serve(context, "127.0.0.1", port, KEY):
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=3) as client:
            yield client


def chat(context, **options):
    """Send one request with the openai package, and return the completion."""

    async def request():
        async with serving(context) as client:
            options.setdefault("messages", [USER])
            return await client.chat.completions.create(model="policy", **options)

    return asyncio.run(request())


# --- the openai package ---------------------------------------------------------------------------


def test_the_openai_package_reads_a_response_with_a_thought_and_calls():
    """A call in the thought is not a call."""
    completion = chat(make_context([THINKS]), tools=TOOLS)
    choice = completion.choices[0]
    (tool_call,) = choice.message.tool_calls
    assert (tool_call.function.name, tool_call.function.arguments) == ("look_up", '{"q": 2}')
    assert choice.message.content.strip() == "I look." and choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content.startswith("Plan: <tool_call>")
    assert choice.message.generation_token_ids == encode_turns([THINKS], TOKENIZER)[0]
    usage = completion.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens == len(choice.message.generation_log_probs)


def test_log_probs_are_sent_if_the_request_asks_for_them():
    completion = chat(make_context(["é!"]), logprobs=True, top_logprobs=0)
    entries = completion.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [-0.5, -1.5, -2.5, -3.5]
    assert [entry.token for entry in entries][2:] == ["!", "<|im_end|>"]
    assert entries[2].bytes == [33] and entries[2].top_logprobs == []
    gym = {"return_tokens_as_token_ids": True}  # it reads the log-probs of the message
    assert chat(make_context(), logprobs=True, extra_body=gym).choices[0].logprobs is None


def test_the_openai_package_raises_its_error_with_the_field():
    with pytest.raises(openai.BadRequestError) as caught:
        chat(make_context(), n=2)
    assert (caught.value.param, caught.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(make_context(max_prompt_length=3))
    assert caught.value.code == "context_length_exceeded"


# --- streams -------------------------------------------------------------------------------------


async def collect_chunks(context, **options) -> list:
    async with serving(context) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=[USER], stream=True, **options
        )
        return [chunk async for chunk in stream]


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_has_the_contents_of_the_response(include_usage):
    context = make_context([THINKS + call('{"q": 3}')])
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = asyncio.run(collect_chunks(context, tools=TOOLS, **options))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    if include_usage:
        assert len(usages) == 1 and usages[0].completion_tokens > 0 and not chunks[-1].choices
        chunks = chunks[:-1]
    else:
        assert not usages
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert deltas[0].role == "assistant" and deltas[0].generation_token_ids
    assert "".join(delta.content or "" for delta in deltas).strip() == "I look."
    assert any(getattr(delta, "reasoning_content", None) for delta in deltas)
    calls = [each for delta in deltas for each in delta.tool_calls or []]
    assert [(each.index, each.function.arguments) for each in calls] == [
        (0, '{"q": 2}'),
        (1, '{"q": 3}'),
    ]
    assert all(each.id and each.type == "function" for each in calls)
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]


def test_a_stream_ends_with_done_and_an_error_before_it_is_json():
    async def request(body):
        async with serving(make_context()) as client, aiohttp.ClientSession() as http:
            url = f"{client.base_url}chat/completions"
            headers = {"Authorization": f"Bearer {KEY}"}
            async with http.post(url, json=body, headers=headers) as response:
                return response.status, response.content_type, await response.text()

    body = {"messages": [USER], "stream": True}
    status, content_type, text = asyncio.run(request(body))
    assert (status, content_type) == (200, "text/event-stream")
    assert text.endswith("\n\ndata: [DONE]\n\n") and text.count("data: ") == 4
    status, content_type, text = asyncio.run(request({**body, "n": 2}))
    assert (status, content_type) == (400, "application/json")
    assert json.loads(text)["error"]["param"] == "n"


# --- bodies ---------------------------------------------------------------------------------------


def nest(depth: int, opening: str, closing: str) -> str:
    return opening * depth + closing * depth


DEEP = nest(3000, "[", "]")
RAW_BODIES = [
    b"",
    b"{",
    b"\xff\xfe\x00",
    b'{"messages": NaN}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "x", "content": 5}]}',
    nest(100_000, "[", "]").encode(),
    ('{"messages": ' + DEEP + "}").encode(),
    *[
        json.dumps({"messages": [USER], "tools": [{"type": "function", "function": function}]})
        .replace('"DEEP"', nest(depth, '{"a":', "}").replace(":}", ":1}", 1))
        .encode()
        for depth in (60, 400, 900)
        for function in ({"name": "look_up", "parameters": {"properties": "DEEP"}},)
    ],
]


def test_no_raw_body_is_an_error_of_the_server():
    async def send():
        context = make_context(["Hello."] * len(RAW_BODIES))
        replies = []
        async with serving(context) as client, aiohttp.ClientSession() as http:
            url = f"{client.base_url}chat/completions"
            for body in RAW_BODIES:
                headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "text/x; charset=no"}
                async with http.post(url, data=body, headers=headers) as response:
                    replies.append((response.status, await response.json()))
            headers["Content-Encoding"] = "gzip"
            async with http.post(url, data=b"not gzip", headers=headers) as response:
                replies.append((response.status, await response.json()))
        return replies

    replies = asyncio.run(send())
    print([status for status, _ in replies])
    for status, body in replies:
        assert status in (200, 400) and (status == 200 or body["error"]["message"])


# --- routes, keys and failures -------------------------------------------------------------------


async def fetch(context, method, path, key=KEY, **options):
    """Send a request without a client of OpenAI, and return (status, JSON)."""
    async with serving(context) as client, aiohttp.ClientSession() as http:
        url = str(client.base_url).removesuffix("/v1/") + path
        headers = {"Authorization": f"Bearer {key}"}
        async with http.request(method, url, headers=headers, **options) as response:
            return response.status, await response.json()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/v1/completions", 404),
        ("GET", "/", 404),
    ],
)
def test_other_routes_are_errors_in_json(method, path, status):
    found, body = asyncio.run(fetch(make_context(), method, path))
    assert found == status and path in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/"])
def test_a_wrong_key_is_refused_on_each_route(path):
    context = make_context()
    status, body = asyncio.run(fetch(context, "POST", path, "wrong", json={"messages": [USER]}))
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert not context.client.prompts


def test_a_body_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(openai_server, "MAX_BODY_BYTES", 100)
    options = {"json": {"messages": [{"role": "user", "content": "x" * 100}]}}
    status, body = asyncio.run(fetch(make_context(), "POST", "/v1/chat/completions", **options))
    assert status == 413 and body["error"]["message"]


class FailingPolicy:
    """A rollout engine that raises, and counts its requests."""

    def __init__(self, error):
        self.error = error
        self.count = 0

    async def generate(self, *_, **__):
        self.count += 1
        raise self.error


def test_a_timeout_of_the_engine_is_not_repeated():
    """The openai package and Gym repeat 408, 409, 429 and 5xx."""
    policy = FailingPolicy(TimeoutError())
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        chat(context_of(policy, TOKENIZER))
    assert (caught.value.code, caught.value.type) == ("generate_timeout", "server_error")
    assert policy.count == 1


def test_an_error_that_ends_the_run_is_an_error_of_the_server_in_json(caplog):
    policy = FailingPolicy(RunError("the weights are old"))
    options = {"json": {"messages": [USER]}}
    context = context_of(policy, TOKENIZER)
    status, body = asyncio.run(fetch(context, "POST", "/v1/chat/completions", **options))
    assert status == 500 and "the weights are old" in body["error"]["message"]
    assert "the weights are old" in caplog.text
