"""Chat formats: parse a sampled response, and encode prompts and observations as token ids.

Sampled tokens are never encoded again. Text of an environment is encoded with the model's chat
template, and does not become one of the template's control tokens (`mark_tokens`).
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import regex
from jinja2 import TemplateError

import env
import gym_client
from env import TEMPLATE_HINT
from gym_client import GymError
from kit.rollout.sampler import SamplerContext

PARSE_TIMEOUT_S = 5.0  # for one search of a tool parser, in CPU seconds of this process
END_OF_THOUGHT = "</think>"
CALL_ID_LENGTH = 9  # letters and digits: Mistral's chat templates raise for all other ids
SEARCHES = frozenset(
    ("search", "match", "fullmatch", "findall", "finditer", "sub", "subn", "split")
)


# --- responses -----------------------------------------------------------------------------------


class ParsedResponse(NamedTuple):
    """A response of the policy as text and function calls."""

    reasoning: str
    text: str
    calls: list[dict[str, Any]]  # function_call items

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return the response as Responses items. Without calls it has a message, maybe empty."""
        items: list[dict[str, Any]] = []
        if self.reasoning:
            items.append(gym_client.reasoning(self.reasoning))
        if self.text or not self.calls:
            items.append(gym_client.message(self.text))
        return items + self.calls


async def parse_response(
    context: SamplerContext, ids: list[int], tools: list[dict[str, Any]]
) -> ParsedResponse:
    """Parse the ids of a response into reasoning, text and function calls.

    Text before `</think>` is reasoning. A call that the parser cannot read stays text.
    Raises GymError('tool_parser').
    """
    text = context.tokenizer.decode(ids, skip_special_tokens=True)
    calls: list[dict[str, Any]] = []
    if tools:
        without_stop = ids[:-1] if ids[-1] in context.stop_ids else ids
        try:
            parsed = await extract_tool_calls(context, without_stop, tools)
        except Exception as error:  # of any of vLLM's forty parsers
            start = context.tokenizer.decode(without_stop)[:200]
            problem = f"the {context.tool_format} parser failed on {start!r}: {error!r}"
            raise GymError("tool_parser", problem) from error
        if parsed.calls:
            text = parsed.text or ""
        for call in parsed.calls:
            call_id = uuid.uuid4().hex[:CALL_ID_LENGTH]
            calls.append(gym_client.function_call(call_id, call.name, call.arguments))
    reasoning, end, answer = text.rpartition(END_OF_THOUGHT)
    if not end:
        return ParsedResponse("", text, calls)
    reasoning = reasoning.removeprefix("<think>").strip()
    return ParsedResponse(reasoning, answer.lstrip("\n"), calls)


class ExtractedCalls(NamedTuple):
    """The output of a tool parser."""

    text: str | None  # outside of the calls
    calls: Sequence[Any]  # each with `name` and `arguments`, which is JSON text


async def extract_tool_calls(
    context: SamplerContext, ids: list[int], tools: list[dict[str, Any]]
) -> ExtractedCalls:
    """Find the tool calls in the ids of a response with vLLM's parser, or verl's without vLLM."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        return await extract_tool_calls_by_verl(context, ids, tools)
    # Some formats mark their calls with special tokens.
    text = context.tokenizer.decode(ids, skip_special_tokens=False)
    body = {"messages": [], "model": "policy", "tools": tools}
    request: Any = ChatCompletionRequest.model_validate(body)
    parser_class = ToolParserManager.get_tool_parser(context.tool_format)
    parser = parser_class(context.tokenizer, request.tools)
    limit_search_time(parser)
    result = await asyncio.to_thread(parser.extract_tool_calls, text, request)
    calls = [call.function for call in result.tool_calls] if result.tools_called else []
    return ExtractedCalls(result.content, calls)


async def extract_tool_calls_by_verl(
    context: SamplerContext, ids: list[int], tools: list[dict[str, Any]]
) -> ExtractedCalls:
    """Find the tool calls in the ids of a response with verl's parser of the format."""
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.tools.schemas import OpenAIFunctionToolSchema

    parser = ToolParser.get_tool_parser(context.tool_format, context.tokenizer)
    schemas = [
        OpenAIFunctionToolSchema.model_validate(to_verl_tool(tool["function"])) for tool in tools
    ]
    return ExtractedCalls(*await parser.extract_tool_calls(ids, schemas))


