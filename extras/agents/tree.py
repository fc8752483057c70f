"""Describe an agent's episode for people: its training rows, and what each model call wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from env import Json
from kit.data.episode import Episode, TrainingRow, join_text

MAX_ROWS = 7
MAX_CALLS = 4  # of a row
MAX_CHARACTERS = 100


def describe_longest(episodes: Sequence[Episode]) -> Iterator[str]:
    """Yield lines about the rows and calls of the episode with most calls, at most 36."""
    if not episodes:
        return
    episode = max(episodes, key=count_calls)
    reward = "none" if episode.reward is None else f"{episode.reward:g}"
    yield f"the episode with most calls, of {episode.row_id}, reward {reward}:"
    for number, row in enumerate(episode.rows[:MAX_ROWS], 1):
        name = "main row" if number == 1 else f"row {number}"
        tokens = f"{len(row.prompt_ids)} tokens of prompt, {sum(row.response_mask)} sampled"
        yield f"    {name}: {tokens} in {len(row.turns)} calls"
        yield from describe_calls(row)


def count_calls(episode: Episode) -> int:
    """Return the number of model calls in the rows of an episode."""
    return sum(len(row.turns) for row in episode.rows)


def describe_calls(row: TrainingRow) -> Iterator[str]:
    """Yield a line about each of the first calls of a row: its tokens, then what was written."""
    start = 0
    for turn in row.turns[:MAX_CALLS]:
        texts = map(describe_item, row.output[start : turn.output_end])
        text = " ".join(" ".join(texts).split())
        yield f"        {turn.end - turn.start:4}  {text[:MAX_CHARACTERS]}"
        start = turn.output_end


def describe_item(item: Json) -> str:
    """Return the text of an item: a call, its output, or a message."""
    if item["type"] == "function_call":
        return f"{item['name']}({item['arguments']})"
    if item["type"] == "function_call_output":
        return f"=> {item['output']} =>"
    return join_text(item) if item.get("role") == "assistant" else ""
