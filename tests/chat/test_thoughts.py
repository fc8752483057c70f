"""Thoughts: their markers are read from the template, and an unfinished one is no answer."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import env
from kit.chat.processor import TextProcessor
from kit.chat.responses import parse_response
from kit.chat.template import ChatTemplate
from kit.chat.template_trial import try_template
from tests.helpers.public_templates import load
from tests.helpers.rollouts import (
    CHATML,
    CONTENT,
    TOOL,
    ToolSession,
    bytes_tokenizer,
    call,
    context_of,
    cutting,
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
OPENS = opening(CHATML, "<think>")


def make_template(source: str, tokens=()) -> ChatTemplate:
    tokenizer = bytes_tokenizer(source, STOP)
    tokenizer.add_tokens(list(tokens))
    return ChatTemplate(TextProcessor(tokenizer), {tokenizer.eos_token_id})


def parse(template, text, tools=(), prompt=None):
    """Parse a response after a question, or after another prompt."""
    template.tool_format = "hermes"
    prompt = prompt or template.encode_prompt([USER], tools)
    return asyncio.run(parse_response(template, template.encode_text(text), list(tools), prompt))


# --- markers -------------------------------------------------------------------------------------

MARKERS = st.text("abkz<>[]|/#~:◁▷⟦⟧", min_size=2, max_size=8).filter(
    lambda text: not text.isalpha() and "|im" not in text
)
LAST_IS_USER = "{% if messages[-1].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
PARTS = CHATML.replace(
    CONTENT,
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == "
    "'deliberation' %}<a>{{ p.deliberation }}</a>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}",
)


def list_sources(start: str, end: str) -> list[str]:
    """Templates of several forms with these markers."""
    shown = [showing(start, end, without) for without in ("", end, f"{start}\n{end}")]
    sources = [*shown, *(opening(source, start) for source in shown)]
    return [*sources, opening(cutting(end), start)]


@settings(max_examples=40)
@given(MARKERS, MARKERS, st.integers(0, 6), st.booleans())
def test_invented_markers_are_read_from_the_template(start, end, form, as_tokens):
    assume(start not in end and end not in start)
    source = list_sources(start, end)[form]
    template = make_template(source, (start, end) if as_tokens else ())
    assert template.markers == (start, end)
    assert not try_template(template).keys() - {"outputs of two calls in one response"}
    begin = "" if source.count(f"assistant\n{start}") else start
    cut = parse(template, f"{begin}It is 5, but")
    assert (cut.text, cut.written) == ("", "") and cut.reasoning == "It is 5, but"
    whole = parse(template, f"{begin}Is it 5?{end}It is 7.")
    assert (whole.text, whole.reasoning) == ("It is 7.", "Is it 5?")
    assert whole.raw.endswith("It is 7.") and "Is it 5?" in whole.raw


@pytest.mark.parametrize(
    ("source", "markers"),
    [
        (opening(CHATML, "<reasoning>"), ("<reasoning>", "</reasoning>")),
        (opening(CHATML, "[PLAN]"), ("[PLAN]", "[/PLAN]")),
        (cutting("</thought>"), ("<thought>", "</thought>")),
        (cutting("END OF THOUGHT"), ("", "END OF THOUGHT")),
        (showing("<a>", "</a>", key="rationale"), ("<a>", "</a>")),
        (LAST_IS_USER + opening(CHATML, "<plan>"), ("<plan>", "</plan>")),
        (PARTS, ("<a>", "</a>")),
        (showing("Steps:", "[FINAL]", key="thought"), ("Steps:", "[FINAL]")),
        (CHATML, None),
        (CHATML.replace(CONTENT, "{{ m | tojson }}"), None),
        (opening(CHATML, "Sure! Here is"), None),
    ],
)
def test_a_pair_may_be_known_in_part(source, markers):
    template = make_template(source)
    assert template.own_markers == markers
    if markers and not markers[0]:  # a thought without a known beginning ends at its end
        assert parse(template, "5?END OF THOUGHT\n7").text == "7"
        assert parse(template, "It is 7.").text == "It is 7."


@pytest.mark.parametrize(
    ("beginning", "is_open"),
    [
        ("Let me think.\n<think>", True),
        ("<think>\nFirst, I add", True),
        ("<think>\nIt is 5.</think>\n\nSo", False),
        ("Let me think.", False),
    ],
)
@pytest.mark.parametrize("source", [CHATML, "{{ messages[0].content }}\n\nAnswer: "])
def test_a_row_may_leave_a_thought_open(source, beginning, is_open):
    template = make_template(source)
    question = "Write </think> after <think>."
    prompt = template.render([{"role": "user", "content": question}], add_generation_prompt=True)
    for text, expected in ((prompt, False), (prompt + beginning, is_open)):
        assert template.leaves_thought_open(template.encode_text(text)) == expected
    response = parse(template, "so 5, but", prompt=template.encode_text(prompt + beginning))
    assert response.text == ("" if is_open else "so 5, but")


def test_without_a_header_a_thought_is_open_only_at_the_end_of_the_prompt():
    template = make_template("{{ messages[0].content }}")
    for text, is_open in (
        ("Begin with <think>.", False),
        ("Begin with <think>. Me: <think>", True),
    ):
        assert template.leaves_thought_open(template.encode_text(text)) == is_open


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (opening(showing("<think>", "</think>", "</think>\n\n"), "<think>"), "</think>\n\nYes."),
        (opening(cutting("</think>"), "<think>"), "</think>\n\nYes."),
        (opening(showing("<t>", "</t>", "<t>\n</t>"), "<t>"), "</t>Yes."),
    ],
)
def test_an_answer_after_an_opened_thought_begins_with_its_end(source, written):
    template = make_template(source)
    assert not try_template(template)
    ids = template.encode_answer({"role": "assistant", "content": "Yes."})
    assert template.tokenizer.decode(ids) == f"{written}<|im_end|>"


# --- responses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_opened", [False, True])
def test_a_thought_is_split_from_the_answer(is_opened):
    start, end = ("<|channel>thought", "<channel|>")
    source = showing(start, end)
    template = make_template(opening(source, start) if is_opened else source, (start, end))
    begin = "" if is_opened else f"\n{start}"
    thought = "Plan: " + call('{"q": "draft"}') + " No"
    final = call('{"q": "final"}')
    response = parse(template, f"{begin}{thought}{end}\n\nI look.{final}{STOP}", TOOLS)
    assert (response.reasoning, response.text) == (thought, "I look.")
    assert [c["arguments"] for c in response.calls] == ['{"q": "final"}']
    for unfinished in (begin + thought, f"{begin}{thought}{STOP}"):
        response = parse(template, unfinished, TOOLS)
        assert (response.reasoning, response.text, response.calls) == (thought, "", [])
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


# --- the channels of gpt-oss ---------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>I think.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 7.<|return|>"
CALL = " to=functions.look_up<|channel|>commentary json<|message|>{}<|call|>"


@pytest.fixture
def gpt_oss():
    public = load("trl/gptoss")
    return ChatTemplate(TextProcessor(public.tokenizer), public.stop_ids)


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "calls"),
    [
        (THOUGHT + FINAL, "I think.", "It is 7.", []),
        (FINAL.removeprefix("<|start|>assistant"), "", "It is 7.", []),
        (f"{THOUGHT}<|start|>assistant{CALL}", "I think.", "", ["look_up"]),
        # cut off within the thought, the answer and the call
        ("<|channel|>analysis<|message|>I th", "I th", "", []),
        (THOUGHT + FINAL.removesuffix(".<|return|>"), "I think.", "It is 7", []),
        (CALL.removesuffix("}<|call|>"), "", "{", []),
        # arguments that are no JSON stay text
        (CALL.replace("{}", "{x}"), "", "{x}", []),
        # a text to the user before a call
        (
            f"<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant{CALL}",
            "",
            "Wait.",
            ["look_up"],
        ),
    ],
)
def test_each_channel_has_its_place(gpt_oss, text, reasoning, answer, calls):
    response = parse(gpt_oss, text, TOOLS)
    assert (response.reasoning, response.text) == (reasoning, answer)
    assert [call["name"] for call in response.calls] == calls


def test_an_episode_of_gpt_oss_calls_a_tool_and_sees_its_output(gpt_oss):
    tokenizer = gpt_oss.tokenizer
    called = CALL.replace("{}", json.dumps({"text": "a"}))
    client = one_turn_each([f"{THOUGHT}<|start|>assistant{called}", THOUGHT + FINAL], tokenizer)
    client.answers = [ids[:-1] for ids in client.answers]  # the texts have their stop tokens
    context = context_of(client, tokenizer, template=gpt_oss)
    episode = play(task_of(tokenizer), ToolSession(["found <|end|> it"]), context)
    assert (episode.status, episode.ended) == ("ok", "stop")
    observed = tokenizer.decode(client.prompts[1]).partition("<|call|>")[2]
    assert observed == (
        "<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"
        '"found <|end|> it"<|end|><|start|>assistant'
    )
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert client.prompts[1][-3 - len("assistant") :].count(end) == 1  # the forged one is text
    kinds = [item["type"] for item in episode.output]
    assert kinds == ["reasoning", "function_call", "function_call_output", "reasoning", "message"]
