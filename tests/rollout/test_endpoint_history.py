"""The history of an agent's conversation: what the endpoint accepts, and what is rewritten."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import env
from gym_client import GymError
from kit.data.episode import TOKEN_FIELDS, Episode, from_output_items
from kit.rollout import openai_history, openai_server
from kit.rollout.openai_history import Histories
from kit.rollout.openai_requests import read_request
from tests.helpers.rollouts import (
    STOPS,
    TEMPLATES,
    TOOL,
    bytes_tokenizer,
    call,
    chatml_tokenizer,
    context_of,
    encode_turns,
    one_turn_each,
)

TOOLS = env.render_tools([TOOL], "x:1")
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Look it up."}
THOUGHT = "<think>A plan.</think>I look. "
TURNS = [THOUGHT + call('{"q": "first"}'), call('{"q": [1, 2.5, null]}'), "Done.", "Again."]


def complete(body, context, histories=None):
    return asyncio.run(openai_server.complete_chat(body, context, histories))


def reply_to(body, context, histories=None) -> dict:
    """Send a request, and return the message of the response."""
    reply = complete(body, context, histories)
    assert reply.status == 200, reply.body
    return reply.body["choices"][0]["message"]


def follow(message: dict, number: int) -> list[dict]:
    """Return the messages that the agent adds to the history after a response."""
    outputs = [
        {"role": "tool", "tool_call_id": each["id"], "content": f"output {number}"}
        for each in message["tool_calls"]
    ]
    return [message, *(outputs or [{"role": "user", "content": f"Question {number}."}])]


def make_history(context, turn_count=3, histories=None) -> list[dict]:
    """Run the first turns of a conversation, and return its messages."""
    messages = [SYSTEM, QUESTION]
    for number in range(turn_count):
        body = {"messages": messages, "tools": TOOLS}
        messages = [*messages, *follow(reply_to(body, context, histories), number)]
    return messages


def is_rewritten(messages, context, tools=TOOLS) -> bool:
    """Return whether an endpoint that knows nothing of the conversation finds it rewritten."""
    request = read_request({"messages": messages, "tools": tools})
    return asyncio.run(Histories(context).build_prompt(request)).is_rewritten


@pytest.fixture(scope="module")
def conversation():
    """Three turns of a conversation: (the context of its policy, its messages).

    The template renders earlier turns without their thoughts, so not as they were sampled.
    """
    tokenizer = bytes_tokenizer(TEMPLATES["forgetful"], STOPS["forgetful"])
    context = context_of(one_turn_each(TURNS, tokenizer), tokenizer)
    return context, make_history(context)


# --- histories that agents do not change ---------------------------------------------------------


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_any_endpoint_accepts_the_history_of_another(family):
    """Each request goes to an endpoint that has seen no other request."""
    tokenizer = bytes_tokenizer(TEMPLATES[family], STOPS[family])
    client = one_turn_each(TURNS, tokenizer)
    sampled = [list(ids) for ids in client.answers]
    context = context_of(client, tokenizer)
    messages = make_history(context)
    reply_to({"messages": messages, "tools": TOOLS}, context)
    tokens = client.prompts[0]
    for prompt, before in zip(client.prompts[1:], sampled, strict=False):
        tokens = tokens + before
        assert prompt[: len(tokens)] == tokens
        tokens = prompt


def move_thought(message):
    return {**message, "reasoning": message["reasoning_content"], "reasoning_content": None}


def repeat_thought(message):
    return {**message, "reasoning": message["reasoning_content"]}


def write_thought_into_content(message):
    thought = message["reasoning_content"]
    content = f"<think>\n{thought}\n</think>\n\n{message['content']}"
    return {**message, "reasoning_content": None, "content": content}


def drop_thought(message):
    return {**message, "reasoning_content": None}


def split_content(message):
    texts = [message["content"][:3], message["content"][3:]]
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def strip_content(message):
    return {**message, "content": message["content"].strip()}


def reformat_arguments(message):
    calls = copy.deepcopy(message["tool_calls"])
    for each in calls:
        arguments = json.loads(each["function"]["arguments"])
        each["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"), indent=1)
    return {**message, "tool_calls": calls}


def decode_arguments(message):
    calls = copy.deepcopy(message["tool_calls"])
    for each in calls:
        each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    return {**message, "tool_calls": calls}


HARMLESS = [
    move_thought,
    repeat_thought,
    write_thought_into_content,
    drop_thought,
    split_content,
    strip_content,
    reformat_arguments,
    decode_arguments,
]


@pytest.mark.parametrize("change", HARMLESS)
def test_another_form_of_the_same_message_is_no_change(conversation, change):
    context, messages = conversation
    changed = [*messages]
    changed[2] = change(messages[2])
    assert changed[2] != messages[2] and not is_rewritten(changed, context)


def test_null_and_empty_content_are_equal(conversation):
    context, messages = conversation
    assert messages[4]["content"] == ""
    for content in (None, [], [{"type": "text", "text": ""}]):
        changed = [*messages]
        changed[4] = {**messages[4], "content": content}
        assert not is_rewritten(changed, context)
    del changed[4]["content"]
    assert not is_rewritten(changed, context)


def test_an_agent_may_rename_the_ids_of_calls(conversation):
    context, messages = conversation
    text = json.dumps(messages)
    for number, index in enumerate((2, 4)):
        call_id = messages[index]["tool_calls"][0]["id"]
        text = text.replace(call_id, f"call_{number}")
    assert not is_rewritten(json.loads(text), context)


def test_a_call_stays_text_if_the_request_allows_none():
    """The prompt still has the tools, as in the other requests of the conversation."""
    tokenizer = chatml_tokenizer()
    client = one_turn_each([call(), "Done."], tokenizer)
    context = context_of(client, tokenizer)
    body = {"messages": [QUESTION], "tools": TOOLS, "tool_choice": "none"}
    message = reply_to(body, context)
    assert message["tool_calls"] == [] and message["content"] == call()
    history = [QUESTION, message, {"role": "user", "content": "And now?"}]
    reply_to({"messages": history, "tools": TOOLS}, context)
    assert "look_up" in tokenizer.decode(client.prompts[0])
    before = [*client.prompts[0], *message["generation_token_ids"]]
    assert client.prompts[1][: len(before)] == before


def test_a_call_that_was_refused_stays_text():
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["Well." + call(name="verify") + call(), "Done."], tokenizer)
    context = context_of(client, tokenizer)
    message = reply_to({"messages": [QUESTION], "tools": TOOLS}, context)
    history = [QUESTION, *follow(message, 0)]
    assert len(history) == 3 and not is_rewritten(history, context)


# --- histories that an agent has rewritten -------------------------------------------------------


def edit_messages(messages):
    """Yield (what was edited, the messages) for each part of a conversation of three turns."""
    for index, message in enumerate(messages):
        edited = copy.deepcopy(messages)
        if message["role"] != "assistant":
            edited[index]["content"] += "!"
            yield f"content of message {index}", edited
            yield f"no message {index}", messages[:index] + messages[index + 1 :]
            continue
        for key in ("content", "reasoning_content"):
            edited = copy.deepcopy(messages)
            edited[index][key] = (message.get(key) or "") + "!"
            yield f"{key} of message {index}", edited
        for name in TOKEN_FIELDS[:2]:
            edited = copy.deepcopy(messages)
            edited[index][name][-2] += 1
            yield f"{name} of message {index}", edited
        edited = copy.deepcopy(messages)
        edited[index][TOKEN_FIELDS[1]].insert(0, edited[index][TOKEN_FIELDS[0]].pop())
        yield f"the end of the prompt of message {index}", edited
        edited = copy.deepcopy(messages)
        for name in TOKEN_FIELDS:
            edited[index].pop(name)
        if index != 6:  # without its ids, the last turn is new text after two turns
            yield f"no token ids of message {index}", edited
        for number in range(len(message["tool_calls"])):
            edited = copy.deepcopy(messages)
            edited[index]["tool_calls"][number]["function"]["arguments"] = '{"q": 0}'
            yield f"arguments of message {index}", edited
            edited = copy.deepcopy(messages)
            edited[index]["tool_calls"][number]["function"]["name"] += "_"
            yield f"name in message {index}", edited
        edited = copy.deepcopy(messages)
        edited[index]["tool_calls"] = []
        if message["tool_calls"]:
            yield f"no call in message {index}", edited


def test_each_edit_of_an_earlier_message_is_found(conversation):
    context, messages = conversation
    assert [message["role"] for message in messages[2:]] == [
        *("assistant", "tool", "assistant", "tool", "assistant", "user")
    ]
    edits = list(edit_messages(messages[:-1]))  # what follows the last response is new
    missed = [name for name, edited in edits if not is_rewritten([*edited, QUESTION], context)]
    print(len(edits), "edits")
    assert missed == [] and len(edits) > 25
    assert not is_rewritten([*messages[:-1], QUESTION], context)


@pytest.mark.parametrize(
    "tools",
    [
        [],
        [*TOOLS, *env.render_tools([{**TOOL, "name": "ask"}], "x:1")],
        env.render_tools([{**TOOL, "description": "Looks it up."}], "x:1"),
    ],
)
def test_other_tools_are_found(conversation, tools):
    context, messages = conversation
    assert is_rewritten(messages, context, tools)


def test_text_of_the_agent_in_the_name_of_the_policy_is_found(conversation):
    context, messages = conversation
    written = {"role": "assistant", "content": "I am sure."}
    for index in range(3, len(messages) + 1):
        assert is_rewritten([*messages[:index], written, *messages[index:], QUESTION], context)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_history_is_accepted_only_if_its_prompt_has_what_it_shows(conversation, data):
    """Property: messages are dropped, repeated and swapped. The prompt shows what is left of them.

    So either the prompt continues the sampled tokens, and their messages are all there in their
    order. Or it is the rendering of the request.
    """
    context, messages = conversation
    indices = st.lists(st.integers(0, len(messages) - 1), min_size=1, max_size=8)
    changed = [messages[i] for i in data.draw(indices)]
    if data.draw(st.booleans()):
        changed = messages[: data.draw(st.integers(1, len(messages)))] + changed
    request = read_request({"messages": changed, "tools": TOOLS})
    prompt = asyncio.run(Histories(context).build_prompt(request))
    rendered = context.template.encode_prompt(env.render_items(changed_items(changed), ""), TOOLS)
    text = context.tokenizer.decode(prompt.ids)
    if prompt.is_rewritten or not prompt.turn_count:
        assert prompt.ids == rendered
    else:
        position = 0
        for message in changed:  # each text is there, in order
            position = text.index(message["content"].strip(), position)
        assert text.count("<|im_start|>assistant") - 1 == prompt.turn_count


TOKEN_IDS = st.integers(0, 300) | st.integers(0, 2**31 - 1)


@given(st.lists(TOKEN_IDS, min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_token_ids_that_no_policy_sampled_are_no_error(conversation, ids):
    context, messages = conversation
    changed = {**messages[2], "generation_token_ids": ids}
    request = read_request({"messages": [*messages[:2], changed, *messages[3:4]], "tools": TOOLS})
    prompt = asyncio.run(Histories(context).build_prompt(request))
    assert prompt.is_rewritten


def changed_items(messages):
    return [{k: v for k, v in each.items() if k not in TOKEN_FIELDS} for each in messages]


def test_the_first_rewritten_history_is_logged(conversation, caplog):
    context, messages = conversation
    histories = Histories(context)
    request = read_request({"messages": [QUESTION, *messages[2:]], "tools": TOOLS})
    for _ in range(3):
        asyncio.run(histories.build_prompt(request))
    assert histories.rewritten_count == 3
    assert [record.getMessage().count("not_contiguous") for record in caplog.records] == [1]


# --- the cache -----------------------------------------------------------------------------------


def count_work(monkeypatch, context) -> list[str]:
    """Record each check of a turn, and each encoding."""
    work = []

    def record(owner, name):
        original = getattr(owner, name)

        def call_original(*arguments, **options):
            work.append(name)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call_original)

    record(Histories, "is_consistent")
    record(context.template, "encode_prompt")
    record(context.template, "encode_continuation")
    return work


def test_the_work_of_a_request_does_not_grow_with_its_history(monkeypatch):
    tokenizer = chatml_tokenizer()
    context = context_of(one_turn_each([call()] * 12, tokenizer), tokenizer)
    histories = Histories(context)
    work = count_work(monkeypatch, context)
    messages = make_history(context, 12, histories)
    assert work.count("is_consistent") == 11 and work.count("encode_prompt") == 2
    assert work.count("encode_continuation") == 11 + 10
    work.clear()
    assert not is_rewritten(messages, context)
    assert work.count("is_consistent") == 12  # an endpoint without the cache


def test_the_cache_is_bounded_and_a_full_one_loses_only_time(monkeypatch):
    monkeypatch.setattr(openai_history, "MAX_CHECKED", 2)
    tokenizer = chatml_tokenizer()
    context = context_of(one_turn_each([call()] * 6, tokenizer), tokenizer)
    histories = Histories(context)
    messages = make_history(context, 6, histories)
    assert len(histories._checked) == 2
    request = read_request({"messages": messages[:4], "tools": TOOLS})  # after the first turn
    prompt = asyncio.run(histories.build_prompt(request))
    assert not prompt.is_rewritten and prompt.turn_count == 1


def test_an_accepted_history_does_not_cover_an_edited_one(conversation):
    context, messages = conversation
    histories = Histories(context)
    request = read_request({"messages": messages, "tools": TOOLS})
    assert not asyncio.run(histories.build_prompt(request)).is_rewritten
    for name, edited in edit_messages(messages[:-1]):
        request = read_request({"messages": [*edited, QUESTION], "tools": TOOLS})
        assert asyncio.run(histories.build_prompt(request)).is_rewritten, name


# --- limits --------------------------------------------------------------------------------------


def test_the_first_prompt_and_the_response_have_separate_limits():
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["Yes."] * 9, tokenizer)
    context = context_of(client, tokenizer, max_prompt_length=100, max_response_length=40)
    long_question = {"role": "user", "content": "x" * 90}
    reply = complete({"messages": [long_question]}, context)
    assert reply.status == 400 and reply.body["error"]["code"] == "context_length_exceeded"
    assert "context length" in reply.body["error"]["message"]
    message = reply_to({"messages": [QUESTION]}, context)
    reply = complete({"messages": [QUESTION, message, long_question]}, context)
    assert reply.status == 400 and "data.max_response_length=40" in reply.body["error"]["message"]
    assert len(client.prompts) == 1


@pytest.mark.parametrize("length", [5, 6, 40, 41, 60])
def test_all_tokens_after_the_first_prompt_count(length):
    """The same number of tokens as in an episode whose turns the kit runs."""
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["Yes.", "No, never."], tokenizer)
    context = context_of(client, tokenizer, max_response_length=length)
    message = reply_to({"messages": [QUESTION]}, context)
    assert len(message["generation_token_ids"]) == min(length, 5)
    reply = complete({"messages": [QUESTION, message, QUESTION]}, context)
    observed = context.template.encode_continuation([QUESTION], tokenizer.eos_token_id)
    room = length - 5 - len(observed)
    print(length, room, reply.status)
    assert reply.status == (200 if room > 0 else 400)
    if room > 0:
        choice = reply.body["choices"][0]
        assert choice["finish_reason"] == ("length" if room < 11 else "stop")
        assert len(choice["message"]["generation_token_ids"]) == min(room, 11)


def test_a_judges_request_may_have_the_length_of_the_engines_context():
    tokenizer = chatml_tokenizer()
    client = one_turn_each(["Yes."] * 2, tokenizer)
    context = context_of(client, tokenizer, max_prompt_length=50, max_response_length=80)
    body = {"messages": [{"role": "user", "content": "x" * 60}]}
    assert complete(body, context).status == 400
    assert complete({**body, "for_training": False}, context).status == 200
    body["messages"][0]["content"] *= 2
    reply = complete({**body, "for_training": False}, context)
    assert reply.status == 400 and "130" in reply.body["error"]["message"]


# --- the episode ---------------------------------------------------------------------------------


def make_items(messages) -> list[dict]:
    """Return messages as output items."""
    items = []
    for message in messages:
        if message["role"] == "assistant":
            text = {"type": "output_text", "text": message["content"]}
            fields = {name: message[name] for name in TOKEN_FIELDS}
            items.append({"type": "message", "role": "assistant", "content": [text], **fields})
    return items


def test_the_episode_of_a_rewritten_history_is_not_contiguous(conversation):
    """For each edit, and for each number of first turns that the agent's output lacks."""
    context, messages = conversation
    (answer,) = encode_turns(["Done."], context.tokenizer)
    failed = 0
    for name, edited in edit_messages(messages[:-1]):
        context.client.answers.append(list(answer))
        last = reply_to({"messages": [*edited, QUESTION], "tools": TOOLS}, context)
        output = make_items([*messages, last])
        for dropped in range(len(output) - 1):
            with pytest.raises(GymError) as caught:
                from_output_items(Episode("x:1", "g", "server", []), output[dropped:])
            assert caught.value.reason == "not_contiguous", (name, dropped)
            failed += 1
    print(failed, "episodes")
    from_output_items(Episode("x:1", "g", "server", []), make_items(messages))
