"""Tool parsers: find the calls in a response, with vLLM's parser of the format or with verl's.

Protects: a run, from a response on which a parser takes cubic time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import regex

from env import Json
from kit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParser

MISTRAL_CALLS = "[TOOL_CALLS]"  # the list of calls follows
MAX_CALLS = 32  # in one response that has a malformed one
PARSE_TIMEOUT_S = 5.0  # for one search of a tool parser, in CPU seconds of this process
SHORT_CHARS = 2000  # a text up to this length is parsed without a thread, which would take longer
SHORT_TIMEOUT_S = 0.02  # then it is parsed again, in a thread
SEARCHES = frozenset(
    ("search", "match", "fullmatch", "findall", "finditer", "sub", "subn", "split")
)

AUTO_FORMAT = "auto"  # multi_turn.format: the first parser that reads the template's own calls
COMMON_FORMATS = ("hermes", "llama3_json", "qwen3_coder", "mistral", "glm45", "pythonic")


class Call(NamedTuple):
    """A tool call of a response."""

    name: str
    arguments: str  # JSON text
    id: str = ""  # as the policy wrote it, or "" if it wrote none


class ExtractedCalls(NamedTuple):
    """The output of a tool parser."""

    text: str | None  # outside of the calls
    calls: Sequence[Call]


def list_tool_formats() -> list[str]:
    """List the tool parsers of vLLM, or of verl without it, the most common ones first."""
    try:
        from vllm.tool_parsers import ToolParserManager  # takes 7 s, and is needed later anyway
    except ImportError:
        from verl.experimental.agent_loop.tool_parser import ToolParser

        parsers = list(ToolParser._registry)
    else:
        parsers = ToolParserManager.list_registered()
    common = [name for name in COMMON_FORMATS if name in parsers]
    return [*common, *sorted(set(parsers) - {*common})]


def check_tool_format(name: str, formats: Sequence[str]) -> None:
    """Check that a parser for the model's tool calls exists. Raises ConfigError."""
    if name not in formats:
        raise ConfigError(
            f"actor_rollout_ref.rollout.multi_turn.format={name}: there is no such tool parser. "
            f"Use {AUTO_FORMAT}, or one of: {', '.join(formats)}."
        )


