"""Try a chat template before a run: does the policy see each message, once and in order?

The trial renders small conversations with marked texts. For each part of a conversation that a
template may lack, it returns why the part fails. A recipe that needs this part is then refused.

Protects: training, from a template that drops, repeats or changes what the policy should see.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kit.chat.template import (
    ANSWER,
    ANSWERED,
    ASKED,
    CALLS,
    LATER_SYSTEM,
    OUTPUTS,
    PARALLEL,
    QUESTION,
    SYSTEM,
    TOOL,
    TOOLS,
    TURNS,
    ChatTemplate,
    Message,
    RenderError,
    make_call,
    make_output,
    render_prompt,
    text_after,
)
from kit.chat.tool_calls import PARSE_TIMEOUT_S, SearchLimit, extract_by_vllm, list_tool_formats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts that no template writes, and that one which changes or cuts messages would change.
MARKS = tuple(f"Quintet's {n}: <&>\n" + "A longer text. " * 20 + "End." for n in ("one", "two"))
FIRST, SECOND = MARKS
PROMPTS = "prompts"
ANSWERS = "answers"


def user(text: str) -> Message:
    """Make a user message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """Make a system message."""
    return {"role": "system", "content": text}


YES: Message = {"role": "assistant", "content": "Yes."}
LATER = [system("Be brief."), system(FIRST), ASKED, YES, system(SECOND), ASKED]
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [make_call("b", {"text": "x"})],
}
TWO_OUTPUTS = [make_output("c", FIRST), make_output("d", SECOND)]


def try_template(template: ChatTemplate) -> dict[str, str]:
    """Try each part of a conversation. Returns {part: why it fails} of those that fail."""
    trials: dict[str, Callable[[ChatTemplate], object]] = {
        PROMPTS: functools.partial(try_prompt, messages=[user(FIRST)]),
        ANSWERS: try_answer,
        SYSTEM: functools.partial(try_prompt, messages=[system(FIRST), user(SECOND)]),
        LATER_SYSTEM: functools.partial(try_prompt, messages=LATER),
        TOOLS: try_tools,
        CALLS: try_call,
        TURNS: functools.partial(try_continuation, messages=[user(FIRST)]),
        OUTPUTS: functools.partial(try_continuation, messages=TWO_OUTPUTS[:1]),
        PARALLEL: functools.partial(try_continuation, messages=TWO_OUTPUTS),
    }
    failures = {}
    for part, trial in trials.items():
        try:
            trial(template)
        except RenderError as error:
            failures[part] = str(error).strip().rstrip(".")
    return failures


def try_prompt(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Message] = ()
) -> str:
    """Try a prompt of these messages, some of which are marks. Returns its text."""
    text = template.render(messages, tools, add_generation_prompt=True)
    check_marks(text, [each["content"] for each in messages if each["content"] in MARKS])
    return text


def try_answer(template: ChatTemplate) -> None:
    """Try to read an answer as the template writes it, or else after the generation prompt."""
    if template.is_harmony:  # kit/chat/harmony.py reads it
        return
    prompt = template.encode_text(render_prompt(template))
    try:
        ids = template.encode_answer(ANSWERED)
    except RenderError:  # it writes no past answers
        ids = template.encode_text(template.write_response(prompt, ANSWER))
    without_stop = [i for i in ids if i not in template.stop_ids]
    answer = template.split_thought(prompt, without_stop).answer
    text = str(template.tokenizer.decode(answer, skip_special_tokens=True)).strip()
    if not text.startswith(ANSWER):  # `find_unknown_end` looks at the text after it
        raise RenderError(f"they are read as {text!r} instead of {ANSWER!r}")


def find_unknown_end(template: ChatTemplate) -> str:
    """Find the text that ends an answer in the template, if it is no stop token; else "".

    Raises RenderError if the template writes no past answers.
    """
    closed = text_after(template.render([ASKED, ANSWERED]), ANSWER)
    return "" if template.find_stop(closed) else closed.strip()


def try_tools(template: ChatTemplate) -> None:
    """Try a tool in the prompt."""
    if try_prompt(template, [user(FIRST)], [TOOL]) == try_prompt(template, [user(FIRST)]):
        raise RenderError("it does not show the tools to the model")


def try_call(template: ChatTemplate) -> None:
    """Try a call of a tool in an answer."""
    if not template.max_calls:
        raise RenderError("it does not show the call to the model")


