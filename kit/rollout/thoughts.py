"""Thoughts: the part of a response that a reasoning model writes before its answer.

A thought is closed by its end marker. It begins at the start of the response, or the prompt has
opened it. A thought that is not closed is not an answer and has no tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAIL = 32  # tokens at the end of a prompt, where the template may have opened a thought


class Markers(NamedTuple):
    """The texts around a thought."""

    start: str
    end: str


MARKERS = (
    Markers("<think>", "</think>"),
    Markers("<|channel>thought", "<channel|>"),  # Gemma 4
    Markers("[THINK]", "[/THINK]"),  # Magistral
    Markers("<seed:think>", "</seed:think>"),
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    Markers("<longcat_think>", "</longcat_think>"),
    Markers("<mm:think>", "</mm:think>"),  # MiniMax M3
    Markers("◁think▷", "◁/think▷"),  # Kimi-VL
)


class SplitResponse(NamedTuple):
    """The ids of a response, split after its thought."""

    thought: list[int]  # with its markers
    answer: list[int]  # empty if the thought is not closed


def find_markers(tokenizer: PreTrainedTokenizerBase) -> Markers:
    """Find the markers that the chat template or else the vocabulary has, or `<think>`."""
    template = str(tokenizer.chat_template or "")
    vocabulary = {token.content for token in tokenizer.added_tokens_decoder.values()}
    in_template = [markers for markers in MARKERS if markers.end in template]
    in_vocabulary = [markers for markers in MARKERS if markers.end in vocabulary]
    return next(iter([*in_template, *in_vocabulary]), MARKERS[0])


def split_thought(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], markers: Markers, is_open: bool = False
) -> SplitResponse:
    """Split a response after its thought. ids: without a stop token at the end.

    Only the first end marker counts: later ones are text of the answer. An end marker without a
    start marker ends a thought, too, because some prompts ask for a thought in their text.
    is_open: whether the prompt has opened the thought (`opens_thought`).
    """
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    is_open = is_open or text.lstrip().startswith(markers.start)
    if not is_open and markers.end not in text:
        return SplitResponse([], ids)
    end = find_end(tokenizer, ids, markers.end)
    if is_open:
        return SplitResponse(ids[:end], ids[end:])
    before = tokenizer.decode(ids[:end], skip_special_tokens=False)
    if markers.start in before or markers.end not in before:
        return SplitResponse([], ids)
    return SplitResponse(ids[:end], ids[end:])


def find_end(tokenizer: PreTrainedTokenizerBase, ids: list[int], marker: str) -> int:
    """Find the index after the first `marker`, which is one token or several; else len(ids)."""
    marker_id = tokenizer.get_added_vocab().get(marker)
    if marker_id is not None:
        return ids.index(marker_id) + 1 if marker_id in ids else len(ids)
    low = 0
    high = len(ids)
    while low < high:  # the shortest beginning of `ids` whose text has the marker
        middle = (low + high) // 2
        if marker in tokenizer.decode(ids[:middle], skip_special_tokens=False):
            high = middle
        else:
            low = middle + 1
    return low


def opens_thought(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], markers: Markers
) -> bool:
    """Return whether a prompt ends with the start marker of a thought and white space."""
    tail = tokenizer.decode(list(prompt_ids[-TAIL:]), skip_special_tokens=False)
    return str(tail).rstrip().endswith(markers.start)


def remove_thoughts(text: str, markers: Markers) -> str:
    """Remove all thoughts of a text, and the rest of the text after one that is not closed."""
    answer = ""
    while markers.start in text:
        before, _, rest = text.partition(markers.start)
        _, _, text = rest.partition(markers.end)
        answer += before
    return answer + text


def decode_thought(tokenizer: PreTrainedTokenizerBase, ids: list[int], markers: Markers) -> str:
    """Decode the ids of a thought to its text, without the markers."""
    text = str(tokenizer.decode(ids, skip_special_tokens=False)).lstrip()
    return text.removeprefix(markers.start).removesuffix(markers.end).strip()
