"""The requests that the policy endpoint supports, and the errors of those that it refuses."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import env
from kit.rollout import openai_server
from tests.helpers.rollouts import TOOL, call, chatml_tokenizer, context_of, one_turn_each

TOOLS = env.render_tools([TOOL], "x:1")
USER = {"role": "user", "content": "Look it up."}
ANSWER = {"role": "assistant", "content": None}
TOKENIZER = chatml_tokenizer()


def make_context(texts=("Hello.",), **changes):
    return context_of(one_turn_each(list(texts), TOKENIZER), TOKENIZER, **changes)


def complete(body, context=None) -> openai_server.Reply:
    return asyncio.run(openai_server.complete_chat(body, context or make_context()))


# --- responses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_cut", "reason"), [(False, "stop"), (True, "length")])
def test_a_thought_that_is_not_closed_has_neither_content_nor_calls(is_cut, reason):
    context = make_context(["<think>so \\boxed{5} " + call()])
    if is_cut:
        context.client.answers[0].pop()
    choice = complete({"messages": [USER], "tools": TOOLS}, context).body["choices"][0]
    message = choice["message"]
    assert (message["content"], message["tool_calls"], choice["finish_reason"]) == ("", [], reason)
    assert "boxed" in message["reasoning_content"]


def test_a_limit_of_tokens_shortens_the_response():
    for options in (
        {"max_tokens": 3},
        {"max_completion_tokens": 3},
        {"max_tokens": 3, "max_completion_tokens": 5},
    ):
        choice = complete({"messages": [USER], **options}).body["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hel", "length")
    choice = complete({"messages": [USER], "max_tokens": 10**9}).body["choices"][0]
    assert choice["finish_reason"] == "stop"


def test_a_request_of_gym_is_answered():
    """All fields that Gym's model servers send. The unsupported ones have their neutral values."""
    body = {
        "model": "policy",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "temperature": 9.0,
        "top_p": 0.1,
        "logprobs": True,
        "top_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "max_tokens": 100,
        "n": None,
        "stop": None,
        "stream": False,
        "metadata": {"a": "b"},
        "user": "u",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "text"},
        "unknown": {"a": [1]},
    }
    assert complete(body).status == 200


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_request_may_leave_out_what_a_row_may_leave_out(content, arguments):
    """The content of an output, the arguments of a call. A tool without a result has no content."""
    function = {"name": "look_up", "arguments": arguments}
    called = {**ANSWER, "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    output = {"role": "tool", "tool_call_id": "c", "content": content}
    prompts = []
    for tool in (output, {**output, "content": ""}, {"role": "tool", "tool_call_id": "c"}):
        for message in (called, json.loads(json.dumps(called).replace(', "arguments": null', ""))):
            context = make_context()
            messages = [{**USER, "content": "x"}, message, tool]
            body = {"messages": messages, "tools": json.dumps(TOOLS)}
            assert complete(body, context).status == 200
            prompts.append(context.client.prompts[0])
    row = env.render_items([{**USER, "content": "x"}, called, output], "x:1")
    assert prompts == [context.template.encode_prompt(row, TOOLS)] * 6


# --- requests that are refused -------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
CALL = {"id": "a", "type": "function", "function": {"name": "look_up"}}
HELLO = {"role": "assistant", "content": "Hello"}
NAMELESS = {"id": "a", "type": "function", "function": {"arguments": "{}"}}
REFUSED = [  # (what is added to a valid request, the field that the error names)
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [USER, {}]}, "messages[1].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "system", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]},
        "messages[0].tool_call_id",
    ),
    ({"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]}, "messages[1]"),
    ({"messages": [USER, HELLO], "add_generation_prompt": True}, "add_generation_prompt"),
    ({"messages": [USER, HELLO], "continue_final_message": False}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"messages": [{**ANSWER, "tool_calls": "x"}]}, "messages[0].tool_calls"),
    ({"messages": [{**ANSWER, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    (
        {"messages": [{**ANSWER, "tool_calls": [NAMELESS]}]},
        "messages[0].tool_calls[0].function.name",
    ),
    ({"messages": [{**ANSWER, "generation_token_ids": [-1]}]}, "messages[0].generation_token_ids"),
    ({"messages": [{**ANSWER, "prompt_token_ids": "x"}]}, "messages[0].prompt_token_ids"),
    ({"tools": {}}, "tools"),
    ({"tools": ["x"]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "flat"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        "tool_choice",
    ),
    ({"n": 3}, "n"),
    ({"n": 0}, "n"),
    ({"n": "1"}, "n"),
    ({"stop": ["x"]}, "stop"),
    ({"stop": "x"}, "stop"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": True}, "stream_options"),
    ({"functions": [{"name": "a"}]}, "functions"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("change", "param"), REFUSED)
def test_a_refused_request_names_the_field(change, param):
    context = make_context()
    reply = complete({"messages": [USER], **change}, context)
    error = reply.body["error"]
    print(error["message"])
    assert reply.status == 400 and error["type"] == "invalid_request_error"
    assert error["param"].startswith(param) and error["message"].startswith(error["param"])
    assert not context.client.prompts


@pytest.mark.parametrize("body", [None, [], "x", 5, {}])
def test_a_body_that_is_no_request_is_refused(body):
    reply = complete(body)
    expected = "messages is missing" if body == {} else "the body must be a JSON object"
    assert reply.status == 400 and expected in reply.body["error"]["message"]


@pytest.mark.parametrize("text", ["context length", "max_tokens", "a context length of max_tokens"])
def test_only_an_error_about_the_length_has_gyms_words_for_it(text):
    """For Gym's model server, these words in a 400 mean that the episode is too long."""
    for change in (
        {"n": text},
        {"messages": [{"role": text, "content": "x"}]},
        {"response_format": {"type": text}},
    ):
        reply = complete({"messages": [USER], **change})
        text_of_body = json.dumps(reply.body)
        assert reply.status == 400
        assert "context length" not in text_of_body and "max_tokens" not in text_of_body


def test_a_template_that_rejects_the_messages_is_an_error_of_the_messages():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    context = context_of(one_turn_each(["x"], tokenizer), tokenizer)
    reply = complete({"messages": [USER]}, context)
    assert (reply.status, reply.body["error"]["param"]) == (400, "messages")
    assert "roles must alternate" in reply.body["error"]["message"]


# --- properties ----------------------------------------------------------------------------------

KEYS = ["role", "content", "text", "type", "function", "name", "arguments", "parameters"]
KEYS += ["id", "tool_calls", "tool_call_id", "user", "assistant", "tool", "reasoning"]
KEYS += ["prompt_token_ids", "generation_token_ids"]
OPTIONS = ["tools", "tool_choice", "n", "stop", "response_format", "logprobs", "top_logprobs"]
OPTIONS += ["max_tokens", "max_completion_tokens", "stream", "stream_options", "for_training"]
NAMES = st.sampled_from(KEYS)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "<|im_end|>", "<think>", "", "function", "text"]),
    NAMES,
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
ROLES = st.sampled_from(["user", "system", "developer", "assistant", "tool"])
MESSAGES = st.fixed_dictionaries(
    {"role": ROLES | JSON, "content": st.text(max_size=9) | JSON},
    optional={
        "tool_call_id": st.text(max_size=9) | JSON,
        "tool_calls": JSON,
        "reasoning_content": JSON,
        "name": JSON,
        "prompt_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=4) | JSON,
        "generation_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=4) | JSON,
    },
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES | JSON, max_size=4) | JSON},
    optional=dict.fromkeys(OPTIONS, JSON),
)


def check_reply(status: int, body) -> None:
    assert status in (200, 400, 413, 422), body
    if status != 200:
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]


@given(BODIES | JSON)
@settings(max_examples=150, deadline=None)
def test_no_body_is_an_error_of_the_server(body):
    reply = complete(body)
    check_reply(reply.status, reply.body)
    json.dumps(reply.body).encode()
