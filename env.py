"""Tasks: NeMo Gym rows in, prompts out. Edit this file first. It needs neither torch nor verl.

A Gym row is one JSON object. It has `responses_create_params` (the prompt, in OpenAI's Responses
format) and the fields that its verifier reads, such as `answer`. Quintet sends the row back to the
Gym server unchanged. This file does two things:

    generators    write rows to files:      GENERATORS, `python env.py arithmetic --out data`
    prompts       make prompts from rows:   render_row -> chat messages and tools
                                            encode_messages -> token ids
                                            take_batch -> the tasks of each step

The commands:

    python env.py arithmetic --out data/              # sums for the demo
    python env.py counter --out data/                 # numbers to add with a tool
    python env.py gsm8k [--source DIR] --out data/    # GSM8K, from the hub or from files
    python env.py check data/*.jsonl                  # which rows load, which do not, and why
    python env.py examples | from | from-verl | to-verl     # more: see docs/guides/data.md
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlparse

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]  # a JSON object
TEMPLATE_HINT = "set actor_rollout_ref.model.custom_chat_template"


class DataError(ValueError):
    """A row or file that cannot be used. The message names the file and the line."""


class UnsupportedRowError(DataError):
    """A valid Gym row that Quintet cannot use. The message gives the reason."""


# --- generators: EDIT HERE ------------------------------------------------------------------------
#
# To add a task:
#   1. Write a function that takes the command's arguments and returns {split: rows}. Make each row
#      with `make_row`, or as a dict in Gym's format. Its verifier reads the other fields.
#   2. Add it to GENERATORS.
#   3. Run `python env.py NAME --out data/`. It writes data/NAME_<split>.jsonl.
#   4. Run `python env.py check data/NAME_train.jsonl`, and name the file in env.train_files.


def make_row(server: str, prompt: str, system: str = "", **verifier_fields: object) -> Json:
    """Make a Gym row of one question for `server`, with the fields that its verifier reads."""
    messages = [{"role": "user", "content": prompt}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    agent = {"type": "responses_api_agents", "name": f"{server}_simple_agent"}
    return {"responses_create_params": {"input": messages}, **verifier_fields, "agent_ref": agent}


def arithmetic(args: argparse.Namespace) -> dict[str, Iterable[Json]]:
    """Make sums `a + b` for Gym's reasoning_gym server.

    The server's reward is 1 for exactly the equation, and len(equation) / len(response) for a
    response that contains it. No pair of numbers is in both splits, in either order.
    """
    rng = random.Random(args.seed)
    numbers = range(args.low, args.high + 1)
    pairs = list(itertools.combinations_with_replacement(numbers, 2))
    rng.shuffle(pairs)
    if args.validation < 0:
        raise DataError(f"--validation {args.validation} is negative. Set a number of pairs.")
    if args.validation >= len(pairs):
        raise DataError(
            f"--validation {args.validation} holds out all {len(pairs)} pairs. Lower it."
        )
    validation = pairs[: args.validation]
    others = pairs[args.validation :]
    train = sorted({*others, *[(b, a) for a, b in others]})  # both orders
    rng.shuffle(train)
    return {
        "train": [make_sum(a, b) for a, b in train],
        "validation": [make_sum(a, b) for a, b in validation],
    }


def make_sum(a: int, b: int) -> Json:
    """Make the row of one sum."""
    question = f"Complete the equation: {a} + {b} ="
    return make_row(
        "reasoning_gym",
        question,
        system="You are a calculator.",
        question=question,
        answer=f"{a} + {b} = {a + b}",
        metadata={"source_dataset": "chain_sum"},
    )


def gsm8k(args: argparse.Namespace) -> dict[str, Iterable[Json]]:
    """Make the rows of GSM8K (Cobbe et al. 2021, arXiv:2110.14168), for the math_with_judge server.

    --source is a folder with the original train.jsonl and test.jsonl. Without it: from the hub.
    """
    if args.source:
        train = read_gsm8k(Path(args.source).expanduser(), "train")
        test = read_gsm8k(Path(args.source).expanduser(), "test")
    else:
        train = download_gsm8k("train")
        test = download_gsm8k("test")
    return {"train": map(make_gsm8k_row, train), "validation": map(make_gsm8k_row, test)}


def make_gsm8k_row(entry: Mapping[str, str]) -> Json:
    """Make the row of one problem. Its answer follows `####`, here without thousands separators.

    Raises DataError.
    """
    try:
        question = entry["question"]
        answer = entry["answer"].rsplit("####", 1)[1].strip().replace(",", "")
    except (LookupError, TypeError, AttributeError):
        raise DataError(
            f"an entry of GSM8K has no question, or no answer after ####: {str(entry)[:200]}. "
            "Set --source to a folder with GSM8K's files."
        ) from None
    prompt = f"{question} Let's think step by step and put the final answer within \\boxed{{}}."
    return make_row("math_with_judge", prompt, question=question, expected_answer=answer)


def read_gsm8k(folder: Path, split: str) -> Iterable[Mapping[str, str]]:
    """Read the entries of a split from its original file. Raises DataError."""
    path = folder / f"{split}.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}). Set --source to a folder with GSM8K's files."
        ) from None


def download_gsm8k(split: str) -> Iterable[Mapping[str, str]]:
    """Load the entries of a split from the hub, or from its local cache. Raises DataError."""
    try:
        import datasets
        import huggingface_hub

        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            # fails after 5 s without a network; load_dataset would try for half a minute
            huggingface_hub.HfApi().dataset_info("openai/gsm8k", timeout=5)
        return datasets.load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:  # from the network, the hub or the disk
        raise DataError(
            f"openai/gsm8k cannot be loaded: {error!r:.200}. Set --source to a folder with its "
            "JSONL files."
        ) from None


INCREMENT_TOOL = {
    "type": "function",
    "name": "increment_counter",
    "description": "Add a number to the counter.",
    "parameters": {
        "type": "object",
        "properties": {"count": {"type": "integer"}},
        "required": ["count"],
    },
    "strict": True,
}
INCREMENT_EXAMPLE = [  # before the question: a small model copies what it sees
    {"role": "user", "content": "Add 7 to the counter."},
    {
        "type": "function_call",
        "call_id": "call_7",
        "name": "increment_counter",
        "arguments": '{"count": 7}',
    },
    {"type": "function_call_output", "call_id": "call_7", "output": '{"success":true}'},
    {"role": "assistant", "content": "Done."},
]


def counter(args: argparse.Namespace) -> dict[str, Iterable[Json]]:
    """Make numbers to add with a tool, for Gym's example_session_state_mgmt server.

    The server keeps a counter for each session. The reward is 1 if the counter is right at the end.
    One call with the right number reaches that.
    """
    numbers = [number for number in range(1, 100) if number != 7]  # 7 is in the example
    random.Random(args.seed).shuffle(numbers)
    return {
        "train": [make_increment(number) for number in numbers[16:]],
        "validation": [make_increment(number) for number in numbers[:16]],
    }


def make_increment(number: int) -> Json:
    """Make the row of one number to add."""
    question = f"Add {number} to the counter."
    row = make_row("example_session_state_mgmt", question, expected_count=number, initial_count=0)
    params = row["responses_create_params"]
    params["input"] = [*INCREMENT_EXAMPLE, *params["input"]]
    params["tools"] = [INCREMENT_TOOL]
    return row


GENERATORS = {"arithmetic": arithmetic, "gsm8k": gsm8k, "counter": counter}


# --- rows -> chat messages, as NeMo Gym's own converter does it for its model servers -------------


class TaskImage(NamedTuple):
    """An image of a prompt. Its pixels are read when they are needed."""

    source: str  # a data URL, an http(s) address, or an absolute path
    token_count: int  # the ids of the prompt that stand for it


@dataclass(frozen=True)
class Task:
    """One row with its prompt. P is the number of prompt tokens."""

    row_id: str  # file:line, the row's name in logs, metrics and rollouts
    row: Json  # unchanged: the Gym server gets it back
    server: str  # key of gym.servers: the server that seeds and verifies the row
    messages: list[Json]  # chat messages; empty: the environment writes the prompt
    prompt_ids: list[int]  # [P]; empty if messages is
    tools: list[Json] = field(default_factory=list)  # in chat format
    file: str = ""  # the entry of env.train_files that has the row; no two have the same name
    weight: float | None = None  # the share of this entry in each batch
    key: str = ""  # the row's name in any file, by its content (kit/data/fingerprint.py)
    digest: str = ""  # of all fields of the row
    template_arguments: Json = field(default_factory=dict)  # the row's own, of the chat template
    images: Sequence[TaskImage] = ()  # of `messages`, in order


def render_row(row: Json, row_id: str) -> tuple[list[Json], list[Json]]:
    """Render a Gym row to (chat messages, tools) for `tokenizer.apply_chat_template`.

    `input` is text, a list of items, or empty if the environment writes the prompt. `instructions`
    and the system messages after it become one message, since many templates allow only one. Raises
    UnsupportedRowError or DataError.

    >>> render_row({"responses_create_params": {"input": "2?", "instructions": "Hi."}}, "x:1")[0]
    [{'role': 'system', 'content': 'Hi.'}, {'role': 'user', 'content': '2?'}]
    """
    params = parse_params(row["responses_create_params"], row_id)
    items = params.get("input") or []
    instructions = params.get("instructions") or ""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not isinstance(instructions, str):
        raise DataError(f"{row_id}: input must be text or a list, and instructions must be text.")
    metadata = read_object(params, "metadata", row_id)
    audio = [key for key in metadata if key.startswith("audio") and metadata[key]]  # as Gym has it
    if audio:
        raise UnsupportedRowError(
            f"{row_id}: metadata.{audio[0]} is not supported. Remove such rows."
        )
    messages = render_items(items, row_id)
    if instructions:
        texts = [instructions]
        while messages and messages[0]["role"] == "system":
            texts.append(messages.pop(0)["content"])
        messages.insert(0, {"role": "system", "content": "\n\n".join(texts)})
    if params.get("tool_choice") == "none":
        return messages, []  # the policy must not call them
    return messages, render_tools(params.get("tools") or [], row_id)


def load_json(text: str) -> Any:  # any JSON
    """Parse JSON text. NaN, Infinity and numbers that no float can hold become null."""
    return json.loads(text, parse_constant=lambda _: None, parse_float=read_float)


def read_float(text: str) -> float | None:
    """Return the number in a text, or None if it is over the range of floats."""
    number = float(text)
    return number if math.isfinite(number) else None


def read_json(value: Any) -> Any:  # any JSON
    """Return a value, or the list or object in it if it is JSON text, as a cell of a table is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):
            return load_json(value)
    return None if value == "null" else value


