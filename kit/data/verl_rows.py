"""Read Gym rows from files that hold Gym's rows, Gym's materialized tasks or verl's rows.

A row of verl (RLHFDataset) has `prompt`, `data_source`, `reward_model` and `extra_info`. It becomes
a Gym row: its prompt is the `input`, and all other keys stay at the top level, unchanged. So a
verifier finds verl's fields, and `to_verl` (kit/extras/convert.py) gives the same row back.

A materialized task of Gym 0.7 is {"task_id": {"taskset", "task_id"}, "task_input": row}. It becomes
this row, with its identifiers under TASK_ID. The verifier's fields may be in the row's `task_data`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import env
from env import DataError, UnsupportedRowError
from kit.data.row_files import parse_object, read_raw_rows

GYM_ROW = "gym_row"  # key of extra_info: `to_verl` saves the Gym row there, as JSON
TASK_ID = "_ng_task_id"  # key of a row: {taskset, task_id} of the materialized task


def read_rows(path: str, prompt_key: str = "prompt") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, Gym row) for each row of a file. prompt_key: data.prompt_key of verl.

    Raises DataError.
    """
    for row_id, raw in read_raw_rows(path, prompt_key):
        yield row_id, parse_row(raw, row_id, prompt_key)


def parse_row(raw: Any, row_id: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """Convert JSON text or a dict, of Gym or verl, to a Gym row.

    Raises DataError, and UnsupportedRowError for a valid row that the kit cannot use.
    """
    row = parse_object(raw, row_id)
    if "task_input" in row and isinstance(row.get("task_id"), dict):
        row = flatten_task(row, row_id)
    if "responses_create_params" in row:
        return check_gym_row(row, row_id)
    if prompt_key in row:
        return from_verl(row, row_id, prompt_key)
    keys = ", ".join(row) or "no key"
    raise DataError(
        f"{row_id}: it has {keys}, but neither Gym's responses_create_params nor verl's "
        f"`{prompt_key}` (data.prompt_key). Add one of them. (`sft` reads chats.) "
        'See docs/guides/data.md, "1. The form of a row".'
    )


def flatten_task(task: dict[str, Any], row_id: str) -> dict[str, Any]:
    """Convert a materialized task to a Gym row. Raises DataError.

    >>> row = {"responses_create_params": {"input": "2?"}, "task_data": {"answer": "2"}}
    >>> flatten_task({"task_id": {"task_id": "0"}, "task_input": row}, "x:1")["answer"]
    '2'
    """
    row = task["task_input"]
    if not isinstance(row, dict) or not isinstance(row.get("task_data", {}), dict):
        raise DataError(
            f"{row_id}: task_input must be an object, and so must its task_data. Correct them."
        )
    fields = {key: value for key, value in row.items() if key != "task_data"}
    task_data = row.get("task_data", {})
    conflicts = [key for key in fields.keys() & task_data.keys() if fields[key] != task_data[key]]
    if conflicts:
        raise DataError(
            f"{row_id}: {min(conflicts)} differs inside and outside of task_data. Remove one."
        )
    return {**fields, **task_data, TASK_ID: task["task_id"]}


def check_gym_row(row: dict[str, Any], row_id: str) -> dict[str, Any]:
    """Return the row, if it is a Gym row. Raises DataError."""
    if not isinstance(row.get("responses_create_params"), dict):
        raise DataError(
            f"{row_id}: it has no object responses_create_params, so it is not a Gym row. Add it."
        )
    return row


def from_verl(row: dict[str, Any], row_id: str, prompt_key: str = "prompt") -> dict[str, Any]:
    """Convert a row of verl to a Gym row. If `to_verl` made it, this is the original Gym row.

    Raises DataError, and UnsupportedRowError for a valid row that the kit cannot use.

    >>> from_verl({"prompt": "2 + 2?", "data_source": "openai/gsm8k"}, "x:1")
    {'responses_create_params': {'input': '2 + 2?'}, 'data_source': 'openai/gsm8k'}
    """
    prompt = row[prompt_key]
    check_verl_row(row, prompt, row_id, prompt_key)
    extra_info = row.get("extra_info")
    if isinstance(extra_info, dict) and isinstance(extra_info.get(GYM_ROW), str):
        gym_row = check_gym_row(parse_object(extra_info[GYM_ROW], row_id), row_id)
        if prompt != env.render_row(gym_row, row_id)[0]:
            raise DataError(
                f"{row_id}: `{prompt_key}` differs from that of extra_info.{GYM_ROW}. "
                f"Remove {GYM_ROW} to use `{prompt_key}`."
            )
        return gym_row
    other_fields = {key: value for key, value in row.items() if key != prompt_key}
    return {"responses_create_params": {"input": prompt}, **other_fields}


def check_verl_row(row: dict[str, Any], prompt: Any, row_id: str, prompt_key: str) -> None:
    """Check that a row of verl has a prompt of text alone. Raises DataError."""
    if not prompt or not isinstance(prompt, str | list):
        value = "null" if prompt is None else f"{prompt!r:.40}"
        raise DataError(f"{row_id}: `{prompt_key}` is {value}. It must be text or chat messages.")
    for key in ("images", "videos", "audios"):
        if row.get(key):
            raise UnsupportedRowError(
                f"{row_id}: verl's {key} are not supported. Remove such rows."
            )
    if any(isinstance(message, dict) and message.get("tool_calls") for message in prompt):
        raise UnsupportedRowError(
            f"{row_id}: tool_calls in `{prompt_key}` are not supported. Write them as "
            "function_call items of a Gym row."
        )
