"""Thoughts: an unfinished one is no answer, and its markers are read from the template."""

from __future__ import annotations

import asyncio

import pytest

import env
from kit.chat.processor import TextProcessor
from kit.chat.responses import parse_response
from kit.chat.template import ChatTemplate
from tests.helpers.rollouts import (
    CHATML,
    TOOL,
    ToolSession,
    bytes_tokenizer,
    call,
    context_of,
    encode_turns,
    one_turn_each,
    opening,
    play,
    showing,
    task_of,
)

TOOLS = env.render_tools([TOOL], "x:1")
USER = {"role": "user", "content": "Who?"}
STOP = "<|im_end|>"


def make_template(source: str, tokens=()) -> ChatTemplate:
    tokenizer = bytes_tokenizer(source, STOP)
    tokenizer.add_tokens(list(tokens))
    return ChatTemplate(TextProcessor(tokenizer), {tokenizer.eos_token_id})


def parse(template, text, tools=(), prompt=None):
    """Parse a response after a question, or after another prompt."""
    context = context_of(None, template.tokenizer, template=template)
    prompt = prompt or template.encode_prompt([USER], tools)
    ids = template.tokenizer.encode(text, add_special_tokens=False)
    return asyncio.run(parse_response(context.template, ids, list(tools), prompt))


OPENS = opening(CHATML, "<think>")


# --- a response ----------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("is_opened", [False, True])
def test_a_thought_is_split_from_the_answer(is_opened, as_tokens):
    start, end = ("<|channel>thought", "<channel|>")
    source = showing(start, end)
    template = make_template(
        opening(source, start) if is_opened else source, (start, end) if as_tokens else ()
    )
    begin = "" if is_opened else f"\n{start}"
    draft = call('{"q": "draft"}')

    response = parse(template, f"{begin}Plan: {draft} No.{end}\n\nIt is 7.{STOP}", TOOLS)
    assert (response.reasoning, response.text) == (f"Plan: {draft} No.", "It is 7.")
    assert not response.calls

    final = call('{"q": "final"}')
    response = parse(template, f"{begin}Plan: {draft} No.{end}{final}{STOP}", TOOLS)
    assert [c["arguments"] for c in response.calls] == ['{"q": "final"}']
    assert response.reasoning == f"Plan: {draft} No."

    for unfinished in (f"{begin}Plan: {draft} No", f"{begin}Plan: {draft} No{STOP}"):
        response = parse(template, unfinished, TOOLS)
        assert (response.reasoning, response.text) == (f"Plan: {draft} No", "")
        assert not response.calls
        kinds = [item["type"] for item in response.items]
        assert kinds == ["reasoning", "message"]  # the verifier gets an empty message

    # after the first end marker all is text of the answer, unless a parser or tokenizer removes it
    response = parse(template, f"{begin}Plan{end}a {start}b{end} c{STOP}")
    assert response.reasoning == "Plan"
    assert response.text.startswith("a ") and response.text.endswith(" c")


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("Say <think>x</think> to think.", "", "Say <think>x</think> to think."),
        ("It is 7.", "", "It is 7."),
        # an end marker alone: the prompt's text has asked for a thought
        ("So 3 + 4.</think>It is 7.", "So 3 + 4.", "It is 7."),
    ],
)
def test_markers_that_are_no_thought_stay_text(text, thought, answer):
    response = parse(make_template(CHATML), text)
    assert (response.reasoning, response.text) == (thought, answer)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"Hm. <think>maybe {call()} no</think>It is 5.", 0),
        (f"Sure.\n<think>draft {call()}", 0),
        (f"<think>a</think>{call()}\n<think>no {call()}</think>", 1),
        (call('{"text": "<think>"}'), 1),
    ],
)
def test_a_call_in_a_later_thought_is_a_draft(text, count):
    assert len(parse(make_template(CHATML), text, TOOLS).calls) == count


@pytest.mark.parametrize(
    ("written", "cut", "answer"),
    [
        ("It may be \\boxed{5}, but let me see", 6, ""),
        ("It is \\boxed{5}.</think>\n\nI cannot say.", 0, "I cannot say."),
    ],
)
def test_servers_and_functions_read_the_same_answer(written, cut, answer):
    tokenizer = bytes_tokenizer(OPENS, STOP)
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