def read_object(fields: Json, key: str, row_id: str) -> Json:
    """Read a field that is an object, its JSON text, or empty. Raises DataError."""
    value = read_json(fields.get(key)) or {}
    if not isinstance(value, dict):
        raise DataError(f"{row_id}: {key} must be an object, not {value!r:.40}. Correct it.")
    return value


def read_prompt(value: Any, row_id: str, key: str) -> Any:  # any JSON
    """Return a prompt, or the messages and items in it if it is JSON text of them.

    Any other text is the prompt itself. Raises DataError for a list in Python's notation.

    >>> read_prompt('[{"role": "user", "content": "2?"}]', "x:1", "prompt")
    [{'role': 'user', 'content': '2?'}]
    """
    if not isinstance(value, str):
        return value
    if PYTHON_LIST.match(value):
        raise DataError(
            f"{row_id}: `{key}` has messages in Python's notation, as pandas writes them to CSV. "
            "Write them with json.dumps."
        )
    items = read_json(value)
    is_chat = isinstance(items, list) and items and all(is_item(item) for item in items)
    return items if is_chat else value


def is_item(value: object) -> bool:
    """Return whether a value is a chat message or an item of the Responses format."""
    return isinstance(value, dict) and ("role" in value or value.get("type") in ITEM_TYPES)


