"""A response is read as by `renderers`, which writes each model family's format in Python.

It is an independent second opinion. It knows the formats of 28 families. test_public_templates.py
compares prompts and whole conversations with the templates themselves.
"""

from __future__ import annotations

import asyncio

import pytest

from kit.chat import tool_calls
from kit.chat.processor import TextProcessor
from kit.chat.responses import parse_response
from kit.chat.template import LATER_SYSTEM, TOOL, ChatTemplate, make_call
from kit.chat.template_trial import find_tool_formats, try_template
from tests.helpers.public_templates import MODEL_TOKENS, list_template_files, load, make_tokenizer
from tests.helpers.rollouts import context_of

FAMILIES = {  # {template: its family in `renderers`}
    "trl/glm4moe": "glm-4.5",
    "trl/nemotron_3_nano": "nemotron-3",
    "trl/qwen3": "qwen3",
    "trl/qwen3_5_think": "qwen3.5",
    "trl/qwen3_6": "qwen3.6",
    "trl/qwen3_8": "qwen3.8",
    "trl/qwen3_vl": "qwen3-vl",
}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]


class Pair:
    """A template of the kit and the renderer of its family, with one tokenizer."""

    def __init__(self, name: str):
        import renderers
        from renderers.base import RENDERER_REGISTRY, _populate_registry

        _populate_registry()
        self.name = name
        public = load(name)
        tokens = [*public.tokenizer.get_added_vocab(), *MODEL_TOKENS]
        tokenizer = make_tokenizer(
            public.tokenizer.chat_template, public.tokenizer.eos_token, tokens
        )
        self.tokenizer = tokenizer
        stop_texts = public.tokenizer.convert_ids_to_tokens(sorted(public.stop_ids))
        stop_ids = {tokenizer.get_vocab()[text] for text in stop_texts}
        self.template = ChatTemplate(TextProcessor(tokenizer), stop_ids)
        assert try_template(self.template).keys() <= {LATER_SYSTEM}
        config = renderers.config_from_name(FAMILIES[name])
        config = type(config)(thinking_retention="all")
        self.renderer = RENDERER_REGISTRY[FAMILIES[name]](tokenizer, config)
        self.tool_format = next(find_tool_formats(self.template, tool_calls.list_tool_formats()))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    assert request.param in list_template_files()
    return Pair(request.param)


def parse(pair, prompt, ids):
    context = context_of(None, pair.tokenizer, tool_format=pair.tool_format, template=pair.template)
    ours = asyncio.run(parse_response(context.template, ids, [TOOL], prompt))
    theirs = pair.renderer.parse_response(ids, tools=[TOOL], prompt_ids=prompt)
    return ours, theirs


@pytest.mark.soak
def test_a_response_is_read_in_the_same_way(pair):
    template = pair.template
    prompt = template.encode_prompt(QUESTION, [TOOL])
    start, end = template.markers
    is_open = template.split_thought(prompt, [0]).answer == []
    opening = "" if is_open else start
    call = {"role": "assistant", "content": "", "tool_calls": [make_call("a", {"text": "x"})]}
    written = pair.tokenizer.decode(template.encode_answer(call)[:-1]).rpartition(end)[2].strip()
    stop = pair.tokenizer.eos_token
    responses = [
        f"{opening}\nA thought.\n{end}\n\nAn answer.{stop}",
        f"{opening}\nA thought.\n{end}\n\n{written}{stop}",
        f"{opening}\nA thought that is cut",
    ]
    if pair.name != "trl/glm4moe":  # GLM's answers may have a second thought
        responses.append(f"{opening}\nA thought.{end}An answer with {start}markers{end}{stop}")
    if not is_open and pair.name != "trl/glm4moe":  # all responses of GLM begin with a thought
        responses += [f"An answer.{stop}", f"{written}{stop}"]
    for response in responses:
        ids = pair.tokenizer.encode(response, add_special_tokens=False)
        ours, theirs = parse(pair, prompt, ids)
        assert ours.reasoning == (theirs.reasoning_content or "").strip(), response
        if not ours.calls:
            # the markers are special tokens here, and so they are no text for the kit
            content = theirs.content.replace(start, "").replace(end, "").strip()
            assert ours.text.strip() == content, response
        assert [c["name"] for c in ours.calls] == [c.name for c in theirs.tool_calls], response
