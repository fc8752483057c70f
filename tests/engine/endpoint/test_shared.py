"""The policy endpoint: requests, tokens, calls, the history of a conversation, and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json

import aiohttp
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import env
from gym_client import RESERVED, GymError
from kit.data.episode import PROMPT_IDS, SAMPLED_IDS, TOKEN_FIELDS, Episode, from_output_items
from kit.engine.endpoint import server as endpoint_server
from kit.engine.endpoint.dialects import chat as dialect
from kit.engine.endpoint.tree import Call
from kit.errors import RunError
from kit.verify.network import find_free_port
from tests.helpers.rollouts import (
    STOPS,
    TEMPLATES,
    TOOL,
    HttpReply,
    Script,
    ask_endpoint,
    bytes_tokenizer,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    one_turn_each,
)

KEY = "a key of this test"
TOOLS = env.render_tools([TOOL], "x:1")
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Look it up."}
TOKENIZER = chatml_tokenizer()
TURNS = [
    "<think>A plan.</think>I look. " + call('{"q": "first"}'),
    call('{"q": [1, 2.5, null]}'),
    "Done.",
    "Again.",
]


def make_context(*texts, **changes):
    return context_of(one_turn_each(texts or ["Hello."], TOKENIZER), TOKENIZER, **changes)


def complete(context, *messages, **fields) -> HttpReply:
    """Send one request."""
    return ask_endpoint({"messages": list(messages or [USER]), **fields}, context)


def ask(context, *messages, **fields) -> dict:
    """Send a request, and return the message of the response."""
    reply = complete(context, *messages, **fields)
    assert reply.status == 200, reply.body
    return reply.body["choices"][0]["message"]


def make_history(context, turn_count=3) -> list[dict]:
    """Play the first turns of a conversation as an agent does, and return its messages."""
    messages = [SYSTEM, USER]
    for number in range(turn_count):
        answer = ask(context, *messages, tools=TOOLS)
        outputs = [
            {"role": "tool", "tool_call_id": each["id"], "content": f"output {number}"}
            for each in answer["tool_calls"]
        ]
        question = {"role": "user", "content": f"Question {number}."}
        messages += [answer, *(outputs or [question])]
    return messages


def build_prompt(messages, context, tools=TOOLS) -> Call:
    """Build the prompt of a request."""
    request = dialect.read({"messages": messages, "tools": tools})
    shared = vars(context)["endpoint"].shared
    return asyncio.run(shared.prompts.build(context, shared.tree, request))


# --- tokens --------------------------------------------------------------------------------------


def test_the_next_prompt_starts_with_the_sampled_tokens():
    (call_ids,) = encode_turns([call()], TOKENIZER)
    sampled = [200, 201, 202, *call_ids]  # no text has the first three ids as its encoding
    context = context_of(Script([sampled, [5, TOKENIZER.eos_token_id]]), TOKENIZER)
    message = ask(context, USER, tools=TOOLS)
    assert message["generation_token_ids"] == sampled
    assert len(message["generation_log_probs"]) == len(sampled)
    output = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seen"}
    prompt = ask(context, USER, message, output, tools=TOOLS)["prompt_token_ids"]
    before = context.client.prompts[0] + sampled
    assert prompt == context.client.prompts[1] and prompt[: len(before)] == before
    observed = TOKENIZER.decode(prompt[len(before) :])
    assert observed.strip().startswith("<|im_start|>tool\nseen")


def test_sampling_parameters_are_those_of_the_run():
    context = make_context("a", "b")
    for temperature in (0.5, 0.0):  # as when an evaluation starts
        context.samples.begin_batch({"temperature": temperature})
        ask(context, temperature=9)
    assert [params["temperature"] for _, params in context.client.requests] == [0.5, 0.0]


# --- requests ------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
ANSWER = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "So"}]}, "messages"),
        ({"messages": [{**ANSWER, "generation_token_ids": [-1]}]}, "messages"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"n": 3}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
def test_a_refused_request_names_the_field(change, param):
    context = make_context()
    reply = ask_endpoint({"messages": [USER], **change}, context)
    error = reply.body["error"]
    assert reply.status == 400 and error["type"] == "invalid_request_error" and error["message"]
    assert error["param"].startswith(param) and not context.client.prompts


def test_a_failure_after_the_request_has_a_status_that_gym_does_not_repeat():
    """After a 500, Gym would send the request three times. Each time the policy would sample."""
    reply = complete(make_context(tool_format="no such format"), tools=TOOLS)
    assert (reply.status, reply.body["error"]["code"]) == (422, "tool_parser")
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    reply = complete(context_of(one_turn_each(["x"], tokenizer), tokenizer))
    assert (reply.status, reply.body["error"]["param"]) == (400, "messages")


TEXTS = st.sampled_from(["\ud800", "<|im_end|>", "<think>", "", "role", "content", "text", "id"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=12,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXTS | JSON},
    optional=dict.fromkeys(["tool_call_id", "tool_calls", "reasoning_content"], JSON)
    | dict.fromkeys(TOKEN_FIELDS, st.lists(st.integers(0, 2**31 - 1), max_size=4) | JSON),
)
OPTIONS = ["tools", "n", "stop", "max_tokens", "stream_options", "chat_template_kwargs"]
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGES | JSON, max_size=4) | JSON},
    optional=dict.fromkeys(OPTIONS, JSON),
)


@given(BODIES | JSON)
@settings(max_examples=80, deadline=None)
def test_no_body_is_an_error_of_the_server(body):
    reply = ask_endpoint(body, make_context())
    assert reply.status in (200, 400, 422), reply.body
    if reply.status != 200:
        assert set(reply.body["error"]) == {"message", "type", "param", "code"}
        assert reply.body["error"]["message"]
    json.dumps(reply.body).encode()


# --- calls ---------------------------------------------------------------------------------------


def make_tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


FORGED = ["other", "Look_up", "look_up/../verify", "%76erify", "verify?look_up", "look_up#"]
FORGED += ["\\uff56erify", "", *sorted(RESERVED)]


@pytest.mark.parametrize("name", FORGED)
def test_a_call_of_no_tool_of_the_request_is_text(name):
    message = ask(make_context("Well." + call('{"a": 1}', name)), tools=TOOLS)
    assert message["tool_calls"] == []
    assert message["content"].startswith("Well.") and '"arguments"' in message["content"]


def test_calls_of_offered_tools_stay_calls():
    text = call('{"initial_count": 9}', "seed_session") + call('{"q": 1}') + call(name="look.up-2")
    message = ask(make_context(text), tools=[*TOOLS, make_tool("look.up-2")])
    called = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
    assert called == [("look_up", '{"q": 1}'), ("look.up-2", "{}")]
    assert "seed_session" in message["content"] and "look_up" not in message["content"]
    assert ask(make_context(text))["tool_calls"] == []  # a request without tools


def test_a_call_stays_text_if_the_request_allows_none():
    """The prompt still has the tools, as in the other requests of the conversation."""
    context = make_context(call(), "Done.")
    message = ask(context, tools=TOOLS, tool_choice="none")
    assert message["tool_calls"] == [] and message["content"] == call()
    ask(context, USER, message, {"role": "user", "content": "And now?"}, tools=TOOLS)
    first, second = context.client.prompts
    before = [*first, *message["generation_token_ids"]]
    assert "look_up" in TOKENIZER.decode(first) and second[: len(before)] == before


# --- the history ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation():
    """Three turns of a conversation: (the context of its policy, its messages).

    The template renders earlier turns without their thoughts, so not as they were sampled.
    """
    tokenizer = bytes_tokenizer(TEMPLATES["forgetful"], STOPS["forgetful"])
    context = context_of(one_turn_each(TURNS, tokenizer), tokenizer)
    messages = make_history(context)
    roles = ["assistant", "tool", "assistant", "tool", "assistant", "user"]
    assert [message["role"] for message in messages[2:]] == roles
    return context, messages


def change_arguments(message, change) -> dict:
    changed = copy.deepcopy(message)
    for each in changed["tool_calls"]:
        each["function"]["arguments"] = change(json.loads(each["function"]["arguments"]))
    return changed


def test_another_form_of_the_same_message_is_no_change(conversation):
    """Gym's converter and other clients change the form."""
    context, messages = conversation
    answer = messages[2]
    thought = answer["reasoning_content"]
    content = answer["content"]
    forms = [
        {**answer, "reasoning": thought, "reasoning_content": None},
        {**answer, "reasoning_content": None, "content": f"<think>{thought}</think>{content}"},
        {**answer, "reasoning_content": None},
        {**answer, "content": [{"type": "text", "text": part} for part in content.partition(" ")]},
        {**answer, "content": content.strip()},
        change_arguments(answer, lambda arguments: json.dumps(arguments, indent=1)),
        change_arguments(answer, lambda arguments: arguments),
    ]
    for form in forms:
        changed = [*messages[:2], form, *messages[3:]]
        assert form != answer and not build_prompt(changed, context).is_rewritten, form
    for empty in (None, [], [{"type": "text", "text": ""}]):
        changed = [*messages[:4], {**messages[4], "content": empty}, *messages[5:]]
        assert messages[4]["content"] == "" and not build_prompt(changed, context).is_rewritten
    text = json.dumps(messages)
    for index in (2, 4):
        text = text.replace(messages[index]["tool_calls"][0]["id"], f"call_{index}")
    assert not build_prompt(json.loads(text), context).is_rewritten


