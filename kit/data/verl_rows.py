"""Convert rows of Gym, verl or TRL to Gym rows: the one form that a run uses.

A row of verl (RLHFDataset) has `prompt`, `data_source`, `reward_model` and `extra_info`. It becomes
a Gym row: its prompt is the `input`, and all other keys stay at the top level, unchanged. So a
verifier finds verl's fields, and `to_verl` (`python env.py to-verl`) gives the same row back. Only
`images` move into the prompt, to the places of `<image>`, and `tools` to the prompt's parameters.

A materialized task of Gym 0.7 is {"task_id": {"taskset", "task_id"}, "task_input": row}. It becomes
this row, with its identifiers under TASK_ID. The verifier's fields may be in the row's `task_data`.

Protects: prompts and rewards, from fields of a row that would be ignored or read in two ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import env
from env import DataError, Json, UnsupportedRowError
from kit.data import fields
from kit.data.row_files import parse_object, read_raw_rows

GYM_ROW = "gym_row"  # key of extra_info: `to_verl` saves the Gym row there, as JSON
TASK_ID = "_ng_task_id"  # key of a row: {taskset, task_id} of the materialized task
PARAMS = "responses_create_params"
# fields of a Gym row or of a task that are objects; some tables hold them as JSON text
OBJECTS = (PARAMS, "task_input", "task_data", "task_id", "agent_ref", TASK_ID)
VERL_OBJECTS = ("reward_model", "extra_info")  # fields of a row of verl that are objects
IMAGE_MARK = "<image>"


def read_rows(path: str, prompt_key: str = "prompt", name: str = "") -> Iterator[tuple[str, Json]]:
    """Yield (`name:line`, Gym row) for each row of a file. prompt_key: data.prompt_key of verl.

    name: the path if it is empty. Raises DataError.
    """
    for row_id, raw in read_raw_rows(path, name):
        yield row_id, parse_row(raw, row_id, prompt_key)


def parse_row(raw: object, row_id: str, prompt_key: str = "prompt") -> Json:
    """Convert JSON text or a dict, of Gym, verl or TRL, to a Gym row.

    Raises DataError, and UnsupportedRowError for a valid row that the kit cannot use.
    """
    row = parse_object(raw, row_id)
    if row.get("task_input") is not None or row.get(PARAMS) is not None:
        row = parse_objects(row, row_id, OBJECTS)
    if isinstance(row.get("task_id"), dict) and row.get("task_input") is not None:
        row = parse_objects(flatten_task(row, row_id), row_id, OBJECTS)
    if not isinstance(raw, str):  # of a table, whose objects Arrow fills with nulls
        prompts = {prompt_key, PARAMS, "tools", env.TEMPLATE_ARGUMENTS}
        row |= {key: env.drop_nulls(row[key]) for key in row.keys() & prompts}
    if prompt_key in row and row.get(PARAMS) in (None, ""):  # "" is a cell of a table
        return from_verl(row, row_id, prompt_key)
    if PARAMS in row:
        return check_gym_row(row, row_id)
    keys = ", ".join(row) or "no key"
    raise DataError(
        f"{row_id}: it has {keys}, but neither Gym's {PARAMS} nor verl's `{prompt_key}` "
        "(data.prompt_key). Add one of them. (`sft` reads chats.) "
        'See docs/guides/data.md, "1. The form of a row".'
    )


def parse_objects(row: Json, row_id: str, keys: Sequence[str]) -> Json:
    """Parse the fields `keys` of a row that are JSON text instead of objects. Raises DataError."""
    parsed = dict(row)
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            parsed[key] = parse_object(value, f"{row_id}: {key}")
    return parsed


def flatten_task(task: Json, row_id: str) -> Json:
    """Convert a materialized task to a Gym row. Raises DataError.

    >>> row = {"responses_create_params": {"input": "2?"}, "task_data": {"answer": "2"}}
    >>> flatten_task({"task_id": {"task_id": "0"}, "task_input": row}, "x:1")["answer"]
    '2'
    """
    row = task["task_input"]
    task_data = row.get("task_data") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(task_data, dict | None):
        raise DataError(
            f"{row_id}: task_input must be an object, and so must its task_data. Correct them."
        )
    others = {key: value for key, value in row.items() if key != "task_data"}
    return {**others, **(task_data or {}), TASK_ID: task["task_id"]}


def check_gym_row(row: Json, row_id: str) -> Json:
    """Return a Gym row whose prompt Quintet and Gym read in the same way.

    Lists and objects that are JSON text are parsed, and TRL's column chat_template_kwargs is where
    Gym has it. Raises DataError, and UnsupportedRowError for fields that are refused.
    """
    params = env.parse_params(row.get(PARAMS), row_id)
    arguments = env.read_object(row, env.TEMPLATE_ARGUMENTS, row_id)
    if arguments:
        metadata = {env.TEMPLATE_ARGUMENTS: json.dumps(arguments)}
        params["metadata"] = metadata | env.read_object(params, "metadata", row_id)
    row = {**row, PARAMS: params}
    fields.check(fields.walk_row(row), row_id)
    return row


def from_verl(row: Json, row_id: str, prompt_key: str = "prompt") -> Json:
    """Convert a row of verl or TRL to a Gym row. If `to_verl` made it, this is the first Gym row.

    Raises DataError, and UnsupportedRowError for a valid row that the kit cannot use.

    >>> from_verl({"prompt": "2 + 2?", "data_source": "openai/gsm8k"}, "x:1")
    {'responses_create_params': {'input': '2 + 2?'}, 'data_source': 'openai/gsm8k'}
    """
    row = parse_objects(row, row_id, VERL_OBJECTS)
    prompt = env.read_prompt(row[prompt_key], row_id, prompt_key)
    if not prompt or not isinstance(prompt, str | list):
        value = "null" if prompt is None else f"{prompt!r:.40}"
        raise DataError(f"{row_id}: `{prompt_key}` is {value}. It must be text or chat messages.")
    given = row.get("extra_info")
    extra_info: Json = given if isinstance(given, dict) else {}
    fields.check([(fields.PROMPT_ROW, row)], row_id)
    if row.get("agent_name") != fields.SINGLE_TURN:
        fields.check([(fields.EXTRA_INFO, extra_info)], row_id)
    if isinstance(extra_info.get(GYM_ROW), str):
        gym_row = check_gym_row(parse_object(extra_info[GYM_ROW], row_id), row_id)
        if prompt != env.render_row(gym_row, row_id)[0]:
            raise DataError(
                f"{row_id}: `{prompt_key}` differs from that of extra_info.{GYM_ROW}. "
                f"Remove {GYM_ROW} to use `{prompt_key}`."
            )
        return gym_row
    images = env.read_json(row.get("images")) or []
    params: Json = {"input": place_images(prompt, images, row_id)}
    moved = {prompt_key, PARAMS, *(["images"] if images else [])}
    if env.read_json(row.get("tools")):
        moved.add("tools")
        params["tools"] = row["tools"]
    others = {key: value for key, value in row.items() if key not in moved}
    return check_gym_row({PARAMS: params, **others}, row_id)


# --- images of verl's rows ------------------------------------------------------------------------


def place_images(prompt: str | list[Json], images: object, row_id: str) -> object:
    """Put the images of a row at the places of `<image>` in its prompt, as verl's RLHFDataset does.

    Parts of a content that are images get the form of OpenAI's Responses, too. Raises DataError.
    """
    if not isinstance(images, list):
        raise DataError(f"{row_id}: images must be a list. Correct it.")
    if isinstance(prompt, str):
        if not images:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    texts = [message.get("content") for message in prompt if isinstance(message, dict)]
    marks = sum(text.count(IMAGE_MARK) for text in texts if isinstance(text, str))
    if images and marks != len(images):
        raise DataError(
            f"{row_id}: {len(images)} images, but the prompt has {IMAGE_MARK} {marks} times. Write "
            f"{IMAGE_MARK} once for each image."
        )
    shown = iter([make_image_part(image, row_id) for image in images])
    placed: list[Json] = []
    for message in prompt:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            message = {**message, "content": [convert_part(part, row_id) for part in content]}
        elif isinstance(content, str) and images and IMAGE_MARK in content:
            message = {**message, "content": split_content(content, shown)}
        placed.append(message)
    return placed


def split_content(content: str, images: Iterator[Json]) -> list[Json]:
    """Split a text at each `<image>` into parts, with the next images between the texts."""
    parts = []
    for text in re.split(f"({IMAGE_MARK})", content):
        if text:
            part = {"type": "input_text", "text": text}
            parts.append(next(images) if text == IMAGE_MARK else part)
    return parts


def convert_part(part: Any, row_id: str) -> object:  # any JSON
    """Convert a part of a content that is an image. Other parts stay. Raises DataError."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("image", "image_url"):
        return part
    return make_image_part(part if kind == "image" else part.get("image_url"), row_id)


def make_image_part(image: object, row_id: str) -> Json:
    """Make the part of a content that shows an image of verl: text, or a dict that names it.

    Raises DataError, and UnsupportedRowError for settings of its size: verl's `max_pixels`, or
    OpenAI's `detail`, except for the default "auto".
    """
    given = {"url": image} if isinstance(image, str) else image
    if not isinstance(given, dict):
        raise DataError(f"{row_id}: an image must be text or an object, not {image!r:.40}.")
    given = {key: value for key, value in given.items() if not fields.is_default(key, value)}
    others = sorted(given.keys() - {"type", "bytes", "image", "path", "url"})
    if others:
        raise UnsupportedRowError(
            f"{row_id}: `{others[0]}` of an image is not supported. Resize the image instead."
        )
    url = given.get("image") or given.get("path") or given.get("url")
    if isinstance(given.get("bytes"), str):  # base64; the reader of the image finds its type
        url = f"data:image/png;base64,{given['bytes']}"
    if not isinstance(url, str):
        raise DataError(f"{row_id}: an image has neither bytes nor a path. Correct the row.")
    return {"type": "input_image", "image_url": url, "detail": "auto"}
