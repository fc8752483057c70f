"""Read and write episodes as JSON lines, and replay them.

The files rollouts/step_<N>.jsonl, rollouts/val_<N>.jsonl, rollouts.jsonl and evaluation.jsonl hold
one episode per line, in the format of Gym's own collector:

- the fields of the row;
- `response`: the output items, with token ids and log-probs on the last item of each model call,
  and the tools that the policy was offered;
- `reward` and the other fields that the verifier returned;
- `_ng_task_index` and `_ng_rollout_index`;
- `_branches`, if an agent's episode has further training rows: the output items of each, with token
  ids and log-probs, and its policy versions.

The first key is `_episode`: a summary for people, and the fields that only the kit has. If a
function generated the row, `_episode` holds the row too. A failed episode has a status and no
reward. If its server described the failure, `failure` has the server's fields, such as
`failure_reason`, `terminal`, `stage` and `partial_response`. `--replay` needs nothing but such a
file.

Protects: token ids, log-probs and rewards, which a replay reads bit for bit as they were sampled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

import env
import gym_client
from env import Json, Task
from gym_client import GymError
from kit.data.episode import (
    LOG_PROBS,
    PROMPT_IDS,
    SAMPLED_IDS,
    Branch,
    Episode,
    PolicyVersion,
    RecordIndex,
    TrainingRow,
    from_output_items,
    set_sampled,
)
from kit.data.fingerprint import hash_row
from kit.data.json_lines import read_lines
from kit.data.reward_scale import UNKNOWN, RewardScale
from kit.errors import ConfigError

BRANCHES = "_branches"
SAVED_FIELDS = (  # of Episode, under `_episode`, by the same name
    "row_id",
    "group_id",
    "server",
    "status",
    "error",
    "ended",
    "baseline",
    "turn_rewards",
    "timings",
)
RECORD_FIELDS = (
    "_episode",
    "response",
    "reward",
    "reward_components",
    BRANCHES,
    "_ng_task_index",
    "_ng_rollout_index",
)


# --- episode <-> record ---------------------------------------------------------------------------


def assign_record_indices(
    episodes: Sequence[Episode], tasks: Sequence[Task], before: Sequence[Episode] = ()
) -> None:
    """Set the place of each episode in its rollouts file.

    The task index is that of the row among `tasks`, the rows of files. Generated rows come after
    these. before: earlier episodes of the same file.
    """
    task_indices = {task.row_id: index for index, task in enumerate(tasks)}
    for index, episode in enumerate([*before, *episodes]):
        task_indices.setdefault(episode.row_id, len(tasks) + index)
    counts = Counter(episode.row_id for episode in before)
    for episode in episodes:
        row_id = episode.row_id
        episode.record_index = RecordIndex(task_indices[row_id], counts[row_id])
        counts[row_id] += 1


def to_record(episode: Episode, task_index: int, rollout_index: int) -> Json:
    """Convert an episode to a record: one line of a rollouts file.

    The indices are those of `RecordIndex`. Gym calls them `_ng_task_index` and `_ng_rollout_index`.
    """
    summary: Json = {
        "prompt": episode.question,
        "answer": episode.transcript,
        "reward": episode.reward,
        **{name: getattr(episode, name) for name in SAVED_FIELDS},
        "content": hash_row(episode.row),  # the row in any file
        "versions": episode.policy_versions,
    }
    if episode.scale != UNKNOWN:
        summary["scale"] = episode.scale
    for name in ("failure", "measures", "observation"):
        if getattr(episode, name):
            summary[name] = getattr(episode, name)
    summary["prompt_tokens"] = len(episode.prompt_ids)
    summary["response_tokens"] = len(episode.response_ids)
    record: Json = {"_episode": None}  # the first key of a line; a row's field of that name is lost
    record |= replace_images_by_hash(episode.row)
    record["response"] = gym_client.make_response(add_token_fields(episode))
    record["response"]["tools"] = episode.tools
    record["reward"] = episode.reward
    if episode.reward_components or "reward_components" in episode.row:
        record["reward_components"] = episode.reward_components
    record |= episode.verify_result
    if episode.branches:
        record[BRANCHES] = [
            {"output": add_token_fields(branch), "versions": branch.policy_versions}
            for branch in episode.branches
        ]
    record |= {"_ng_task_index": task_index, "_ng_rollout_index": rollout_index}
    record["_episode"] = summary
    return record


def add_token_fields(row: TrainingRow) -> list[Json]:
    """Copy the output items, with the token ids and log-probs of each turn on its last item."""
    output = [dict(item) for item in row.output]
    for turn in row.turns:
        output[turn.output_end - 1] |= {
            PROMPT_IDS: row.prompt_ids + row.response_ids[: turn.start],
            SAMPLED_IDS: row.response_ids[turn.start : turn.end],
            # 32 bits: the fewest digits in the file
            LOG_PROBS: np.array(row.log_probs[turn.start : turn.end], np.float32),
        }
    return output


def replace_images_by_hash(row: Json) -> Json:
    """Replace each inline image of a row by its hash, since every episode of the row has a copy."""
    params = row.get("responses_create_params") or {}
    if not isinstance(params.get("input"), list):
        return row
    shortened = {**params, "input": shorten_images(params["input"])}
    return {**row, "responses_create_params": shortened}


def shorten_images(value: Any) -> Any:  # any JSON
    """Replace each inline image in a value by its hash."""
    if isinstance(value, list):
        return [shorten_images(member) for member in value]
    if not isinstance(value, dict):
        return value
    url = value.get("image_url")
    if isinstance(url, str) and url.startswith("data:"):
        digest = hashlib.sha256(url.encode()).hexdigest()[:16]
        return {**value, "image_url": f"sha256 {digest}"}
    return {key: shorten_images(member) for key, member in value.items()}


def read_scale(saved: Json) -> RewardScale:
    """Return the scale of a record's reward. saved: its `_episode`."""
    return RewardScale(*saved.get("scale", UNKNOWN))