def is_answer(item: Json) -> bool:
    """Return whether an item is of the assistant: a message, a thought or a call."""
    return item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call")


def parse_params(params: Any, row_id: str) -> Json:  # any JSON
    """Return responses_create_params with lists and objects where it has their JSON text.

    Tools get Gym's form, since its servers refuse that of the chat format. Raises DataError.
    """
    params = read_json(params)
    if not isinstance(params, dict):
        raise DataError(
            f"{row_id}: it has no object responses_create_params, so it is not a Gym row. Add it."
        )
    texts = ("input", "instructions")
    parsed = {key: value if key in texts else read_json(value) for key, value in params.items()}
    if "input" in params:
        parsed["input"] = read_prompt(params["input"], row_id, "input")
    if isinstance(parsed.get("tools"), list):
        parsed["tools"] = [flatten_tool(tool) for tool in parsed["tools"]]
    return parsed


def flatten_tool(tool: Any) -> Any:  # any JSON
    """Return a tool of the chat format in the Responses format. Other values stay."""
    tool = read_json(tool)
    function = read_json(tool.get("function")) if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict):
        return tool
    function = {**function, "parameters": read_json(function.get("parameters"))}
    return {"strict": False, "type": tool.get("type"), **function}


def read_template_arguments(row: Json, row_id: str) -> Json:
    """Read the arguments that a row gives to the chat template, as Gym's model server does.

    They are the object or JSON text metadata.chat_template_kwargs, and the effort of `reasoning`.
    Raises DataError.
    """
    params = read_json(row["responses_create_params"])
    effort = read_object(params, "reasoning", row_id).get("effort")
    metadata = read_object(params, "metadata", row_id)
    given = read_object(metadata, TEMPLATE_ARGUMENTS, row_id)
    arguments = {"reasoning_effort": effort, **given}
    return {key: value for key, value in arguments.items() if value is not None}


TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # of a row's metadata, or TRL's column
PYTHON_LIST = re.compile(r"\s*\[\s*\{'(role|content)':")  # as pandas writes messages to CSV
ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")  # of an assistant message, by peers


def render_items(items: Sequence[Json], row_id: str) -> list[Json]:
    """Render Responses items and chat messages to chat messages of one form.

    Consecutive items of the assistant become one message: its reasoning under `reasoning_content`,
    its text, and its function calls, whose arguments are objects. An empty message of the assistant
    is dropped, as in Gym. An output of a tool has the id and the name of its call.
    Raises UnsupportedRowError or DataError.
    """
    messages: list[Json] = []
    open_calls: dict[str, str] = {}  # {call id: function name} of calls without an output yet
    for item in items:
        kind = check_item_type(item, row_id)
        role = item.get("role") if kind == "message" else None
        if kind == "function_call_output" or role == "tool":
            messages.append(render_tool_output(item, open_calls, row_id))
        elif kind == "message" and role != "assistant":
            messages.append(render_message(item, row_id))
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            extend_assistant_message(messages[-1], item, kind, row_id)
            for call in messages[-1].get("tool_calls", []):
                open_calls[call["id"]] = call["function"]["name"]
    return [message for message in messages if not is_empty_answer(message)]


def is_empty_answer(message: Json) -> bool:
    """Return whether a message of the assistant has no text, reasoning or call."""
    keys = ("content", "reasoning_content", "tool_calls")
    return message["role"] == "assistant" and not any(message.get(key) for key in keys)


def check_item_type(item: object, row_id: str) -> str:
    """Return the type of an input item. Raises UnsupportedRowError or DataError."""
    if not isinstance(item, dict):
        raise DataError(
            f"{row_id}: an input item must be a JSON object, this is a {type(item).__name__}."
        )
    kind = str(item.get("type") or "message")
    if kind not in ITEM_TYPES:
        raise UnsupportedRowError(
            f"{row_id}: input items of type {kind} are not supported, only messages, reasoning and "
            "function calls. Remove such rows."
        )
    return kind


