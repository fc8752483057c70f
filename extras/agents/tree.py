"""Describe an agent's episode for people: its training rows, and what each model call wrote."""

from __future__ import annotations

from collections.abc import Iterator

from env import Json
from kit.data.episode import Branch, Episode, join_text

MAX_ROWS = 8
MAX_CALLS = 4  # of a row
MAX_CHARACTERS = 80


def describe_rows(episode: Episode) -> Iterator[str]:
    """Yield lines about the rows of an episode, at most 40."""
    rows = [episode, *episode.branches]
    calls = sum(len(row.turns) for row in rows)
    tokens = sum(sum(row.response_mask) for row in rows)
    yield f"an episode of {episode.row_id}: {calls} model calls, {tokens} sampled tokens"
    for number, row in enumerate(rows[:MAX_ROWS], 1):
        name = "main row" if number == 1 else f"row {number}"
        yield f"    {name}: {len(row.prompt_ids)} tokens of prompt, {len(row.turns)} calls"
        yield from describe_calls(row)


def describe_calls(row: Episode | Branch) -> Iterator[str]:
    """Yield a line about each of the first calls of a row."""
    start = 0
    for turn in row.turns[:MAX_CALLS]:
        texts = list(map(describe_item, row.output[start : turn.output_end]))
        text = " ".join(" ".join(texts).split())
        yield f"        {turn.end - turn.start:5} tokens  {text[:MAX_CHARACTERS]}"
        start = turn.output_end


def describe_item(item: Json) -> str:
    """Return the text of an item: a call, its output, or a message."""
    if item["type"] == "function_call":
        return f"{item['name']}({item['arguments']})"
    if item["type"] == "function_call_output":
        return f"=> {item['output']} =>"
    return join_text(item) if item.get("role") == "assistant" else ""
