"""Write the table of docs/chat_templates.md: which public chat templates work, and with what.

    .venv/bin/python benchmarks/chat_templates.py

It needs the packages of requirements-templates.txt, which `make test` installs. --compare prints
how often verl's token builder and `renderers` give the same tokens as the kit.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kit.config import checks  # noqa: E402
from kit.data.processor import TextProcessor  # noqa: E402
from kit.rollout import template_trial  # noqa: E402
from kit.rollout.chat_template import (  # noqa: E402
    CALLS,
    OUTPUTS,
    PARALLEL,
    SYSTEM,
    TOOL,
    TOOLS,
    TURNS,
    ChatTemplate,
    make_call,
    make_output,
)
from tests.helpers.public_templates import MODEL_TOKENS, list_template_files, load, make_tokenizer  # noqa: E402

PAGE = ROOT / "docs" / "chat_templates.md"
START = "<!-- table: benchmarks/chat_templates.py -->"
QUESTION = [{"role": "user", "content": "Who?"}]


class Row(NamedTuple):
    """A template's row of the table."""

    template: str
    prompt: str
    system: str
    observation: str
    tools: str
    outputs: str
    thought: str
    endpoint: str


def make_template(name: str) -> ChatTemplate:
    """Load a public template, and try it."""
    public = load(name)
    template = ChatTemplate(TextProcessor(public.tokenizer), public.stop_ids)
    template.failures = template_trial.try_template(template)
    return template


def describe(name: str, formats: list[str]) -> Row:
    """Describe a template in a row of the table."""
    template = make_template(name)
    failures = template.failures
    if {template_trial.PROMPTS, template_trial.ANSWERS} & failures.keys():
        return Row(name, "refused", "", "", "", "", "", "")

    def cell(*parts: str) -> str:
        return "refused" if {*parts} & failures.keys() else "yes"

    tools = cell(TOOLS)
    if tools == "yes":
        readable = template_trial.find_tool_formats(template, formats)
        tools = "gpt-oss" if template.is_harmony else next(readable, "set the format")
    outputs = cell(TOOLS, OUTPUTS, PARALLEL)
    can_be_agent = outputs == "yes" or cell(TURNS) == "yes"
    return Row(
        name,
        "yes",
        cell(SYSTEM),
        cell(TURNS),
        tools,
        outputs,
        describe_thought(template),
        "yes" if can_be_agent else "first turn",
    )


def describe_thought(template: ChatTemplate) -> str:
    """Describe the marker of a thought, and whether the prompt opens it; "" if it has none."""
    if template.is_harmony:
        return "`analysis`"
    start, end = template.markers
    source = str(template.tokenizer.chat_template)
    if end not in source:
        return ""
    opened = template.render(QUESTION, add_generation_prompt=True).rstrip()
    place = " in the prompt" if opened.endswith(start) else ""
    marker = start.replace("|", r"\|")  # in a table
    return f"`{marker}`{place}"


def render_page() -> str:
    """Render the page with a new table."""
    text = PAGE.read_text(encoding="utf-8")
    formats = checks.list_tool_formats()
    rows = [describe(name, formats) for name in list_template_files()]
    titles = ("template", "prompt", "system message", "observation", "tools", "outputs of tools")
    lines = ["| " + " | ".join((*titles, "thought", "endpoint")) + " |", "| --- " * 8 + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return f"{text.partition(START)[0]}{START}\n\n" + "\n".join(lines) + "\n"


# --- the comparison ------------------------------------------------------------------------------


def compare() -> None:
    """Print how often two other libraries give the kit's tokens between two answers."""
    counts: Counter[str] = Counter()
    for name in list_template_files():
        template = make_template(name)
        if TURNS in template.failures or template_trial.PROMPTS in template.failures:
            continue
        has_tools = not {TOOLS, CALLS, OUTPUTS} & template.failures.keys()
        cases: list[list[dict[str, Any]]] = [[{"role": "user", "content": "And then?"}]]
        if has_tools:
            cases.append([make_output("a", "An output.")])
        for case in cases:
            kind = case[0]["role"]
            counts[f"{kind}: the kit"] += 1
            counts[f"{kind}: verl"] += agrees_with_verl(template, case)
            counts[f"{kind}: renderers"] += agrees_with_renderers(template, case)
    for key, count in sorted(counts.items()):
        print(f"{key}: {count}")


def encode_case(template: ChatTemplate, case: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Encode an answer, and what stands between it and the next one."""
    answer: dict[str, Any] = {"role": "assistant", "content": "An answer."}
    if case[0]["role"] == "tool":
        answer = {"role": "assistant", "content": "", "tool_calls": [make_call("a", {"text": "x"})]}
    try:
        ids = template.encode_answer(answer)
    except template_trial.RenderError:
        ids = [template.tokenizer.eos_token_id]
    return ids, template.encode_continuation(case, ids[-1])


def agrees_with_verl(template: ChatTemplate, case: list[dict[str, Any]]) -> bool:
    """Return whether a builder of verl, of any family, gives the kit's tokens."""
    from verl.utils.tokenizer import continuous_token_wiring as wiring

    answer_ids, ours = encode_case(template, case)
    call: dict[str, Any] = {"role": "assistant", "content": "An answer."}
    if case[0]["role"] == "tool":
        call = {"role": "assistant", "content": "", "tool_calls": [make_call("a", {"text": "x"})]}
    before = [*QUESTION, call]
    for family in wiring.list_continuous_token_builder_families():
        try:
            builder = wiring.get_continuous_token_builder_class(family)(template.tokenizer)
            prompt = builder.build_initial_tokens(QUESTION)
            runtime = prompt + answer_ids
            merged = builder.merge_context_tokens(before, [*before, *case], runtime).token_ids
        except Exception:  # of any of verl's builders
            continue
        if merged == prompt + answer_ids + ours:
            return True
    return False


def agrees_with_renderers(template: ChatTemplate, case: list[dict[str, Any]]) -> bool:
    """Return whether a renderer that writes the same prompt gives the kit's tokens."""
    import renderers
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    tokens = [*template.tokenizer.get_added_vocab(), *MODEL_TOKENS]
    source = template.tokenizer
    tokenizer: Any = make_tokenizer(source.chat_template, source.eos_token, tokens)
    stop_ids = {*tokenizer.convert_tokens_to_ids(template.stop_texts)}
    copy = ChatTemplate(TextProcessor(tokenizer), stop_ids)
    prompt = copy.encode_prompt(QUESTION, [TOOL])
    ids, ours = encode_case(copy, case)
    for family, kind in RENDERER_REGISTRY.items():
        if family in ("default", "gpt-oss"):  # the second loads its vocabulary from the network
            continue
        try:
            config = type(renderers.config_from_name(family))
            is_optional = "thinking_retention" in config.model_fields
            renderer = kind(
                tokenizer, config(**({"thinking_retention": "all"} if is_optional else {}))
            )
            rendered = renderer.render_ids(QUESTION, tools=[TOOL], add_generation_prompt=True)
            bridged = renderer.bridge_to_next_turn(prompt, ids, case, tools=[TOOL])
        except Exception:  # most need tokens that other models lack
            continue
        if rendered == prompt and bridged and bridged.token_ids == prompt + ids + ours:
            return True
    return False


if __name__ == "__main__":
    if "--compare" in sys.argv:
        compare()
    else:
        PAGE.write_text(render_page(), encoding="utf-8")