def render_message(item: Json, row_id: str) -> Json:
    """Render a message of the user, the system or the developer."""
    role = item.get("role")
    content = item.get("content")
    if role == "user" and isinstance(content, list):
        return {"role": "user", "content": render_user_parts(content, row_id)}
    if "content" not in item:
        raise DataError(f"{row_id}: a message of role {role!r} has no `content`. Add it.")
    if role not in ("user", "system", "developer"):
        raise DataError(
            f"{row_id}: a message has the role {role!r}. Use user, system, developer, assistant or "
            "tool."
        )
    text = "".join(read_texts(content, row_id))
    # no chat template has OpenAI's developer role
    return {"role": "user" if role == "user" else "system", "content": text}


def render_user_parts(content: Sequence[object], row_id: str) -> str | list[dict[str, str]]:
    """Render the parts of a user's message: to text, or to a list if one is an image."""
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "input_image":
            parts.append({"type": "image", "image": read_text(part, "image_url", row_id)})
        else:
            parts.append({"type": "text", "text": "".join(read_texts([part], row_id))})
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def render_tool_output(item: Json, open_calls: dict[str, str], row_id: str) -> Json:
    """Render the output of a function call: an item with `call_id`, or a message of role tool.

    Without an id it is the output of the first open call of its name, or else of the first open
    call, as in chats of TRL. The call is then no longer open. Some chat templates need the name.
    """
    is_item = item.get("type") == "function_call_output"
    content = "".join(read_texts(item.get("output" if is_item else "content"), row_id))
    key = "call_id" if is_item else "tool_call_id"
    named = [each for each, name in open_calls.items() if name == item.get("name")]
    call_id = next(iter([*named, *open_calls]), "")
    if is_item or item.get(key) is not None:
        call_id = read_text(item, key, row_id)
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    name = open_calls.pop(call_id, None) or item.get("name")
    if name:
        message["name"] = str(name)
    return message


def extend_assistant_message(message: Json, item: Json, kind: str, row_id: str) -> None:
    """Add the text, reasoning and function calls of an item to a message of the assistant."""
    calls = read_json(item.get("tool_calls")) or []
    if kind == "function_call":
        read_text(item, "arguments", row_id)
        calls = [{"id": read_text(item, "call_id", row_id), "function": item}]
    elif kind == "reasoning":
        add_thought(message, read_texts(item.get("summary") or item.get("content"), row_id))
    else:
        thoughts = [read_texts(item.get(key), row_id) for key in THOUGHT_KEYS if item.get(key)]
        add_thought(message, thoughts[0] if thoughts else [])  # Gym writes one under two keys
        texts = [message["content"], "".join(read_texts(item.get("content"), row_id))]
        message["content"] = "\n".join(text for text in texts if text)
    calls = [read_json(call) for call in calls] if isinstance(calls, list) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"{row_id}: tool_calls must be a list of JSON objects.")
    for call in calls:
        rendered = message.setdefault("tool_calls", [])
        rendered.append(render_chat_call(call, len(rendered), row_id))


def add_thought(message: Json, texts: Sequence[str]) -> None:
    """Add texts to the reasoning of a message of the assistant."""
    thoughts = [message.get("reasoning_content", ""), *texts]
    thought = "\n".join(text for text in thoughts if text)
    if thought:
        message["reasoning_content"] = thought


def render_chat_call(call: Json, number: int, row_id: str) -> Json:
    """Render a tool call of the chat format. Chat templates expect its arguments as an object.

    number: of the call in its message. A call without an id gets one of nine characters, since
    Mistral's chat templates raise for all other ids.
    """
    function = read_json(call.get("function", call))
    if not isinstance(function, dict):
        raise DataError(f"{row_id}: `function` of a tool call must be an object. Correct it.")
    name = read_text({"type": "function_call", **function}, "name", row_id)
    arguments = function.get("arguments")
    if arguments in (None, "", "null"):
        arguments = {}
    elif isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = load_json(arguments)
            if isinstance(parsed, dict):
                arguments = parsed
    elif not isinstance(arguments, dict):
        raise DataError(
            f"{row_id}: `arguments` of a function_call must be JSON text or an object, not "
            f"{arguments!r:.40}."
        )
    call_id = str(call.get("id") or f"call{number:05d}")
    rendered = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": rendered}


