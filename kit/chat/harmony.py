"""Harmony, the response format of gpt-oss: a response consists of messages in channels.

    <|channel|>analysis<|message|>a thought<|end|><|start|>assistant<|channel|>final<|message|>...

The messages of the channel `analysis` are the thought. A message to `functions.NAME` is a call.

Protects: rewards, from a thought or a cut call of gpt-oss that would count as its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = {  # {argument of parse_gpt_oss: token}
    "return_id": "<|return|>",
    "call_id": "<|call|>",
    "start_id": "<|start|>",
    "end_id": "<|end|>",
    "channel_id": "<|channel|>",
    "message_id": "<|message|>",
    "constrain_id": "<|constrain|>",
}
NEEDED = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>")


class HarmonyResponse(NamedTuple):
    """A response in Harmony, by channel."""

    thought: str
    text: str
    calls: list[tuple[str, str]]  # name and arguments of each, as JSON text


def is_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes Harmony."""
    template = str(tokenizer.chat_template or "")
    vocabulary = tokenizer.get_added_vocab()
    return all(token in template and token in vocabulary for token in NEEDED)


def parse(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], ids: list[int]
) -> HarmonyResponse:
    """Parse a response. Its first message begins in the prompt, with `<|start|>assistant`.

    A call that is not closed, or whose arguments are not JSON, is text.
    """
    from renderers.base import ToolCallParseStatus
    from renderers.parsing import parse_gpt_oss

    vocabulary = tokenizer.get_added_vocab()
    token_ids = {name: vocabulary.get(token, -1) for name, token in TOKENS.items()}
    opening = find_opening(list(prompt_ids), token_ids["start_id"])
    parsed = parse_gpt_oss(tokenizer, opening + ids, **token_ids)
    thought = parsed.reasoning_content or ""
    if not parsed.reasoning_complete:
        return HarmonyResponse(thought, "", [])
    texts = [parsed.content]
    calls = []
    for call in parsed.tool_calls:
        if call.status == ToolCallParseStatus.OK and call.name:
            calls.append((call.name, call.raw))
        else:
            texts.append(call.raw)
    return HarmonyResponse(thought, "\n".join(text for text in texts if text), calls)


def find_opening(prompt_ids: list[int], start_id: int) -> list[int]:
    """Return the ids of the last message in a prompt, from its `<|start|>` on."""
    for index in range(len(prompt_ids) - 1, -1, -1):
        if prompt_ids[index] == start_id:
            return prompt_ids[index:]
    return [start_id]