def to_verl_tool(function: dict[str, Any]) -> dict[str, Any]:
    """Reduce a tool to the part of JSON schema that verl's schema accepts."""
    parameters = function.get("parameters") or {}
    properties = {}
    for name, schema in (parameters.get("properties") or {}).items():
        if isinstance(schema, dict):
            properties[name] = {"type": schema.get("type") or "string"}
    verl_parameters = {
        "type": "object",
        "properties": properties,
        "required": list(parameters.get("required") or []),
    }
    return {
        "type": "function",
        "function": {"name": function["name"], "description": "", "parameters": verl_parameters},
    }


class TimedPattern:
    """A compiled pattern whose searches raise TimeoutError after PARSE_TIMEOUT_S.

    Some patterns of vLLM's parsers take time cubic in the length of the text. vLLM uses the package
    `regex`, whose searches accept a timeout and let other threads run.
    """

    def __init__(self, pattern: regex.Pattern[str]):
        self.pattern = pattern

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.pattern, name)
        if name in SEARCHES:
            return functools.partial(value, timeout=PARSE_TIMEOUT_S)
        return value


def limit_search_time(parser: Any) -> None:
    """Replace the patterns of a tool parser by patterns with a timeout."""
    for name in dir(parser):
        value = getattr(parser, name, None)
        if isinstance(value, regex.Pattern):
            setattr(parser, name, TimedPattern(value))


# --- control tokens ------------------------------------------------------------------------------
# An environment's text may contain the text of a control token, for example `<|im_start|>`. If that
# were encoded as a control token, it would open a turn of another role. So `mark_tokens` splits
# such text with a random mark before the template is rendered. `encode_marked_text` then encodes
# the pieces between the marks separately.


def find_control_tokens(tokenizer: Any) -> dict[str, int]:
    """Return {text: id} of the special tokens, and of all added tokens in the chat template.

    The token for unknown text is not included, since any text may become it.
    """
    template = str(tokenizer.chat_template or "")
    special = set(tokenizer.all_special_tokens)
    added: dict[str, int] = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special.add(token.content)
        if token.content.strip():
            added[token.content] = token_id
    special.discard(tokenizer.unk_token)
    return {text: i for text, i in added.items() if text in special or text in template}