def from_record(record: Json, row: Json) -> Episode:
    """Convert a record and its task's row to an episode. Raises KeyError, TypeError or GymError."""
    saved = record["_episode"]
    fields = {name: saved[name] for name in SAVED_FIELDS}
    episode = Episode(prompt_ids=[], reward=record["reward"], row=row, **fields)
    episode.failure = saved.get("failure", {})
    episode.scale = read_scale(saved)
    episode.measures = saved.get("measures", {})
    episode.observation = saved.get("observation", "")
    episode.tools = record["response"].get("tools", [])
    episode.reward_components = record.get("reward_components") or {}
    other_fields = {*RECORD_FIELDS, *row}
    episode.verify_result = {k: value for k, value in record.items() if k not in other_fields}
    restore_row(episode, record["response"]["output"], saved.get("versions", ()))
    for recorded in record.get(BRANCHES, ()):
        branch = Branch(prompt_ids=[])
        restore_row(branch, recorded["output"], recorded["versions"])
        episode.branches.append(branch)
    return episode


def restore_row(
    row: TrainingRow, output: Sequence[Json], versions: Sequence[tuple[int, int | None]]
) -> None:
    """Fill an empty episode or branch from its output items, as `add_token_fields` wrote them."""
    from_output_items(row, output)
    recorded = [item[LOG_PROBS] for item in output if item.get(SAMPLED_IDS)]
    for turn, log_probs in zip(row.turns, recorded, strict=True):
        set_sampled(row, turn, np.array(log_probs, np.float32).tolist())
    row.policy_versions = [PolicyVersion(count, step) for count, step in versions]


# --- record <-> file ------------------------------------------------------------------------------


def write_record(out: IO[bytes], record: Json) -> None:
    """Write one record as a line.

    orjson takes a tenth of the time of json. But it rejects half of a surrogate pair, and it writes
    null for NaN and infinity. Such a record is written by json, with escapes where UTF-8 has no
    such character.
    """
    output = list(record.get("response", {}).get("output", ()))
    for branch in record.get(BRANCHES, ()):
        output += branch["output"]
    sums = [float(item[LOG_PROBS].sum()) for item in output if LOG_PROBS in item]
    try:
        if not math.isfinite(sum(sums, record.get("reward") or 0.0)):
            raise TypeError("not finite")
        # default: for named tuples
        line = orjson.dumps(record, default=tuple, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        text = json.dumps(record, ensure_ascii=False, default=shortest_floats)
        line = text.encode(errors="backslashreplace")
    out.write(line + b"\n")


def shortest_floats(numbers: Iterable[np.float32]) -> list[float]:
    """Convert each 32-bit float to the float with the fewest digits: 0.1, not 0.10000000149."""
    return [float(str(number)) for number in numbers]


def read_records(path: Path) -> Iterator[tuple[int, Json]]:
    """Yield (line number, record) of a rollouts file. Raises ConfigError for another format."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            record = parse_record(line)
            record["_episode"]["row_id"], record["response"]["output"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}:{number} is no episode of a rollouts file ({error!r}). "
                "Set another trainer.experiment_name, or name another file."
            ) from None
        yield number, record


def parse_record(line: bytes) -> Json:
    """Parse a line of `write_record`: by orjson, or by json if orjson rejects it.

    Raises ValueError.
    """
    try:
        return dict(orjson.loads(line))
    except orjson.JSONDecodeError:
        return dict(json.loads(line))


# --- replay ---------------------------------------------------------------------------------------


def load_replay(path: Path, tasks: Sequence[Task]) -> list[list[Episode]]:
    """Load the episodes of a rollouts file, one list per batch of prompts, in sampling order.

    Each episode needs its row. If a function generated the row, the record has it. Otherwise it is
    the task of `tasks` with the same content. Raises ConfigError.
    """
    if not path.is_file():
        raise ConfigError(f"--replay {path}: no such file. Name one of runs/<name>/rollouts.")
    by_content = {task.digest or hash_row(task.row): task for task in tasks}
    batches: dict[str, list[Episode]] = {}
    for number, record in read_records(path):
        saved = record["_episode"]
        task = by_content.get(saved.get("content"))
        row = saved.get("row") or (task.row if task else None)
        if not row:
            raise ConfigError(
                f"{path}:{number}: env.train_files have no row {saved['row_id']} with the recorded "
                "content. Use the recipe that sampled this file."
            )
        try:
            episode = from_record(record, row)
            episode.images = list_images(episode, task)
        except (KeyError, TypeError, ValueError, GymError) as error:
            raise ConfigError(
                f"--replay {path}:{number} is no episode of rollouts/step_<N>.jsonl ({error!r}). "
                "Use the file as the run wrote it."
            ) from None
        batch_name = episode.group_id.rpartition("/")[0]
        batches.setdefault(batch_name, []).append(episode)
    if not batches:
        raise ConfigError(f"--replay {path} holds no episode. Name the file of another step.")
    return list(batches.values())


def list_images(episode: Episode, task: Task | None) -> list[str]:
    """List the images of a replayed episode. task: None for a row that a function generated."""
    if task:
        return [image.source for image in task.images]
    return env.list_images(env.render_row(episode.row, episode.row_id)[0], episode.row_id)
