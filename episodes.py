"""The one record that goes through the kit, and as lines of JSON: for people, for Gym's own tools, for --replay.

rollouts/step_<N>.jsonl    text and verdict for people, `tokens` for a replay of the update
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import gym_client
from config import ConfigError
from env import Task


@dataclass
class Episode:
    """One conversation about one task. Lists are per response token unless a comment says otherwise."""

    row_id: str  # the task's file:line
    group_id: str  # episodes of one task in one step share it: the group of GRPO
    server: str  # the Gym server that verifies it
    prompt_ids: list[int]  # per prompt token
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)  # 1 = sampled by the policy, 0 = observed
    log_probs: list[float] = field(default_factory=list)  # the sampler's, at the sampling temperature; 0 if observed
    turns: list[tuple[int, int, int]] = field(default_factory=list)  # per turn: first token, end, end in `output`
    output: list[dict[str, Any]] = field(default_factory=list)  # all that was said, as Responses items
    ended: str = ""  # stop | length | turns | terminated | truncated (the environment's own limit)
    reward: float | None = None
    turn_rewards: list[float] = field(default_factory=list)  # of each turn, where the environment pays turns
    reward_components: dict[str, float] = field(default_factory=dict)
    baseline: float | None = None  # reward of a greedy answer to the same prompt (remax)
    verdict: dict[str, Any] = field(default_factory=dict)  # what else the verifier said
    status: str = "ok"  # or the reason of the failure, as in gym_client
    error: str = ""
    lost: bool = False  # its Gym server went away in the middle
    timings: dict[str, float] = field(default_factory=dict)  # seconds: generate, tools, verify, verify_call
    row: dict[str, Any] = field(default_factory=dict)  # the task's, verbatim

    @property
    def response(self) -> str:
        """What the policy said last, as text."""
        said = [item for item in self.output if item.get("role") == "assistant"]
        return "".join(part["text"] for part in said[-1]["content"]) if said else ""

    @property
    def transcript(self) -> str:
        """All that was said after the prompt, for people: text, calls, and what came back."""
        parts = []
        for item in self.output:
            if item["type"] == "function_call":
                parts.append(f"{item['name']}({item['arguments']})")
            elif item.get("role") == "assistant":
                parts.append("".join(part["text"] for part in item["content"]))
            elif item["type"] != "reasoning":
                parts.append(f"=> {item.get('output') or item.get('content')}")
        return " ".join(parts)


def question(task: Task) -> str:
    """The last thing that the row says to the model; empty where the environment says it."""
    return str(task.messages[-1]["content"]) if task.messages else ""


def as_record(episode: Episode, prompt: str) -> dict[str, Any]:
    """An episode as one line of rollouts/step_N.jsonl: text and verdict first, what it was trained on last."""
    record = {f.name: getattr(episode, f.name) for f in dataclasses.fields(episode)}
    lengths = {"prompt_tokens": len(episode.prompt_ids), "response_tokens": len(episode.response_ids)}
    tokens: dict[str, Any] = {key: record.pop(key) for key in ("prompt_ids", "response_ids", "turns")}
    tokens["log_probs"] = [float(str(np.float32(p))) for p in record.pop("log_probs")]  # as short as 32 bits allow
    for key in ("response_mask", "output", "row", "lost"):
        del record[key]
    if len(episode.turns) > 1 or len(episode.output) > 1:
        record["output"] = episode.output
    text = {"prompt": prompt, "response": episode.response, "turns": len(episode.turns)}
    return {**text, **record, **lengths, "tokens": tokens}


def from_record(record: dict[str, Any], row: dict[str, Any]) -> Episode:
    """What `as_record` wrote, and the task's row -> the episode. Raises KeyError for a record without tokens."""
    tokens, names = record["tokens"], {f.name for f in dataclasses.fields(Episode)} - {"turns"}
    episode = Episode(**{key: value for key, value in {**record, **tokens, "row": row}.items() if key in names})
    episode.log_probs = [float(np.float32(p)) for p in tokens["log_probs"]]
    episode.turns = [(begin, end, said) for begin, end, said in tokens["turns"]]
    episode.output = record.get("output") or [gym_client.message(record["response"])]
    episode.response_mask = [0] * len(episode.response_ids)
    for begin, end, _ in episode.turns:
        episode.response_mask[begin:end] = [1] * (end - begin)
    return episode


def as_gym_record(episode: Episode, task: Task, indices: dict[str, int]) -> dict[str, Any]:
    """An episode as Gym's own collector writes it, token ids on the last item of each model call.

    indices: Gym's `_ng_task_index` and `_ng_rollout_index`.
    """
    output = [dict(item) for item in episode.output]
    for begin, end, last in episode.turns:
        output[last - 1] |= {
            "prompt_token_ids": episode.prompt_ids + episode.response_ids[:begin],
            "generation_token_ids": episode.response_ids[begin:end],
            "generation_log_probs": episode.log_probs[begin:end],
        }
    parts = {"reward_components": episode.reward_components} if episode.reward_components else {}
    answer = {"response": gym_client.response(output), "reward": episode.reward, **parts, **episode.verdict}
    return {**task.row, **answer, **indices, "ended": episode.ended}


def load_replay(path: Path, tasks: Sequence[Task]) -> list[list[Episode]]:
    """The episodes of a rollouts file by batch of prompts, in the order in which they were sampled.

    Their rows come from the recipe's own files, by row id. Raises ConfigError.
    """
    rows: Mapping[str, dict[str, Any]] = {task.row_id: task.row for task in tasks}
    batches: dict[str, list[Episode]] = {}
    try:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):  # not at U+2028, as splitlines
            if not line:
                continue
            record = json.loads(line)
            if record["row_id"] not in rows:
                raise ConfigError(
                    f"{path}:{number}: env.train_files have no row {record['row_id']}; give the same recipe"
                )
            episode = from_record(record, rows[record["row_id"]])
            batches.setdefault(episode.group_id.rpartition("/")[0], []).append(episode)
    except FileNotFoundError:
        raise ConfigError(f"--replay {path}: no such file; give one of runs/<name>/rollouts") from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--replay {path}:{number}: no episode of rollouts/step_<N>.jsonl ({error!r}); give it as it was written"
        ) from None
    if not batches:
        raise ConfigError(f"--replay {path}: holds no episode; give the file of another step")
    return list(batches.values())
