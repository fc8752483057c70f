"""The markers around a thought are found in templates that no list has."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kit.chat.processor import TextProcessor
from kit.chat.responses import parse_response
from kit.chat.template import ChatTemplate
from kit.chat.template_trial import try_template
from tests.helpers.rollouts import (
    CHATML,
    CONTENT,
    bytes_tokenizer,
    context_of,
    cutting,
    opening,
    showing,
)

USER = {"role": "user", "content": "hi"}
LAST_IS_USER = "{% if messages[-1].role != 'user' %}{{ raise_exception('no user') }}{% endif %}"
PARTS = CHATML.replace(
    CONTENT,
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == "
    "'deliberation' %}<a>{{ p.deliberation }}</a>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}",
)
MARKERS = st.text("abkz<>[]|/#~:◁▷⟦⟧", min_size=2, max_size=8).filter(
    lambda text: not text.isalpha() and "|im" not in text
)


def make_template(source: str, tokens=(), **arguments) -> ChatTemplate:
    tokenizer = bytes_tokenizer(source, "<|im_end|>")
    tokenizer.add_tokens(list(tokens))
    return ChatTemplate(TextProcessor(tokenizer), {tokenizer.eos_token_id}, arguments)


def list_sources(start: str, end: str) -> list[str]:
    """Templates of several forms with these markers."""
    shown = [showing(start, end, without) for without in ("", end, f"{start}\n{end}")]
    sources = [*shown, *(opening(source, start) for source in shown)]
    return [*sources, opening(cutting(end), start)]


def parse(template, prompt, text):
    context = context_of(None, template.tokenizer, template=template)
    ids = template.tokenizer.encode(text, add_special_tokens=False)
    return asyncio.run(parse_response(context.template, ids, [], prompt))


@settings(max_examples=40)
@given(MARKERS, MARKERS, st.integers(0, 6), st.booleans())
def test_invented_markers_are_read_from_the_template(start, end, form, as_tokens):
    assume(start not in end and end not in start)
    source = list_sources(start, end)[form]
    template = make_template(source, (start, end) if as_tokens else ())
    assert template.markers == (start, end)
    assert not try_template(template).keys() - {"outputs of two calls in one response"}
    prompt = template.encode_prompt([USER])
    begin = "" if source.count(f"assistant\n{start}") else start
    cut = parse(template, prompt, f"{begin}It is 5, but")
    assert (cut.text, cut.written) == ("", "") and cut.reasoning == "It is 5, but"
    whole = parse(template, prompt, f"{begin}Is it 5?{end}It is 7.")
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
    assert make_template(source).own_markers == markers


def test_a_thought_without_a_known_beginning_ends_at_its_end():
    template = make_template(cutting("END OF THOUGHT"))
    prompt = template.encode_prompt([USER])
    assert parse(template, prompt, "5?END OF THOUGHT\n7").text == "7"
    assert parse(template, prompt, "It is 7.").text == "It is 7."


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
    response = parse(template, template.encode_text(prompt + beginning), "so 5, but")
    assert response.text == ("" if is_open else "so 5, but")


def test_without_a_header_a_thought_is_open_only_at_the_end_of_the_prompt():
    template = make_template("{{ messages[0].content }}")
    for text, is_open in (
        ("Begin with <think>.", False),
        ("Begin with <think>. Me: <think>", True),
    ):
        assert template.leaves_thought_open(template.encode_text(text)) == is_open


# --- past answers without the thought that the prompt opens --------------------------------------


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
