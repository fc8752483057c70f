"""Prepare the episodes of the report page: the table, and each episode as it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from env import Json
from kit.data.episode import LOG_PROBS, SAMPLED_IDS
from lab.report.metric_docs import find_status
from lab.run_folder import RunFolder, SavedEpisode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_PAGE_TOKENS = 4_000_000  # tokens with log-probs on the page; they take 12 MB
MAX_CALL_TOKENS = 50_000  # of one call; a longer one is shown as text only
MAX_CELL_CHARACTERS = 4_000  # of a text in a table
MAX_TEXT_CHARACTERS = 100_000  # of a text in an opened episode; more would take a browser seconds
RANKED = 3  # best and worst episodes of each file
TABLE_COLUMNS = (
    *("run", "step", "file", "rank", "server", "prompt", "response", "reward"),
    *("reward_components", "status", "ended", "tokens", "turns", "tool_calls", "seconds", "row_id"),
)
# Keys of a record that an opened episode does not list, because it shows them in another way.
UNLISTED_KEYS = {"agent_ref", "_ng_task_index", "_ng_rollout_index"}


# --- the table -----------------------------------------------------------------------------------


def tabulate_episodes(runs: Sequence[RunFolder]) -> Json:
    """Make the columns of the episode table, of all runs: {name: values}. `run`: its index."""
    frames = []
    for number, run in enumerate(runs):
        frames.append(run.episodes.assign(run=number, rank=rank_episodes(run.episodes)))
    frame = pd.concat(frames, ignore_index=True)
    for name in ("prompt", "response"):
        frame[name] = frame[name].str[:MAX_CELL_CHARACTERS]
    for name in ("reward", "seconds"):
        frame[name] = frame[name].round(4)
    frame["reward_components"] = [
        " ".join(f"{name}={value:.3g}" for name, value in parts.items())
        for parts in frame["reward_components"]
    ]
    return {name: frame[name].tolist() for name in TABLE_COLUMNS}


def rank_episodes(episodes: pd.DataFrame) -> list[str]:
    """Mark the RANKED best and worst episodes of each file, and the failed ones; others get ""."""
    is_failed = episodes["status"] != "ok"
    cases = [is_failed, episodes["best"] <= RANKED, episodes["worst"] <= RANKED]
    return list(map(str, np.select(cases, ["failed", "best", "worst"], default="")))


# --- an opened episode ---------------------------------------------------------------------------


def choose_episodes_with_tokens(runs: Sequence[RunFolder]) -> set[int]:
    """Choose the records whose tokens the page shows, up to MAX_PAGE_TOKENS in all: their id().

    The best, worst and failed ones come first, and among them those of the latest steps.
    """
    candidates: list[tuple[SavedEpisode, str, int]] = []
    for run in runs:
        ranks = rank_episodes(run.episodes)
        candidates += zip(run.records, ranks, run.episodes["tokens"], strict=True)
    candidates.sort(key=lambda each: (not each[1], -each[0].step))
    chosen = set()
    total = 0
    for saved, _, tokens in candidates:
        total += tokens
        if total <= MAX_PAGE_TOKENS:
            chosen.add(id(saved.record))
    return chosen


def decode_vocabulary(
    run: RunFolder, tokenizer: PreTrainedTokenizerBase | None, chosen: set[int]
) -> dict[int, str]:
    """Decode each token that the page shows of a run: {id: text}; empty without a tokenizer."""
    if tokenizer is None:
        return {}
    ids: set[int] = set()
    for saved in run.records:
        if id(saved.record) in chosen:
            for item in saved.record["response"]["output"]:
                ids.update(item.get(SAMPLED_IDS) or [])
    return {token_id: str(tokenizer.decode([token_id])) for token_id in sorted(ids)}


def list_episode_views(runs: Sequence[RunFolder], chosen: set[int]) -> list[Json]:
    """List the views of all episodes, in the order of `tabulate_episodes`."""
    views = []
    for run in runs:
        advantages = {step: run.read_advantages(step) for step in run.episodes["step"].unique()}
        for saved, index in zip(run.records, run.episodes["record_index"], strict=True):
            is_training = saved.file.startswith("step")
            values = advantages[saved.step].get(index) if is_training else None
            with_tokens = id(saved.record) in chosen
            views.append(build_episode_view(saved.record, values, with_tokens))
    return views


def build_episode_view(record: Json, advantages: np.ndarray | None, with_tokens: bool) -> Json:
    """Build the view of one episode: the conversation item by item, and other fields.

    Items that the policy sampled get token ids, log-probs and advantages, if `with_tokens`.
    """
    episode = record["_episode"]
    items = list_prompt_items(record)
    first = 0  # position of the item's first token in the episode's sampled tokens
    for output in record["response"]["output"]:
        item = format_item(output)
        ids = output.get(SAMPLED_IDS) or []
        if ids and with_tokens and len(ids) <= MAX_CALL_TOKENS:
            item["ids"] = ids
            item["log_probs"] = [round(log_prob, 2) for log_prob in output[LOG_PROBS]]
            item["advantages"] = slice_advantages(advantages, first, len(ids))
        first += len(ids)
        items.append(item)
    for item in items:
        item["text"] = shorten_text(item["text"])
    view = {
        "row": episode["row_id"],
        "group": episode["group_id"],
        "error": episode["error"],
        "timings": episode["timings"],
        "items": items,
        "fields": list_scalar_fields(record),
    }
    if episode["status"] != "ok":
        view["fix"] = find_status(episode["status"]).fix
    return view


def list_prompt_items(record: Json) -> list[Json]:
    """List the items of the prompt, as `format_item` makes them."""
    prompt = record.get("responses_create_params", {}).get("input")
    prompt = prompt or record["_episode"]["prompt"]
    if isinstance(prompt, str):
        return [{"role": "user", "text": prompt}]
    return [format_item(item) for item in prompt]


def slice_advantages(advantages: np.ndarray | None, first: int, count: int) -> list[float] | None:
    """Return the advantages of an item's tokens; a single one holds for all tokens."""
    if advantages is None:
        return None
    if len(advantages) > 1:
        advantages = advantages[first : first + count]
    return [float(f"{value:.3g}") for value in advantages]


def list_scalar_fields(record: Json) -> dict[str, str]:
    """List the texts and numbers that the row and the verifier put into a record, as text."""
    fields = {}
    for name, value in record.items():
        if name not in UNLISTED_KEYS and isinstance(value, (str, int, float, bool)):
            fields[name] = str(value)[:300]
    return fields


def format_item(item: Json) -> Json:
    """Convert an item of the Responses API to its role and its text."""
    if item.get("type") == "function_call":
        return {"role": "call", "text": f"{item['name']}({item['arguments']})"}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "text": str(item.get("output"))}
    content = item.get("content") or item.get("summary") or ""
    parts = content if isinstance(content, list) else [content]
    role = item.get("role") or item.get("type") or ""
    return {"role": role, "text": "".join(format_part(part) for part in parts)}


def format_part(part: object) -> str:
    """Return the text of a message part, or the URL of an image."""
    if isinstance(part, dict):
        return str(part.get("text") or part.get("image_url") or "")
    return str(part)


def shorten_text(text: str) -> str:
    """Shorten a text to MAX_TEXT_CHARACTERS, with a note that names the file with all of it."""
    rest = len(text) - MAX_TEXT_CHARACTERS
    if rest <= 0:
        return text
    note = f"[{rest} more characters are not on this page; rollouts/*.jsonl has the full text]"
    return f"{text[:MAX_TEXT_CHARACTERS]}\n{note}"
