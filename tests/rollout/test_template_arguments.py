"""data.apply_chat_template_kwargs reaches the template wherever text becomes tokens."""

from __future__ import annotations

import pytest

from kit.data.processor import TextProcessor
from kit.rollout.chat_template import ChatTemplate
from tests.helpers.public_templates import load

USER = {"role": "user", "content": "hi"}
NO_THOUGHT = "<think>\n\n</think>\n\n"
QWEN3 = ["trl/qwen3", "trl/qwen3_training", "axolotl/qwen3"]


@pytest.mark.parametrize("name", QWEN3)
def test_without_thinking_each_turn_of_qwen3_opens_with_an_empty_thought(name):
    public = load(name)
    stop = public.tokenizer.eos_token_id
    texts = {}
    for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        template = ChatTemplate(TextProcessor(public.tokenizer), public.stop_ids, arguments)
        parts = [
            template.encode_prompt([USER]),
            template.encode_first_prompt([USER], "go", [], "x:1"),
            template.encode_continuation([USER], stop),
        ]
        texts[str(arguments)] = [public.tokenizer.decode(ids) for ids in parts]
    thinking, explicit, direct = texts.values()
    assert thinking == explicit and not any(NO_THOUGHT in text for text in thinking)
    # axolotl's template opens the thought of a policy that thinks
    assert direct == [text.removesuffix("<think>\n\n") + NO_THOUGHT for text in thinking]