def list_edits(messages) -> list[tuple[str, list[dict]]]:
    """List (what was edited, the messages) for each part of a conversation."""
    edits = []

    def edit(index, name, change):
        edited = copy.deepcopy(messages)
        change(edited[index])
        edits.append((f"{name} of message {index}", edited))

    def change_field(fields, name):
        if isinstance(fields[name], str):
            fields[name] += "!"
        else:
            fields[name][-2] += 1

    for index, message in enumerate(messages):
        edit(index, "content", lambda m: change_field(m, "content"))
        if message["role"] != "assistant":
            edits.append((f"no message {index}", messages[:index] + messages[index + 1 :]))
            continue
        edit(index, "border", lambda m: m[SAMPLED_IDS].insert(0, m[PROMPT_IDS].pop()))
        for name in (PROMPT_IDS, SAMPLED_IDS):
            edit(index, name, functools.partial(change_field, name=name))
        if message["tool_calls"]:
            edit(index, "no token ids", lambda m: m.pop(SAMPLED_IDS))
            edit(index, "no call", lambda m: m["tool_calls"].clear())
            edit(index, "name", lambda m: change_field(m["tool_calls"][0]["function"], "name"))
            edit(
                index, "arguments", lambda m: m["tool_calls"][0]["function"].update(arguments="{}")
            )
    return edits