async def extract_tool_calls(
    tokenizer: PreTrainedTokenizerBase, tool_format: str, ids: list[int], tools: list[Json]
) -> ExtractedCalls:
    """Find the tool calls in the ids of a response with vLLM's parser, or verl's without vLLM."""
    try:
        import vllm.tool_parsers  # noqa: F401
    except ImportError:
        return await extract_tool_calls_by_verl(tokenizer, tool_format, ids, tools)
    # Some formats mark their calls with special tokens.
    text = str(tokenizer.decode(ids, skip_special_tokens=False))
    extract = functools.partial(extract_by_vllm, tokenizer, tool_format, text, tools)
    if len(text) <= SHORT_CHARS:
        limit = SearchLimit(SHORT_TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            found = extract(limit)
            if not limit.was_hit:
                return found
    return await asyncio.to_thread(extract, SearchLimit(PARSE_TIMEOUT_S))


@dataclasses.dataclass
class SearchLimit:
    """The limit of a search, in CPU seconds of this process. After one that hits it, all fail."""

    seconds: float
    was_hit: bool = False  # some of vLLM's parsers catch the error


def extract_by_vllm(
    tokenizer: PreTrainedTokenizerBase,
    tool_format: str,
    text: str,
    tools: list[Json],
    limit: SearchLimit,
) -> ExtractedCalls:
    """Find the tool calls in the text of a response with vLLM's parser of the format."""
    from vllm.tool_parsers import ToolParserManager

    request = make_request(json.dumps(tools))
    parser_class = ToolParserManager.get_tool_parser(tool_format)
    parser = parser_class(tokenizer, request.tools)  # type: ignore[arg-type]  # vLLM's own type
    limit_searches(parser, limit)
    found = read_calls(parser, text, request)
    start = getattr(parser, "tool_call_start_token", "")
    if found.calls or not start or not 1 < text.count(start) <= MAX_CALLS:
        return found
    before, *others = text.split(start)  # one malformed call hides the others from the parser
    pieces = [read_calls(parser, start + other, request) for other in others]
    texts = [before, *(piece.text or "" for piece in pieces)]
    calls = list(itertools.chain.from_iterable(piece.calls for piece in pieces))
    return ExtractedCalls("".join(texts), calls)


@functools.lru_cache(maxsize=64)
def make_request(tools: str) -> ChatCompletionRequest:
    """Make the request for vLLM's parsers. tools: as JSON text, since few requests differ."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    body = {"messages": [], "model": "policy", "tools": json.loads(tools)}
    return ChatCompletionRequest.model_validate(body)


def read_calls(parser: ToolParser, text: str, request: ChatCompletionRequest) -> ExtractedCalls:
    """Read the tool calls of a text with a parser of vLLM."""
    result = parser.extract_tool_calls(text, request)
    if not result.tools_called:
        return ExtractedCalls(result.content, [])
    ids = find_written_ids(text, [call.id for call in result.tool_calls])
    functions = [call.function for call in result.tool_calls]
    calls = [Call(f.name, f.arguments, i) for f, i in zip(functions, ids, strict=True)]
    return ExtractedCalls(result.content, calls)


def find_written_ids(text: str, parsed_ids: Sequence[str]) -> list[str]:
    """Find the ids that the policy wrote for its calls, or "" for each.

    Kimi and Mistral write them, and the outputs must have the same ids. vLLM returns those of Kimi.
    It makes new ones for Mistral, whose calls are a JSON list. parsed_ids: those of vLLM.
    """
    ids = [call_id for call_id in parsed_ids if call_id and call_id in text]
    written = text.partition(MISTRAL_CALLS)[2].lstrip()
    if not ids and written.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            entries = json.JSONDecoder().raw_decode(written)[0]
            found = [entry.get("id") for entry in entries if isinstance(entry, dict)]
            ids = [call_id for call_id in found if isinstance(call_id, str)]
    is_valid = all(re.fullmatch(r"[\w.:-]{1,64}", call_id) for call_id in ids)
    if len(set(ids)) == len(parsed_ids) and is_valid:
        return ids
    return [""] * len(parsed_ids)


async def extract_tool_calls_by_verl(
    tokenizer: PreTrainedTokenizerBase, tool_format: str, ids: list[int], tools: list[Json]
) -> ExtractedCalls:
    """Find the tool calls in the ids of a response with verl's parser of the format."""
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.tools.schemas import OpenAIFunctionToolSchema

    parser = ToolParser.get_tool_parser(tool_format, tokenizer)
    schemas = [
        OpenAIFunctionToolSchema.model_validate(to_verl_tool(tool["function"])) for tool in tools
    ]
    text, calls = await parser.extract_tool_calls(ids, schemas)
    return ExtractedCalls(text, [Call(call.name, call.arguments) for call in calls])


def to_verl_tool(function: Json) -> Json:
    """Reduce a tool to what verl's schema accepts: the types of its parameters."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    schemas = {name: each for name, each in properties.items() if isinstance(each, dict)}
    types = {name: {"type": schema.get("type") or "string"} for name, schema in schemas.items()}
    parameters = {"type": "object", "properties": types}
    verl_function = {"name": function["name"], "description": "", "parameters": parameters}
    return {"type": "function", "function": verl_function}


class TimedPattern:
    """A compiled pattern whose searches raise TimeoutError at a limit.

    Some patterns of vLLM's parsers take time cubic in the length of the text. vLLM uses the package
    `regex`, whose searches accept a timeout and let other threads run.
    """

    def __init__(self, pattern: regex.Pattern[str], limit: SearchLimit):
        self.pattern = pattern
        self.limit = limit

    def __getattr__(self, name: str) -> object:
        if name in SEARCHES:
            return functools.partial(self.search, name)
        return getattr(self.pattern, name)

    def search(self, name: str, *arguments: object, **options: object) -> object:
        """Call a method of the pattern, with this limit instead of the parser's own."""
        if self.limit.was_hit:
            raise TimeoutError
        options["timeout"] = self.limit.seconds
        try:
            found = getattr(self.pattern, name)(*arguments, **options)
            return iter(list(found)) if name == "finditer" else found
        except TimeoutError:
            self.limit.was_hit = True
            raise


def limit_searches(parser: ToolParser, limit: SearchLimit) -> None:
    """Replace the patterns of a tool parser by patterns with a limit."""
    for scope in (*map(vars, reversed(type(parser).__mro__)), vars(parser)):
        for name, value in list(scope.items()):
            if isinstance(value, regex.Pattern):
                setattr(parser, name, TimedPattern(value, limit))