def mark_tokens(value: Any, tokens: Iterable[str], mark: str) -> Any:
    """Insert `mark` into each occurrence of a token's text, in messages or in one text.

    The mark is after the first character of each occurrence, also where two of them overlap. The
    values of `role` and `type` stay. tokens: their texts. Raises GymError('template') for a token
    of one character, which cannot be split.
    """
    if isinstance(value, dict):
        return {
            key: item if key in ("role", "type") else mark_tokens(item, tokens, mark)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [mark_tokens(item, tokens, mark) for item in value]
    if not isinstance(value, str):
        return value
    positions: set[int] = set()
    for token in tokens:
        if token not in value:  # skip the slower search for overlaps, which few texts need
            continue
        if len(token) == 1:
            problem = f"the environment's text contains the control token {token!r}"
            raise GymError("template", f"{problem}. Remove it from the server's answer.")
        overlapping = re.finditer(f"(?={re.escape(token)})", value)
        positions.update(match.start() + 1 for match in overlapping)
    borders = [0, *sorted(positions), len(value)]
    return mark.join(value[start:end] for start, end in itertools.pairwise(borders))


def encode_marked_text(text: str, tokens: dict[str, int], mark: str, tokenizer: Any) -> list[int]:
    """Encode a rendered conversation in pieces, so that tokens split by `mark` stay text.

    Raises GymError('template') if the ids have more control tokens than the pieces.
    """
    pieces = text.split(mark)
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer.encode(piece, add_special_tokens=False)
    control_ids = set(tokens.values())
    count = sum(i in control_ids for i in ids)
    surplus = count - count_tokens(pieces, tokens)
    if surplus > 0:
        problem = f"the environment's text becomes {surplus} control tokens of the tokenizer"
        raise GymError("template", f"{problem}. Remove their text from the server's answer.")
    return ids


def count_tokens(pieces: Sequence[str], tokens: Iterable[str]) -> int:
    """Count the occurrences of `tokens` in all pieces, without overlaps."""
    longest_first = sorted(tokens, key=len, reverse=True)
    if not longest_first:
        return 0
    pattern = re.compile("|".join(map(re.escape, longest_first)))
    return sum(len(pattern.findall(piece)) for piece in pieces)


# --- prompts and observations --------------------------------------------------------------------


def encode_first_prompt(
    messages: list[dict[str, Any]],
    observation: str,
    tools: list[dict[str, Any]],
    processor: Any,
    row_id: str,
) -> list[int]:
    """Encode a row's messages, then the environment's first observation as a user message.

    Control tokens in the observation stay text. In the row's messages they are encoded as control
    tokens, since the author of the row is trusted. processor: of kit.data.processor. Raises
    env.DataError, GymError('template').
    """
    tokenizer = processor.tokenizer
    mark = uuid.uuid4().hex
    tokens = find_control_tokens(tokenizer)
    marked = mark_tokens(observation, tokens, mark)
    messages = [*messages, {"role": "user", "content": marked}]
    if marked == observation:
        return env.encode_messages(messages, tools, tokenizer, row_id, processor)
    if processor.reads_images:
        problem = f"{row_id}: the first observation contains control tokens"
        raise GymError("template", f"{problem}. Remove them on the server.")
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        problem = f"the chat template does not take the first observation: {error}"
        raise GymError("template", problem) from error
    return encode_marked_text(text, tokens, mark, tokenizer)


def encode_observation(
    messages: list[dict[str, Any]], processor: Any, stop_ids: set[int]
) -> list[int]:
    """Encode `messages` to the ids that stand between two responses of the policy.

    These ids follow the stop token of the first response. They have the rest of its turn, such as a
    line feed, then `messages`, then the opening of the next response's turn.
    messages: of the environment, with role tool or user. Control tokens in them stay text, so that
    no server can write a turn of another role. Raises GymError('template').

    verl's ContinuousTokenBuilder (verl/utils/tokenizer/continuous_token.py) is not used, for three
    reasons. It encodes control tokens in messages as control tokens. It chooses the template's
    family by model_type, so a Llama with ChatML (SmolLM2) loses the line feed after `<|im_end|>`.
    It renders two user messages in a row, and templates with alternating roles then raise.
    """
    tokenizer = processor.tokenizer
    placeholders = set(processor.placeholder_ids())
    mark = uuid.uuid4().hex
    tokens = find_control_tokens(tokenizer)
    tokens = {text: i for text, i in tokens.items() if i not in placeholders}
    messages = mark_tokens(messages, tokens, mark)
    conversation = processor.template_messages(make_conversation(messages))
    messages = processor.template_messages(messages)
    text = render_continuation(conversation, messages, tokenizer, stop_ids)
    ids = encode_marked_text(text, tokens, mark, tokenizer)
    if placeholders & set(ids):
        problem = "the environment's text contains a token that stands for an image"
        raise GymError("template", f"{problem}. Remove it from the server's answer.")
    return ids


def make_conversation(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a short conversation that `messages` can follow. It has the calls that they answer."""
    calls = []
    for message in messages:
        if message["role"] == "tool":
            function = {"name": message["name"], "arguments": {}}
            call = {"id": message["tool_call_id"], "type": "function", "function": function}
            calls.append(call)
    answer: dict[str, Any] = {"role": "assistant", "content": "An answer."}
    if calls:
        answer["tool_calls"] = calls
    return [{"role": "user", "content": "A question."}, answer]


def render_continuation(
    conversation: list[dict[str, Any]],
    messages: list[dict[str, Any]],
    tokenizer: Any,
    stop_ids: set[int],
) -> str:
    """Return what the chat template writes for `messages`, after the conversation's stop token.

    The template renders the conversation without and with `messages`. The continuation is the
    difference. If the template writes no stop token, it starts at the end of the conversation.
    Raises GymError('template').
    """
    try:
        before = tokenizer.apply_chat_template(conversation, tokenize=False)
        after = tokenizer.apply_chat_template(
            conversation + messages, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        problem = f"the chat template does not take what the environment returned: {error}"
        raise GymError("template", problem) from error
    stop_tokens = tokenizer.convert_ids_to_tokens(sorted(stop_ids))
    final_stops = [token for token in stop_tokens if before.rstrip().endswith(token)]
    continuation = ""
    if final_stops:
        stop_count = before.count(final_stops[0])
        parts = after.split(final_stops[0], stop_count)
        continuation = "".join(parts[stop_count:])
    elif after.startswith(before):
        continuation = after[len(before) :]
    if not continuation:
        problem = "the chat template does not continue a conversation where its last answer ended"
        raise GymError("template", f"{problem}. To use it, {TEMPLATE_HINT}.")
    return continuation


def observation_message(
    item: dict[str, Any], names: dict[str, str], max_chars: int
) -> dict[str, Any]:
    """Turn a Responses item of the environment into a chat message.

    names: {call_id: name of the tool}. A tool output of more than `max_chars` characters keeps its
    beginning and its end.
    """
    if item["type"] != "function_call_output":
        return {"role": "user", "content": item["content"]}
    output = item["output"]
    if len(output) > max_chars:
        half = max_chars // 2
        end = output[len(output) - half :]
        output = f"{output[:half]}\n... {len(output) - 2 * half} characters ...\n{end}"
    call_id = item["call_id"]
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "name": names.get(call_id, ""),
        "content": output,
    }
