"""Text and ids: what an answer's ids say, and the ids of what the environment says, by the model's own template.

Nothing that was sampled is ever encoded again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import regex
from jinja2 import TemplateError

import env
import gym_client
from env import OTHER_TEMPLATE
from gym_client import GymError

PARSE_S = 5.0  # CPU seconds of this process for one search of a tool parser in an answer


class TimedPattern:
    """A compiled pattern whose searches raise TimeoutError after PARSE_S seconds.

    Some of vLLM's patterns take time in the cube of the text's length. vLLM uses the package `regex`, which takes a
    timeout, and lets other threads run meanwhile.
    """

    def __init__(self, pattern: regex.Pattern[str]):
        self.pattern = pattern

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.pattern, name)
        timed = name in (
            "search",
            "match",
            "fullmatch",
            "findall",
            "finditer",
            "sub",
            "subn",
            "split",
        )
        return functools.partial(value, timeout=PARSE_S) if timed else value


async def understand(
    policy: Any, ids: list[int], tools: list[dict[str, Any]]
) -> tuple[str, str, list[dict[str, Any]]]:
    """An answer's ids -> (thought, text, function calls), as the verifier and the tools read it.

    Calls are found by vLLM's parser for the model's format, or by verl's where vLLM is not installed; what it cannot
    read is text. A thought is what precedes `</think>`, where the model writes one. Raises GymError('tool_parser').
    """
    text, calls = policy.tokenizer.decode(ids, skip_special_tokens=True), []
    if tools:
        said = ids[:-1] if ids[-1] in policy.stop_ids else ids
        try:
            rest, found = await parse(policy, said, tools)
        except (
            Exception
        ) as error:  # forty parsers, and whatever a policy writes: none may end the run
            why = f"the {policy.tool_format} parser failed on {policy.tokenizer.decode(said)[:200]!r}: {error!r}"
            raise GymError("tool_parser", why) from error
        if found:
            text = rest or ""
            # nine letters or digits, since some chat templates (Mistral's) take nothing else
            named = [(uuid.uuid4().hex[:9], call) for call in found]
            calls = [
                gym_client.function_call(call_id, call.name, call.arguments)
                for call_id, call in named
            ]
    thought, mark, answer = text.rpartition("</think>")
    return (
        (thought.removeprefix("<think>").strip(), answer.lstrip("\n"), calls)
        if mark
        else ("", text, calls)
    )


async def parse(
    policy: Any, ids: list[int], tools: list[dict[str, Any]]
) -> tuple[str | None, Sequence[Any]]:
    """(what is said beside the calls, the calls: each a name and its arguments as JSON)."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        from verl.experimental.agent_loop.tool_parser import ToolParser
        from verl.tools.schemas import OpenAIFunctionToolSchema

        parser = ToolParser.get_tool_parser(policy.tool_format, policy.tokenizer)
        schemas = [
            OpenAIFunctionToolSchema.model_validate(schema(tool["function"])) for tool in tools
        ]
        return await parser.extract_tool_calls(ids, schemas)
    raw = policy.tokenizer.decode(
        ids, skip_special_tokens=False
    )  # some formats mark their calls with special tokens
    request: Any = ChatCompletionRequest.model_validate(
        {"messages": [], "model": "policy", "tools": tools}
    )
    found = ToolParserManager.get_tool_parser(policy.tool_format)(policy.tokenizer, request.tools)
    for key in dir(found):
        if isinstance(getattr(found, key, None), regex.Pattern):
            setattr(found, key, TimedPattern(getattr(found, key)))
    parsed = await asyncio.to_thread(found.extract_tool_calls, raw, request)
    return parsed.content, [
        call.function for call in parsed.tool_calls
    ] if parsed.tools_called else []


def schema(function: dict[str, Any]) -> dict[str, Any]:
    """A tool as verl's schema takes it, which knows less of JSON schema than tools use."""
    asked = function.get("parameters") or {}
    kinds = {
        name: told.get("type")
        for name, told in (asked.get("properties") or {}).items()
        if isinstance(told, dict)
    }
    properties = {name: {"type": kind or "string"} for name, kind in kinds.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(asked.get("required") or []),
    }
    return {
        "type": "function",
        "function": {"name": function["name"], "description": "", "parameters": parameters},
    }


def control_tokens(tokenizer: Any) -> dict[str, int]:
    """{text: id} of the tokens that structure a conversation: the special ones, and those that the template writes.

    Not among them is the token for unknown text, which any text may become.
    """
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder
    tokens = {token.content: i for i, token in added.items() if token.content.strip()}
    special = {
        *tokenizer.all_special_tokens,
        *(token.content for token in added.values() if token.special),
    }
    special.discard(tokenizer.unk_token)
    return {text: i for text, i in tokens.items() if text in special or text in template}


