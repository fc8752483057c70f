"""Thoughts: the part of a response that a reasoning model writes before its answer.

A thought is closed by its end marker. It begins at the start of the response, or the prompt has
opened it. A thought that is not closed is not an answer and has no tool calls.

Protects: rewards, from a thought that would count as the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Markers(NamedTuple):
    """The texts around a thought."""

    start: str  # "" if it is not known
    end: str


THINK = Markers("<think>", "</think>")


class SplitResponse(NamedTuple):
    """The ids of a response, split after its thought."""

    thought: list[int]  # with its markers
    answer: list[int]  # empty if the thought is not closed


def split_thought(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], markers: Markers, is_open: bool = False
) -> SplitResponse:
    """Split a response after its thought. ids: without a stop token at the end.

    Only the first end marker counts: later ones are text of the answer. An end marker without a
    start marker ends a thought, too, because some prompts ask for a thought in their text.
    is_open: whether the prompt has opened the thought.
    """
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    starts = bool(markers.start) and text.lstrip().startswith(markers.start)
    is_open = is_open or starts
    if not is_open and markers.end not in text:
        return SplitResponse([], ids)
    end = find_end(tokenizer, ids, markers.end)
    if is_open:
        return SplitResponse(ids[:end], ids[end:])
    before = tokenizer.decode(ids[:end], skip_special_tokens=False)
    if (markers.start and markers.start in before) or markers.end not in before:
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


class SplitText(NamedTuple):
    """A text without its thoughts, and these."""

    answer: str
    thoughts: list[str]
    open_thought: str  # the text after a marker that opens a thought without an end


def split_text(text: str, markers: Markers) -> SplitText:
    """Split a text into its thoughts and the rest, in linear time."""
    start, end = markers
    answer = ""
    found: list[str] = []
    position = 0
    opened = text.find(start)
    while start and opened >= 0:
        answer += text[position:opened]
        closed = text.find(end, opened)
        if closed < 0:
            return SplitText(answer, found, text[opened:])
        found.append(text[opened + len(start) : closed])
        position = closed + len(end)
        opened = text.find(start, position)
    return SplitText(answer + text[position:], found, "")


def decode_thought(tokenizer: PreTrainedTokenizerBase, ids: list[int], markers: Markers) -> str:
    """Decode the ids of a thought to its text, without the markers."""
    text = str(tokenizer.decode(ids, skip_special_tokens=False)).lstrip()
    return text.removeprefix(markers.start).removesuffix(markers.end).strip()