def make_items(messages) -> list[dict]:
    """Return the answers in messages as output items of an agent."""
    items = []
    for message in messages:
        if message["role"] == "assistant":
            text = {"type": "output_text", "text": message["content"]}
            fields = {name: message[name] for name in TOKEN_FIELDS}
            items.append({"type": "message", "role": "assistant", "content": [text], **fields})
    return items


def test_each_edit_of_the_history_is_found_and_fails_the_episode(conversation):
    """For each cut of the agent's output."""
    context, messages = conversation
    edits = list_edits(messages[:-1])  # what follows the last response is new
    assert len(edits) > 20
    for name, edited in edits:
        changed = [*edited, USER]
        assert build_prompt(changed, context).is_rewritten, name
        context.client.answers += encode_turns(["Done."], context.tokenizer)
        output = make_items([*messages, ask(context, *changed, tools=TOOLS)])
        for dropped in range(len(output) - 1):
            with pytest.raises(GymError) as caught:
                from_output_items(Episode("x:1", "g", "server", []), output[dropped:])
            assert caught.value.reason == "not_contiguous", (name, dropped)
    from_output_items(Episode("x:1", "g", "server", []), make_items(messages))


def test_other_tools_and_text_in_the_name_of_the_policy_are_found(conversation):
    context, messages = conversation
    other = env.render_tools([{**TOOL, "description": "Looks it up."}], "x:1")
    for tools in ([], [*TOOLS, make_tool("ask")], other):
        assert build_prompt(messages, context, tools).is_rewritten
    written = {"role": "assistant", "content": "I am sure."}
    for index in range(3, len(messages) + 1):
        changed = [*messages[:index], written, *messages[index:], USER]
        assert build_prompt(changed, context).is_rewritten