def mark_tokens(value: Any, tokens: Iterable[str], mark: str) -> Any:
    """`value` with `mark` after the first character of each token in its texts, also where tokens overlap.

    Raises GymError('template') for a token of one character, which cannot be cut.
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
    present = [
        token for token in tokens if token in value
    ]  # few texts have any, and a search for overlaps is slow
    if short := [token for token in present if len(token) == 1]:
        why = f"the environment's text has {short[0]!r}, one of the tokenizer's control tokens"
        raise GymError("template", f"{why}; remove it from the server's answer")
    places = {
        found.start() + 1
        for token in present
        for found in re.finditer(f"(?={re.escape(token)})", value)
    }
    borders = [0, *sorted(places), len(value)]
    return (
        mark.join(value[begin:end] for begin, end in itertools.pairwise(borders))
        if places
        else value
    )


def encode_marked(text: str, tokens: dict[str, int], mark: str, tokenizer: Any) -> list[int]:
    """The ids of a rendered conversation, of which `mark` cuts tokens in two, so that they stay text.

    Raises GymError('template') if there are more control tokens in the ids than the template wrote.
    """
    pieces = text.split(mark)
    ids = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
    longest_first = sorted(tokens, key=len, reverse=True)
    written = re.compile("|".join(map(re.escape, longest_first))) if tokens else None
    expected = sum(len(written.findall(piece)) for piece in pieces) if written else 0
    control = {*tokens.values()}
    found = sum(i in control for i in ids)
    if found > expected:
        why = f"the environment's text becomes {found - expected} control tokens of the tokenizer"
        raise GymError("template", f"{why}; remove them from the server's answer")
    return ids


def first_prompt_ids(
    messages: list[dict[str, Any]],
    observation: str,
    tools: list[dict[str, Any]],
    tokenizer: Any,
    where: str,
) -> list[int]:
    """The ids of a row's messages and of what its environment observes first, as a user message.

    A control token in the observation is encoded as text; the row's own messages are trusted. Raises env.DataError,
    GymError('template').
    """
    mark, tokens = uuid.uuid4().hex, control_tokens(tokenizer)
    marked = mark_tokens(observation, tokens, mark)
    messages = [*messages, {"role": "user", "content": marked}]
    if marked == observation:
        return env.encode(messages, tools, tokenizer, where)
    if getattr(tokenizer, "vision", None):
        raise GymError(
            "template",
            f"{where}: the first observation has control tokens; remove them on the server",
        )
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise GymError(
            "template", f"the chat template does not take the first observation: {error}"
        ) from error
    return encode_marked(text, tokens, mark, tokenizer)


def observed_ids(messages: list[dict[str, Any]], tokenizer: Any, stop_ids: set[int]) -> list[int]:
    """The ids between a sampled answer and the next one: [rest of the answer's turn, `messages`, next opening].

    messages: what the environment said (role tool or user). The chat template is asked for a conversation that ends in
    an answer and for the same one continued; what it adds after the answer's stop token, which was sampled, is new.
    A control token in a message is encoded as the text that it is, in pieces: no server writes a turn of another role.
    Raises GymError where the template cannot continue a conversation.
    """
    vision, mark = getattr(tokenizer, "vision", None), uuid.uuid4().hex
    refused = (
        {*vision.placeholders} if vision else set()
    )  # tokens that stand for an image: see below
    tokens = {text: i for text, i in control_tokens(tokenizer).items() if i not in refused}
    messages = mark_tokens(messages, tokens, mark)
    calls = [
        {
            "id": m["tool_call_id"],
            "type": "function",
            "function": {"name": m["name"], "arguments": {}},
        }
        for m in messages
        if m["role"] == "tool"
    ]
    answer = {
        "role": "assistant",
        "content": "An answer.",
        **({"tool_calls": calls} if calls else {}),
    }
    start: list[dict[str, Any]] = [{"role": "user", "content": "A question."}, answer]
    if vision:
        start, messages = vision.messages(start), vision.messages(messages)
    try:
        ended = tokenizer.apply_chat_template(start, tokenize=False)
        whole = tokenizer.apply_chat_template(
            start + messages, tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise GymError(
            "template", f"the chat template does not take what the environment said: {error}"
        ) from error
    stops = [
        s for s in tokenizer.convert_ids_to_tokens(sorted(stop_ids)) if ended.rstrip().endswith(s)
    ]
    if stops:  # whole, after as many stop tokens as `ended` has
        turns = ended.count(stops[0])
        new = "".join(whole.split(stops[0], turns)[turns:])
    else:
        new = whole[len(ended) :] if whole.startswith(ended) else ""
    if not new:
        raise GymError(
            "template",
            f"the chat template does not go on where its last answer ended; {OTHER_TEMPLATE}",
        )
    ids = encode_marked(new, tokens, mark, tokenizer)
    if refused & {*ids}:
        raise GymError(
            "template", "the environment says what stands for an image in the model's ids"
        )
    return ids


def observed_message(item: dict[str, Any], names: dict[str, str], limit: int) -> dict[str, Any]:
    """What the environment said, a Responses item, as a chat message; a tool's answer is cut to `limit` characters."""
    if item["type"] != "function_call_output":
        return {"role": "user", "content": item["content"]}
    call_id, answer, half = item["call_id"], item["output"], limit // 2
    if len(answer) > limit:  # its beginning and end
        answer = f"{answer[:half]}\n... {len(answer) - 2 * half} characters ...\n{answer[len(answer) - half :]}"
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "name": names.get(call_id, ""),
        "content": answer,
    }