def list_changed_by_system(template: ChatTemplate) -> list[str]:
    """List the parts that the template writes in another way after a system message."""
    changed = []
    for part, message in ((TURNS, ASKED), (OUTPUTS, make_output("c", QUESTION))):
        if {SYSTEM, part} & template.failures.keys():
            continue
        conversation = template.make_conversation([message])
        texts = [
            template.continue_conversation([*opening, *conversation], [message], None)
            for opening in ([], [system("Be brief.")])
        ]
        if texts[0] != texts[1]:
            changed.append(part)
    return changed


def check_marks(text: str, marks: Sequence[str]) -> None:
    """Check that a text has each mark once and in order, as text or as JSON. Raises RenderError."""
    end = 0
    for mark in marks:
        as_json = json.dumps(mark)[1:-1]
        form = mark if mark in text else as_json
        count = text.count(mark) + text.count(as_json)
        if count == 0:
            is_changed = mark.partition(":")[0] in text
            reason = "is changed" if is_changed else "does not reach the model"
            raise RenderError(f"the message {reason}")
        if count > 1:
            raise RenderError(f"the message reaches the model {count} times")
        place = text.find(form)
        if place < end:
            raise RenderError("the messages reach the model in another order")
        end = place


def try_continuation(template: ChatTemplate, messages: list[Message]) -> None:
    """Try what the template writes between two answers. Raises RenderError.

    It must have the marked texts, must not repeat the token that ended the first answer, and must
    be the same after a longer conversation, rendered as a whole.
    """
    conversation = template.make_conversation(messages)
    stop = template.find_sampled_stop(template.find_turn_end(messages[0]), messages[0])
    stop_id: Any = template.tokenizer.convert_tokens_to_ids(stop) if stop else None
    text = template.continue_conversation(conversation, messages, stop_id)
    check_marks(text, [message["content"] for message in messages])
    if stop and text.startswith(stop):
        raise RenderError(f"it writes {stop!r} again after the policy sampled it")
    longer = [ASKED, YES, *conversation]
    if messages[0]["role"] == "tool":
        longer = [ASKED, CALLED, make_output("b", "An output."), conversation[-1]]
    if template.continue_conversation(longer, messages, stop_id) != text:
        raise RenderError("it writes the message differently in a longer conversation")
    if stop_id is None:
        return
    ids = template.encode_continuation(messages, stop_id)
    expected = template.tokenizer.encode(ANSWER + stop + text, add_special_tokens=False)
    if stop_id in expected and expected[expected.index(stop_id) + 1 :] != ids:
        raise RenderError("its tokens depend on the answer before them")


def writes_date(template: ChatTemplate) -> bool:
    """Return whether the chat template writes today's date or the time into a prompt."""
    today = datetime.date.today()
    forms = ("%d %b %Y", "%Y-%m-%d", "%B %d, %Y", "%d %B %Y", "%b %d, %Y", "%d/%m/%Y", "%m/%d/%Y")
    text = template.render([ASKED], add_generation_prompt=True)
    return any(today.strftime(form) in text for form in forms)


# --- the format of calls -------------------------------------------------------------------------


def choose_tool_format(template: ChatTemplate) -> str:
    """Choose the first of vLLM's tool parsers that reads the template's calls, else the first."""
    formats = list_tool_formats()
    return next(find_tool_formats(template, formats), formats[0])


def find_tool_formats(template: ChatTemplate, formats: Iterable[str]) -> Iterator[str]:
    """Yield those of vLLM's tool parsers that read a call as the chat template writes it."""
    if template.is_harmony:  # kit/chat/harmony.py reads the calls
        yield from formats
        return
    call = make_call("a", {"text": "a word"})
    answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        ids = template.encode_answer(answer)
    except RenderError:
        return
    without_stop = ids[:-1] if ids[-1] in template.stop_ids else ids
    prompt = template.encode_text(render_prompt(template))
    written = template.split_thought(prompt, without_stop).answer
    text = str(template.tokenizer.decode(written, skip_special_tokens=False))
    yield from (name for name in formats if reads_call(template.tokenizer, name, text))


def reads_call(tokenizer: PreTrainedTokenizerBase, tool_format: str, text: str) -> bool:
    """Return whether a tool parser finds the call of `find_tool_formats` in a text."""
    try:
        limit = SearchLimit(PARSE_TIMEOUT_S)
        calls = extract_by_vllm(tokenizer, tool_format, text, [TOOL], limit).calls
        parsed = [(call.name, json.loads(call.arguments)) for call in calls]
    except Exception:  # many parsers need tokens that only their models have
        return False
    return parsed == [("look_up", {"text": "a word"})]