def render_tools(tools: object, row_id: str) -> list[Json]:
    """Render tools in Responses or chat format to chat format, without `strict`.

    Raises UnsupportedRowError or DataError.
    """
    tools = read_json(tools)
    tools = [flatten_tool(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{row_id}: tools must be a list of JSON objects.")
    rendered = []
    for tool in tools:
        if tool.get("type") != "function":
            raise UnsupportedRowError(
                f"{row_id}: tools of type {tool.get('type')!r} are not supported, only functions. "
                "Remove such rows."
            )
        read_text({**tool, "type": "function"}, "name", row_id)
        keys = ("name", "description", "parameters")
        fields = {key: read_json(tool[key]) for key in keys if tool.get(key) is not None}
        if isinstance(fields.get("parameters"), dict):
            fields["parameters"] = drop_nulls(fields["parameters"])
        rendered.append({"type": "function", "function": fields})
    return rendered


def drop_nulls(schema: object) -> object:
    """Drop the keys of a JSON schema whose value is null: Arrow adds them to each object of a list.

    `const` and the `default` of a schema that allows null stay.
    """
    if isinstance(schema, list):
        return [drop_nulls(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        is_meant = key == "const" or (key == "default" and allows_null(schema))
        if value is not None or is_meant:
            kept[key] = drop_nulls(value)
    return kept


def allows_null(schema: Json) -> bool:
    """Return whether a JSON schema says that null is a valid value."""
    kinds = schema.get("type")
    if kinds == "null" or (isinstance(kinds, list) and "null" in kinds) or schema.get("nullable"):
        return True
    choices = [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]
    return any(isinstance(choice, dict) and allows_null(choice) for choice in choices)


TEXT_TYPES = {"input_text", "output_text", "text", "summary_text"}


def read_texts(content: object, row_id: str) -> list[str]:
    """Read the texts of a content: text, a list of text parts, or null.

    Raises UnsupportedRowError for parts of another type, DataError for malformed ones.
    """
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise DataError(f"{row_id}: content must be text or a list of parts.")
    for part in content:
        if not isinstance(part, dict) or not part.get("type"):
            raise DataError(f"{row_id}: each part of a content must be an object with a type.")
    other_types = {str(part["type"]) for part in content} - TEXT_TYPES
    if other_types:
        raise UnsupportedRowError(
            f"{row_id}: {', '.join(sorted(other_types))} is not supported here, only text. "
            "Remove such rows."
        )
    return [read_text(part, "text", row_id) for part in content]


def read_text(item: Json, key: str, row_id: str) -> str:
    """Read a field that must be text. Raises DataError."""
    value = item.get(key)
    if not isinstance(value, str):
        kind = item.get("type", "function")
        raise DataError(f"{row_id}: `{key}` of a {kind} must be text, not {value!r}.")
    return value


# --- chat messages -> token ids -------------------------------------------------------------------


def encode_messages(
    messages: Sequence[Json],
    tools: Sequence[Json],
    tokenizer: PreTrainedTokenizerBase,
    row_id: str = "",
    template_arguments: Mapping[str, object] | None = None,
) -> list[int]:
    """Encode chat messages and tools to prompt ids [P]. An image has one id.

    row_id: for error messages. template_arguments: of the chat template:
    data.apply_chat_template_kwargs and the row's. If the last message is of the assistant, the
    response continues it. Raises DataError if the chat template fails.
    """
    place = f"{row_id}: the chat template" if row_id else "the chat template"
    apply: Any = tokenizer.apply_chat_template  # its types allow only messages with texts
    try:
        output = apply(
            messages,
            tools=tools or None,
            **choose_end(messages),
            return_dict=True,
            **(template_arguments or {}),
        )
    except Exception as error:  # a template is a program, and may raise anything
        raise DataError(
            f"{place} cannot render these messages: {error}. Change them, or {TEMPLATE_HINT}."
        ) from error
    return list(output["input_ids"])


def choose_end(messages: Sequence[Json]) -> dict[str, bool]:
    """Choose how `apply_chat_template` ends a prompt: it opens an answer, or continues one."""
    last = messages[-1] if messages else {}
    is_text = last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return {"add_generation_prompt": not is_text, "continue_final_message": is_text}


def check_end(messages: Sequence[Json], row_id: str) -> None:
    """Check that a response can follow the last message of a row. Raises DataError."""
    opens_answer = choose_end(messages)["add_generation_prompt"]
    if opens_answer and messages and messages[-1]["role"] == "assistant":
        raise DataError(
            f"{row_id}: the prompt ends with a thought or a call of the assistant, and no text or "
            "output follows. Add it, or remove this message."
        )


def list_images(messages: Sequence[Json], row_id: str) -> list[str]:
    """List the addresses of the images of chat messages, in order.

    Paths become absolute: relative ones begin at the folder of the row's file.
    """
    sources = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        sources += [locate(part["image"], row_id) for part in parts if "image" in part]
    return sources


def locate(source: str, row_id: str) -> str:
    """Return the address of an image as an absolute path, unless it is a data URL or http(s)."""
    if source.startswith("data:"):
        return source
    url = urlparse(source)
    if url.scheme in ("http", "https"):
        return source
    path = unquote(url.path) if url.scheme == "file" else source
    return str((Path(row_id.rpartition(":")[0]).parent / path).absolute())


# --- tasks -> batches -----------------------------------------------------------------------------


class Named(Protocol):
    """A task, or another object with these of its attributes."""

    @property
    def file(self) -> str: ...
    @property
    def weight(self) -> float | None: ...
    @property
    def key(self) -> str: ...
    @property
    def row_id(self) -> str: ...


T = TypeVar("T", bound=Named)


def take_batch(
    tasks: Sequence[T], size: int, start: int, seed: int, shuffle: bool = True
) -> list[T]:
    """Take the next `size` tasks from an endless stream of epochs, of which `start` were taken.

    Each epoch has its own order, by the content of the rows and not by their places. A batch may
    begin in one epoch and end in the next. If the entries of env.train_files have weights, each
    entry (`file`) is such a stream and gives its quota to each batch. The result depends on the
    arguments alone, so a resumed run gets the same batches. Raises DataError.

    >>> rows = [Task(name, {}, "", [], [], file=name[0], weight=1) for name in ("a1", "a2", "b1")]
    >>> [[t.row_id for t in take_batch(rows, 2, start, 0, shuffle=False)] for start in (0, 2)]
    [['a1', 'b1'], ['a2', 'b1']]
    """
    if not tasks:
        raise DataError("There are no rows to take a batch from. Name files in env.train_files.")
    if not any(task.weight for task in tasks):
        return take_from_stream(tasks, size, start, seed, 0, shuffle)
    batch: list[T] = []
    before = compute_quotas(tasks, start)
    for stream, (file, quota) in enumerate(compute_quotas(tasks, size, start).items()):
        rows = [task for task in tasks if task.file == file]
        batch += take_from_stream(rows, quota, before[file], seed, stream, shuffle)
    return batch


def take_from_stream(
    rows: Sequence[T], size: int, start: int, seed: int, stream: int, shuffle: bool
) -> list[T]:
    """Take the next rows from an endless stream of epochs. stream: its number."""
    stop = start + size
    batch: list[T] = []
    order: Sequence[int] = range(len(rows))
    for epoch in range(start // len(rows), (stop - 1) // len(rows) + 1):
        if shuffle:
            order = shuffle_rows(rows, np.random.default_rng([seed, epoch, stream]))
        before = epoch * len(rows)
        batch += [rows[index] for index in order[max(start - before, 0) : stop - before]]
    return batch


def shuffle_rows(rows: Sequence[Named], rng: np.random.Generator) -> Sequence[int]:
    """Return an order of rows. If a row is added or moved, the order of the others stays.

    Each row draws a number that depends on its key: the finalizer of SplitMix64 (Steele et al.
    2014, section 4), with a random start.
    """
    keys = [zlib.crc32((row.key or row.row_id).encode()) for row in rows]
    numbers = np.array(keys, np.uint64) + rng.integers(2**62, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return [int(index) for index in np.argsort(numbers ^ (numbers >> np.uint64(31)), kind="stable")]


def compute_quotas(tasks: Sequence[Named], size: int, start: int = 0) -> dict[str, int]:
    """Compute how many of the next `size` rows each file gives, after `start` rows of all files.

    Raises DataError if a file has no weight.
    """
    return split_rows({task.file: task.weight for task in tasks}, size, start)


def split_rows(weights: Mapping[str, float | None], size: int, start: int = 0) -> dict[str, int]:
    """Split the next `size` rows among files or functions by weight, after `start` rows of all.

    The remainders are carried to the next batch, so a file with the weight 0.2 gives every fifth
    row in the long run, also if a batch has four. Raises DataError if a file has no weight.
    """
    shares = {file: weight for file, weight in weights.items() if weight}
    for file in weights.keys() - shares:
        raise DataError(
            f"{file}: weight=0 (the default, since other files have a weight) gives no row. "
            "Give it a weight, or remove it."
        )
    before = count_rows(shares, start)
    return {file: count - before[file] for file, count in count_rows(shares, start + size).items()}


def count_rows(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Count how many of the first `total` rows each file gives, in proportion to its weight.

    The k-th row of a file is due at the time (k - phase) / its share, and the earliest ones come
    first. The phase is 1/2 (Webster's method), spread for equal weights so that files take turns.
    """
    sum_of_weights = sum(weights.values())
    shares = {file: weight / sum_of_weights for file, weight in weights.items()}
    phases = {}
    for file, weight in weights.items():
        equal = [name for name, other in weights.items() if other == weight]
        phases[file] = 1 - (equal.index(file) + 0.5) / len(equal)
    # all of these rows are due before the last one, and less than one for each file is missing
    counts = {file: max(0, int(share * (total - len(shares)))) for file, share in shares.items()}
    while sum(counts.values()) < total:
        due = {file: (n + 1 - phases[file]) / shares[file] for file, n in counts.items()}
        counts[min(due, key=lambda file: due[file])] += 1
    return counts


# --- the command ----------------------------------------------------------------------------------

CONVERT_COMMANDS = ("examples", "check", "from", "from-verl", "to-verl")  # an optional feature


def write_rows(path: Path, rows: Iterable[Json]) -> int:
    """Write rows as JSONL, under another name until the file is complete. Returns their number.

    Raises OSError and the errors of `rows`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.part")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as out:
            for row in rows:
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def parse_arguments() -> argparse.Namespace:
    """Parse the command line of a generator."""
    parser = argparse.ArgumentParser(description="Write the rows of a task in NeMo Gym's format.")
    parser.add_argument("name", choices=[*GENERATORS, *CONVERT_COMMANDS])
    parser.add_argument("--out", default="data", help="folder to write to (default: data)")
    parser.add_argument("--source", help="gsm8k: folder with the original train.jsonl, test.jsonl")
    for name, default, text in (
        ("--seed", 0, "seed of the order, and of the split of arithmetic"),
        ("--low", 2, "arithmetic: smallest number"),
        ("--high", 29, "arithmetic: largest number"),
        ("--validation", 128, "arithmetic: number of held-out pairs"),
    ):
        parser.add_argument(name, type=int, default=default, help=f"{text} (default: {default})")
    return parser.parse_args()


def main() -> None:
    """Write a generator's rows to <out>/<name>_<split>.jsonl, or run a command that converts."""
    if len(sys.argv) > 1 and sys.argv[1] in CONVERT_COMMANDS:
        from kit.errors import ConfigError
        from kit.optional import load

        try:
            return load("rows", "this command").main()
        except ConfigError as error:
            sys.exit(f"error: {error}")
    args = parse_arguments()
    try:
        for split, rows in GENERATORS[args.name](args).items():
            path = Path(args.out).expanduser() / f"{args.name}_{split}.jsonl"
            print(f"{path}: {write_rows(path, rows)} rows")
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