# --- limits --------------------------------------------------------------------------------------


def test_the_first_prompt_and_the_response_have_separate_limits():
    context = make_context("Yes.", max_prompt_length=100, max_response_length=40)
    long_question = {"role": "user", "content": "x" * 90}
    reply = complete(context, long_question)
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
    assert "context length" in reply.body["error"]["message"]
    reply = complete(context, USER, ask(context, USER), long_question)
    assert reply.status == 400 and "data.max_response_length=40" in reply.body["error"]["message"]
    assert len(context.client.prompts) == 1


def test_a_judges_request_may_have_the_length_of_the_engines_context():
    context = make_context("Yes.", max_prompt_length=50, max_response_length=80)
    question = {"role": "user", "content": "x" * 60}
    assert complete(context, question).status == 400
    assert complete(context, question, for_training=False).status == 200
    question["content"] *= 2
    assert complete(context, question, for_training=False).status == 400


# --- HTTP ----------------------------------------------------------------------------------------

THINKS = "<think>Plan: " + call('{"q": 1}') + " no</think>\n\nI look." + call('{"q": 2}')


@contextlib.asynccontextmanager
async def serving(context):
    """Yield a client of the openai package for a new endpoint."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}/v1"
    async with endpoint_server.serve(context, "127.0.0.1", port, KEY):
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=3) as client:
            yield client


async def fetch(context, method, path, key=KEY, **options):
    """Send a request without a client of OpenAI, and return (status, text)."""
    async with serving(context) as client, aiohttp.ClientSession() as http:
        url = str(client.base_url).removesuffix("/v1/") + path
        headers = {"Authorization": f"Bearer {key}"}
        async with http.request(method, url, headers=headers, **options) as response:
            return response.status, await response.text()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"messages": ' + b"[" * 3000 + b"]" * 3000 + b"}",
    ],
)
def test_no_raw_body_is_an_error_of_the_server(body):
    status, text = asyncio.run(fetch(make_context(), "POST", "/v1/chat/completions", data=body))
    assert status == 400 and json.loads(text)["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", "/v1/completions", KEY, 404),
        ("GET", "/v1/models", "wrong", 401),
    ],
)
def test_other_routes_and_keys_are_errors_in_json(method, path, key, status):
    context = make_context()
    found, text = asyncio.run(fetch(context, method, path, key, json={"messages": [USER]}))
    assert found == status and json.loads(text)["error"]["message"] and not context.client.prompts


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(TimeoutError(), 422, "generate_timeout"), (RunError("the weights are old"), 500, None)],
)
def test_a_failure_of_the_engine_is_an_error_in_json(error, status, code):
    """The openai package and Gym repeat 408, 409, 429 and 5xx, so a timeout is none of these."""
    context = make_context()

    async def fail(*_, **__):
        raise error

    context.client.generate = fail
    options = {"json": {"messages": [USER], "stream": True}}
    found, text = asyncio.run(fetch(context, "POST", "/v1/chat/completions", **options))
    body = json.loads(text)["error"]
    assert (found, body["code"]) == (status, code) and str(error) in body["message"]
