"""Responses and observations: parse what the policy sampled, name what an environment returned.

kit/chat/template.py encodes prompts and observations.

Protects: rewards, from drafts and unfinished thoughts that would count as answers or calls.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Sequence

import gym_client
from gym_client import GymError, Json
from kit.chat import harmony, thoughts
from kit.chat.parsed_response import ParsedResponse, write_call
from kit.chat.template import ChatTemplate
from kit.chat.template_trial import choose_tool_format
from kit.chat.tool_calls import AUTO_FORMAT, ExtractedCalls, extract_tool_calls

CALL_ID_LENGTH = 9  # letters and digits: Mistral's chat templates raise for all other ids


async def parse_response(
    template: ChatTemplate,
    ids: list[int],
    tools: list[Json],
    prompt_ids: Sequence[int] = (),
) -> ParsedResponse:
    """Parse the ids of a response into reasoning, text and function calls.

    The thought comes first. If it is not closed, there is neither text nor a call. A call that the
    parser cannot read stays text. prompt_ids: the ids before the response, whose last message may
    have opened the thought. Raises GymError('tool_parser').
    """
    tokenizer = template.tokenizer
    raw = str(tokenizer.decode(ids, skip_special_tokens=True))
    if template.is_harmony:
        harmonic = harmony.parse(tokenizer, prompt_ids, ids)
        calls = [make_call(*call) for call in harmonic.calls]
        written = "\n".join([harmonic.text, *map(write_call, calls)]).strip("\n")
        return ParsedResponse(harmonic.thought, harmonic.text, calls, written, raw)
    without_stop = ids[:-1] if ids[-1] in template.stop_ids else ids
    split = template.split_thought(prompt_ids, without_stop)
    written = str(tokenizer.decode(split.answer, skip_special_tokens=True))
    reasoning = ""
    if split.thought:
        reasoning = thoughts.decode_thought(tokenizer, split.thought, template.markers)
        written = written.lstrip("\n")
    found = await parse_calls(template, split.answer, tools)
    if not found.calls:
        return ParsedResponse(reasoning, written, [], written, raw)
    calls = [make_call(*call) for call in found.calls]
    text = found.text or ""
    text = text.lstrip("\n") if split.thought else text
    return ParsedResponse(reasoning, text, calls, written, raw)


async def parse_calls(template: ChatTemplate, ids: list[int], tools: list[Json]) -> ExtractedCalls:
    """Parse the calls in the ids of an answer. Raises GymError('tool_parser')."""
    if not tools or not ids:
        return ExtractedCalls(None, [])
    try:
        return await find_calls(template, ids, tools)
    except Exception as error:  # of any of vLLM's forty parsers
        start = template.tokenizer.decode(ids)[:200]
        problem = f"the {template.tool_format} parser failed on {start!r}: {error!r}"
        raise GymError("tool_parser", problem) from error


async def find_calls(template: ChatTemplate, ids: list[int], tools: list[Json]) -> ExtractedCalls:
    """Find the calls in the ids of an answer, without those in a second thought.

    A marker in the arguments of a call begins no thought.
    """
    tokenizer = template.tokenizer
    if template.tool_format == AUTO_FORMAT:
        template.tool_format = choose_tool_format(template)
    parsed = await extract_tool_calls(tokenizer, template.tool_format, ids, tools)
    markers = template.markers
    has_marker = any(markers.start in call.arguments for call in parsed.calls)
    if not parsed.calls or has_marker:
        return parsed  # also if the start marker is not known: "" is in each text
    answer = str(tokenizer.decode(ids, skip_special_tokens=False))
    if markers.start not in answer:
        return parsed
    visible = thoughts.split_text(answer, markers).answer
    visible_ids = tokenizer.encode(visible, add_special_tokens=False)
    return await extract_tool_calls(tokenizer, template.tool_format, visible_ids, tools)


def make_call(name: str, arguments: str, call_id: str = "") -> Json:
    """Make a function_call item, with a new id if the policy wrote none.

    Arguments that the policy wrote as JSON text in a text are unwrapped.
    """
    call_id = call_id or uuid.uuid4().hex[:CALL_ID_LENGTH]
    with contextlib.suppress(ValueError, RecursionError):
        inner = json.loads(arguments)
        if isinstance(inner, str) and isinstance(json.loads(inner), dict):
            arguments = inner
    return gym_client.function_call(call_id, name, arguments)


def observation_message(item: Json, names: dict[str, str], max_chars: int) -> Json:
    """Turn a Responses item of the environment into a chat message.

    names: {call_id: name of the tool}. A tool output of more than `max_chars` characters keeps its
    beginning and its end.
    """
    if item["type"] != "function_call_output":
        return {"role": "user", "content": item["content"]}
    call_id = item["call_id"]
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "name": names.get(call_id, ""),
        "content": gym_client.cut_middle(item["output"], max_chars),
    }
