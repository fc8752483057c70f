"""The fields of rows, messages and requests: used, refused with a fix, or known and not used.

A field that has a meaning for TRL, verl, Gym or OpenAI is in one of three groups:

    used       it changes the prompt, the verifier's input, or the tokens that are trained on
    refused    without it, the row or request would mean something else
    not used   a line for each file has its name and the number of its rows

Fields that are not in the table belong to the verifier, if they are at the top level of a row. In
other objects, and in rows of `sft`, which have no verifier, they count as not used. An agent's
result is kept as it is; only its token ids count.

Protects: what a model sees and learns, from a field that is ignored without a message.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import env
from env import Json, UnsupportedRowError
from gym_client import TOKEN_FIELDS, sanitize_json

# Of a message of SFT: 0 or false for one that is context. OpenAI, axolotl, prime-rl, verl, slime.
TRAINING_FLAGS = ("weight", "train", "training", "loss", "loss_mask", "step_loss_mask")
SINGLE_TURN = "single_turn_agent"  # verl's agent loop that samples one response
# Values that mean the same as no field, in each object. So do null, "", [] and {}.
DEFAULTS: Mapping[str, tuple[object, ...]] = {
    "agent_name": (SINGLE_TURN,),
    "need_tools_kwargs": (False,),
    "parallel_tool_calls": (True,),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "text": ({"format": {"type": "text"}},),
    "response_format": ({"type": "text"},),
    "detail": ("auto",),
    "stream": (False,),
    "n": (1,),
    "top_logprobs": (0,),
}
# Messages about a refused field. {shown} is its value, shortened.
MEDIA = "verl's {field} are not supported. Remove such rows."
ONE_IMAGE = "image is not supported. Write a list `images`, and <image> at its place in the prompt."
OWN_TOOLS = (
    "verl's agent loops and their tools do not run here. Remove this field to sample one turn, or "
    'write a Gym server. See docs/guides/tools.md, "1. Write the server".'
)
NOT_SUPPORTED = "{field}={shown} is not supported. "
PROMPT_ELSEWHERE = NOT_SUPPORTED + "The prompt must be in the row. Write it as `input`."
CHOICE = NOT_SUPPORTED + "The policy decides which tools it calls. Use auto."
REPLACED = NOT_SUPPORTED + "OpenAI has replaced it. Use tools."
NOT_USED = (  # at the top level of a row; peers read them
    "system system_prompt messages completion chosen rejected weight loss_mask tools images "
    "documents functions tool_choice sampling_params temperature top_p max_tokens stop "
    "enable_thinking reasoning_effort"
)


class Fields(NamedTuple):
    """The fields of one kind of object."""

    place: str = ""  # in messages, before the name of a field
    used: str = ""  # names of fields
    refused: Mapping[str, str] = {}  # {field: the message}
    unused: str | None = None  # names of fields; None: all others


ROW = Fields(unused=NOT_USED)  # the top level of any row
MEDIA_KEYS = dict.fromkeys(("videos", "video", "audios", "audio"), MEDIA)
PROMPT_ROW = Fields(  # the top level of a row of verl or TRL, which has its prompt there
    refused={**MEDIA_KEYS, "image": ONE_IMAGE, "agent_name": "{field}={value}: " + OWN_TOOLS},
)
TOOL_KEYS = ("need_tools_kwargs", "tools_kwargs", "interaction_kwargs")
EXTRA_INFO = Fields("extra_info.", refused=dict.fromkeys(TOOL_KEYS, "{field}: " + OWN_TOOLS))
FUNCTION_INFO = Fields("extra_info.", unused="row")  # it hides the row that a function gets there
CHAT_ROW = Fields(  # the top level of a row of `sft`, which has no verifier
    used=f"messages tools {env.TEMPLATE_ARGUMENTS}",
    refused={**MEDIA_KEYS, "images": MEDIA, "image": MEDIA},
)
PARAMS = Fields(
    "responses_create_params.",
    "input instructions tools metadata reasoning",
    {"tool_choice": CHOICE}
    | dict.fromkeys(("previous_response_id", "conversation", "prompt"), PROMPT_ELSEWHERE),
)
METADATA = Fields("responses_create_params.metadata.", unused="extra_body")
MESSAGE = Fields(
    "messages.",
    "role content tool_calls tool_call_id type id status call_id arguments output summary "
    + " ".join((*env.THOUGHT_KEYS, *TRAINING_FLAGS, *TOKEN_FIELDS)),
    {"function_call": REPLACED},
)
CALL = MESSAGE._replace(used=f"{MESSAGE.used} name")  # or an output: its name is that of the tool
TOOL = Fields("tools.", "type strict name description parameters")
PART = Fields("messages.content.", "type text image image_url bytes path annotations logprobs")
REQUEST = Fields(
    "",
    "model messages tools max_tokens max_completion_tokens logprobs stream stream_options user "
    "return_tokens_as_token_ids return_token_ids chat_template_kwargs reasoning_effort metadata "
    "for_training stop tool_choice",
    {
        "n": NOT_SUPPORTED + "A request gets one response. Send several requests.",
        "response_format": NOT_SUPPORTED + "The policy's text is not constrained. Use text.",
        "logit_bias": NOT_SUPPORTED + "Tokens must be on-policy. Remove it.",
        "top_logprobs": NOT_SUPPORTED + "Only sampled tokens have a log-prob. Use 0.",
        "functions": REPLACED,
        "function_call": REPLACED,
    },
)


@functools.cache
def split_names(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


def is_default(field: str, value: object) -> bool:
    """Return whether a field with this value means the same as no field.

    An object of nulls is empty, since Parquet fills the objects of a column with nulls.
    """
    value = env.read_json(value)
    is_empty = isinstance(value, dict) and not any(value.values())
    return is_empty or value in (None, "", [], *DEFAULTS.get(field, ()))


def walk(kind: Fields, value: Json, messages: object) -> Iterator[tuple[Fields, Json]]:
    """Yield an object, its tools, then each message and each part of it, with their kinds."""
    yield kind, value
    tools = env.read_json(value.get("tools"))
    for tool in list_objects([*map(env.flatten_tool, tools)] if isinstance(tools, list) else []):
        yield TOOL, tool
    for message in list_objects(messages):
        yield CALL if message.get("role") in (None, "tool") else MESSAGE, message
        for part in list_objects(message.get("content")):
            yield PART, part


def walk_row(row: Json) -> Iterator[tuple[Fields, Json]]:
    """Yield the objects of a Gym row that Quintet reads, with their kinds."""
    params = row["responses_create_params"]
    extra_info = row.get("extra_info")
    yield ROW, row
    yield METADATA, params.get("metadata") or {}
    yield FUNCTION_INFO, extra_info if isinstance(extra_info, dict) else {}
    yield from walk(PARAMS, params, params.get("input"))


def list_objects(value: object) -> list[Json]:
    """List the objects in a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def find_refused(objects: Iterable[tuple[Fields, Json]]) -> tuple[str, str] | None:
    """Return the first refused field, and the message about it."""
    for kind, value in objects:
        for field, message in kind.refused.items():
            if field in value and not is_default(field, value[field]):
                given = value[field]
                name = kind.place + field
                return field, message.format(field=name, value=given, shown=shorten(given))
    return None


def check(objects: Iterable[tuple[Fields, Json]], row_id: str) -> None:
    """Check that a row has no refused field. Raises UnsupportedRowError."""
    refused = find_refused(objects)
    if refused:
        raise UnsupportedRowError(f"{row_id}: {refused[1]}")


def list_unused(objects: Iterable[tuple[Fields, Json]]) -> set[str]:
    """List the fields that have a meaning for others, and are not used here."""
    unused: set[str] = set()
    for kind, value in objects:
        known = value.keys() if kind.unused is None else value.keys() & split_names(kind.unused)
        names = known - split_names(kind.used) - kind.refused.keys()
        unused.update(kind.place + name for name in names if not is_default(name, value[name]))
    return unused


def shorten(value: object) -> str:
    """Return the beginning of a value, for a message."""
    return f"{sanitize_json(value)!r:.60}"


def describe_unused(counts: Mapping[str, int], name: str) -> str:
    """Describe the fields of a file that are not used. counts: {field: number of rows}."""
    shown = ", ".join(f"{field} ({count:,} rows)" for field, count in sorted(counts.items()))
    return f'{name}: not used here: {shown}. See docs/guides/data.md, "Fields".'
