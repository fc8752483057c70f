"""Thoughts: an unfinished one is no answer, and only its end marker ends it."""

from __future__ import annotations

import asyncio
import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import env
from kit.rollout.chat import parse_response
from tests.helpers.rollouts import (
    CHATML,
    TOOL,
    ToolSession,
    bytes_tokenizer,
    call,
    context_of,
    encode_turns,
    one_turn_each,
    play,
    task_of,
)

TOOLS = env.render_tools([TOOL], "x:1")
OPENS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
MARKERS = [
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
]


def make_context(source=CHATML, tokens=()):
    tokenizer = bytes_tokenizer(source, "<|im_end|>")
    tokenizer.add_tokens(list(tokens))
    return context_of(None, tokenizer)


def parse(context, text, tools=TOOLS):
    """Parse a response after the context's generation prompt."""
    prompt = context.template.encode_prompt([{"role": "user", "content": "Who?"}], tools)
    ids = context.tokenizer.encode(text, add_special_tokens=False)
    return asyncio.run(parse_response(context, ids, tools, prompt))


@functools.cache
def opens_context():
    """The context of a template whose generation prompt opens a thought."""
    return make_context(OPENS)


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(("start", "end"), MARKERS)
@pytest.mark.parametrize("is_opened", [False, True])
def test_a_thought_is_split_from_the_answer(is_opened, start, end, as_tokens):
    thought = (
        f"{{% if m.reasoning_content %}}{start}{{{{ m.reasoning_content }}}}{end}{{% endif %}}"
    )
    source = CHATML.replace("{{ m.content or '' }}", thought + "{{ m.content or '' }}")
    if is_opened:
        source = source.replace("assistant\n{% endif %}", f"assistant\n{start}\n{{% endif %}}")
    context = make_context(source, (start, end) if as_tokens else ())
    begin = "" if is_opened else f"\n{start}"
    draft = call('{"q": "draft"}')
    final = call('{"q": "final"}')
    stop = "<|im_end|>"

    response = parse(context, f"{begin}Plan: {draft} No.{end}\n\nIt is 7.{stop}")
    assert (response.reasoning, response.text) == (f"Plan: {draft} No.", "It is 7.")
    assert not response.calls

    response = parse(context, f"{begin}Plan: {draft} No.{end}{final}{stop}")
    assert [c["arguments"] for c in response.calls] == ['{"q": "final"}']
    assert response.reasoning == f"Plan: {draft} No."

    for unfinished in (f"{begin}Plan: {draft} No", f"{begin}Plan: {draft} No{stop}"):
        response = parse(context, unfinished)
        assert (response.reasoning, response.text) == (f"Plan: {draft} No", "")
        assert not response.calls
        kinds = [item["type"] for item in response.items]
        assert kinds == ["reasoning", "message"]  # the verifier gets an empty message

    # after the first end marker all is text of the answer, unless a parser or tokenizer removes it
    response = parse(context, f"{begin}Plan{end}a {start}b{end} c{stop}", tools=[])
    assert response.reasoning == "Plan"
    assert response.text.startswith("a ") and response.text.endswith(" c")


def test_markers_that_are_no_thought_stay_text():
    context = make_context()
    assert parse(context, "Say <think>x</think> to think.", []).text == (
        "Say <think>x</think> to think."
    )
    assert parse(context, "It is 7.", []).reasoning == ""
    # an end marker alone: the prompt's text has asked for a thought
    response = parse(context, "So 3 + 4.</think>It is 7.", [])
    assert (response.reasoning, response.text) == ("So 3 + 4.", "It is 7.")


def test_a_marker_in_an_earlier_message_opens_nothing():
    context = make_context()
    tokenizer = context.tokenizer
    messages = [{"role": "user", "content": "Write <think>"}]
    prompt = context.template.encode_prompt(messages)
    ids = tokenizer.encode("It is 7.", add_special_tokens=False)
    assert asyncio.run(parse_response(context, ids, [], prompt)).text == "It is 7."


@given(st.text(max_size=40), st.text(max_size=40))
def test_thought_and_answer_are_what_was_written(thought, answer):
    context = opens_context()
    if "</think>" in thought or "think>" in answer:
        return
    response = parse(context, f"{thought}</think>{answer}", [])
    assert response.reasoning == thought.strip().removeprefix("<think>").strip()
    assert response.text == answer.lstrip("\n")
    unfinished = parse(context, f"{thought}{answer}.", [])
    assert unfinished.text == ""


@pytest.mark.parametrize(
    ("written", "cut", "answer"),
    [
        ("It may be \\boxed{5}, but let me see", 6, ""),
        ("It is \\boxed{5}.</think>\n\nI cannot say.", 0, "I cannot say."),
    ],
)
def test_servers_and_functions_read_the_same_answer(written, cut, answer):
    tokenizer = bytes_tokenizer(OPENS, "<|im_end|>")
    (ids,) = encode_turns([written], tokenizer)
    session = ToolSession([])
    context = context_of(
        one_turn_each([written], tokenizer), tokenizer, max_response_length=len(ids) - cut
    )
    episode = play(task_of(tokenizer), session, context)
    assert episode.ended == ("length" if cut else "stop")
    thought, message = session.verified["output"]
    assert thought["type"] == "reasoning" and "5" in thought["summary"][0]["text"]
    assert message["content"][0]["text"] == session.last.written == episode.response == answer
    assert session.last.raw == written[: len(written) - max(cut - 1, 0)]


def test_a_draft_of_a_call_is_not_made_in_an_episode():
    tokenizer = bytes_tokenizer(OPENS, "<|im_end|>")
    texts = [f"{call()} no</think>{call()}", "so</think>done"]
    client = one_turn_each(texts, tokenizer)
    session = ToolSession(["RESULT", "a second call"])
    episode = play(task_of(tokenizer), session, context_of(client, tokenizer))
    assert session.answers == ["a second call"] and episode.ended == "stop"
    assert len(episode.turns) == 2
