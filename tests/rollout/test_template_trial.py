"""The trial of a chat template: each part that a template lacks has a reason, and no other part."""

from __future__ import annotations

import datetime

import pytest

import env
from kit.data.processor import TextProcessor
from kit.errors import RunError
from kit.rollout import template_trial
from kit.rollout.chat_template import (
    CALLS,
    LATER_SYSTEM,
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
from kit.rollout.template_trial import ANSWERS, PROMPTS
from tests.helpers.rollouts import (
    CHATML,
    STOPS,
    TEMPLATES,
    Game,
    bytes_tokenizer,
    chatml_tokenizer,
    context_of,
    one_turn_each,
    play,
    task_of,
)

ALL = {PROMPTS, SYSTEM, LATER_SYSTEM, TOOLS, CALLS, TURNS, OUTPUTS, PARALLEL}
NO_TOOLS = {TOOLS, CALLS}
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RAISE = "{{ raise_exception('not here') }}"


def make_template(source: str, stop: str = "<|im_end|>", **arguments) -> ChatTemplate:
    tokenizer = bytes_tokenizer(source, stop)
    template = ChatTemplate(TextProcessor(tokenizer), {tokenizer.eos_token_id}, arguments)
    template.failures = template_trial.try_template(template)
    return template


def for_role(role: str, text: str) -> str:
    """Make a template that does something else for one role."""
    return CHATML.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == '" + role + "' %}" + text + "{% else %}",
    ).replace("<|im_end|>\n{% endfor %}{% if add", "<|im_end|>\n{% endif %}{% endfor %}{% if add")


@pytest.mark.parametrize(
    ("source", "failures"),
    [
        (CHATML, set()),
        (PLAIN, NO_TOOLS),
        ("", ALL),
        ("{{ 1 // 0 }}", ALL),
        (RAISE, ALL),
        (for_role("system", RAISE), {SYSTEM, LATER_SYSTEM}),
        (for_role("system", ""), {SYSTEM, LATER_SYSTEM}),
        (for_role("tool", ""), {OUTPUTS, PARALLEL}),
        (for_role("tool", RAISE), {OUTPUTS, PARALLEL}),
        # the output reaches the model twice
        (for_role("tool", "{{ m.content }}{{ m.content }}"), {OUTPUTS, PARALLEL}),
        # only the first of two outputs, or only the last
        (for_role("tool", "{% if loop.last %}{{ m.content }}{% endif %}"), {PARALLEL}),
        (
            for_role("tool", "{% if loop.previtem.role != 'tool' %}{{ m.content }}{% endif %}"),
            {PARALLEL},
        ),
        # one call in an answer
        (
            for_role(
                "assistant",
                "{% if m.tool_calls | length > 1 %}" + RAISE + "{% endif %}"
                "<|im_start|>assistant\n{{ m.content }}{% if m.tool_calls %}"
                "{{ m.tool_calls[0].function | tojson }}{% endif %}<|im_end|>\n",
            ),
            set(),
        ),
        # the number of a message is in its text
        (
            CHATML.replace("{{ m.role }}\n", "{{ m.role }} {{ loop.index }}\n"),
            {TURNS, OUTPUTS, PARALLEL},
        ),
        # no later turns
        (
            "{% if messages | length > 2 %}" + RAISE + "{% endif %}" + PLAIN,
            {*NO_TOOLS, LATER_SYSTEM, TURNS, OUTPUTS, PARALLEL},
        ),
        # an answer has a heading that nobody samples as text
        (
            CHATML.replace("assistant\n{% endif %}", "{% endif %}").replace(
                "{{ m.role }}\n",
                "{% if m.role != 'assistant' %}{{ m.role }}\n{% else %}to user: {% endif %}",
            ),
            {ANSWERS},
        ),
    ],
)
def test_a_part_fails_if_and_only_if_the_template_lacks_it(source, failures):
    template = make_template(source)
    assert template.failures.keys() == failures, template.failures
    for part, reason in template.failures.items():
        assert reason
        message = template.describe_failure(part)
        assert part in message and reason in message
        assert message.endswith("set actor_rollout_ref.model.custom_chat_template.")


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_the_templates_of_the_tests_have_all_parts(family):
    failures = make_template(TEMPLATES[family], STOPS[family]).failures
    assert failures.keys() == ({SYSTEM, LATER_SYSTEM} if family == "mistral" else set())


def test_a_prompt_that_needs_a_missing_part_is_refused_and_any_other_is_not():
    template = make_template(
        PLAIN.replace(
            "{% for", "{% if messages[0].role == 'system' %}" + RAISE + "{% endif %}{% for", 1
        )
    )
    user = [{"role": "user", "content": "hi"}]
    assert template.encode_prompt(user)
    with pytest.raises(
        env.DataError, match=r"^x:3: the chat template fails for a system message: not here"
    ):
        template.encode_prompt([{"role": "system", "content": "s"}, *user], [], "x:3")
    with pytest.raises(env.DataError, match="fails for tools: it does not show the tools"):
        template.encode_prompt(user, [TOOL], "x:3")
    answer = {"role": "assistant", "content": "", "tool_calls": [make_call("a", {})]}
    with pytest.raises(env.DataError, match="fails for a call in an earlier message"):
        template.encode_prompt([*user, answer, make_output("a", "x")], [], "x:3")


def test_a_game_ends_the_run_if_the_template_has_no_later_turns():
    tokenizer = chatml_tokenizer()
    context = context_of(one_turn_each(["a", "b"], tokenizer), tokenizer)
    context.template.failures = {TURNS: "no"}
    task = task_of(tokenizer, tools=False)
    with pytest.raises(RunError, match="the chat template fails for a user message after"):
        play(task, Game(2), context)
    context.max_turns = 1
    assert play(task, Game(2), context).ended == "turns"


# --- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "as_text"),
    [
        ("{{ c.function.arguments | tojson }}", False),
        ("{{ c.function.arguments }}", True),  # Python's text of an object is no JSON
        ("{{ c.function.name + c.function.arguments }}", True),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", False),
        (
            "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}",
            False,
        ),
    ],
)
def test_arguments_are_an_object_or_text_as_the_template_needs_them(arguments, as_text):
    source = CHATML.replace("{{ c.function | tojson }}", "{{ c.function.name }} " + arguments)
    template = make_template(source)
    assert template.forms.arguments_as_text == as_text and not template.failures
    call = make_call("a", {"text": "é"})
    text = template.render(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
    )
    assert '{"text": "é"}' in text or "text=é" in text or '{"text": "\\u00e9"}' in text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ m.reasoning_content }}", "T"),
        ("{{ m.thinking }}", "T"),
        ("{{ m.reasoning }}", "T"),
        ("", "<think>T</think>A"),
    ],
)
def test_reasoning_has_the_key_that_the_template_shows(shown, expected):
    source = CHATML.replace("{{ m.content or '' }}", shown + "{{ m.content or '' }}")
    answer = {"role": "assistant", "content": "A", "reasoning_content": "T"}
    text = make_template(source).render([{"role": "user", "content": "x"}, answer])
    assert expected in text and text.count("T") == 1


def test_text_is_a_part_of_a_list_for_templates_of_vision_models():
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}"
        "{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = make_template(source)
    assert template.forms.text_as_parts
    assert template.failures.keys() == NO_TOOLS
    prompt = template.encode_prompt([{"role": "user", "content": "hi"}])
    assert template.tokenizer.decode(prompt) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


# --- stop tokens ---------------------------------------------------------------------------------


def test_a_stop_token_that_opens_the_next_turn_is_not_written_twice():
    """As in GLM's format, where the policy samples the marker of the next role."""
    source = (
        "{% for m in messages %}"
        "{{ '<|im_start|>' if m.role == 'user' else '<s>' if m.role == 'tool' else '<|begin|>' }}"
        "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{% endfor %}"
        "{{ tools | tojson if tools else '' }}{% if add_generation_prompt %}<|begin|>{% endif %}"
    )
    tokenizer = bytes_tokenizer(source, "<|im_start|>")
    other = tokenizer.convert_tokens_to_ids("<s>")
    stop_ids = {tokenizer.eos_token_id, other}
    template = ChatTemplate(TextProcessor(tokenizer), stop_ids)
    assert not template_trial.try_template(template)
    message = {"role": "user", "content": "hi"}
    texts = [
        tokenizer.decode(template.encode_continuation([message], last))
        for last in (tokenizer.eos_token_id, other, 65)
    ]
    assert texts == ["hi<|begin|>", "<|im_start|>hi<|begin|>", "<|im_start|>hi<|begin|>"]
    output = make_output("a", "out")
    assert tokenizer.decode(template.encode_continuation([output], other)) == "out<|begin|>"
    answer = {"role": "assistant", "content": "x"}
    assert template.encode_answer(answer)[-1] == tokenizer.eos_token_id
    call = {"role": "assistant", "content": "", "tool_calls": [make_call("a", {})]}
    assert template.encode_answer(call)[-1] == other


def test_another_stop_token_than_the_templates_stands_for_it():
    tokenizer = chatml_tokenizer()
    end_of_text = tokenizer.convert_tokens_to_ids("<|begin|>")
    template = ChatTemplate(TextProcessor(tokenizer), {tokenizer.eos_token_id, end_of_text})
    message = {"role": "user", "content": "hi"}
    expected = template.encode_continuation([message], tokenizer.eos_token_id)
    assert template.encode_continuation([message], end_of_text) == expected
    assert tokenizer.decode(expected) == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    # a response that was cut off has no stop token, so the template's own follows
    cut = template.encode_continuation([message], 65)
    assert cut == [tokenizer.eos_token_id, *expected]


def test_the_end_of_an_answer_that_is_no_stop_token_is_found():
    assert template_trial.find_unknown_end(make_template(CHATML)) == ""
    llama = make_template(TEMPLATES["llama"], "<|end_header|>")
    assert template_trial.find_unknown_end(llama) == "<|eot|>"


def test_a_part_that_depends_on_a_system_message_is_named():
    assert template_trial.list_changed_by_system(make_template(CHATML)) == []
    numbered = for_role("tool", "{{ messages[0].role }}{{ m.content }}<|im_end|>")
    assert template_trial.list_changed_by_system(make_template(numbered)) == [OUTPUTS]


# --- dates, arguments and formats ----------------------------------------------------------------


def test_a_template_that_writes_the_date_is_found():
    dated = "{{ strftime_now('%d %b %Y') }}" + CHATML
    assert template_trial.writes_date(make_template(dated))
    assert not template_trial.writes_date(make_template(CHATML))
    pinned = "{{ date_string or strftime_now('%d %b %Y') }}" + CHATML
    assert not template_trial.writes_date(make_template(pinned, date_string="26 Jul 2024"))
    today = datetime.date.today().strftime("%d %b %Y")
    assert today in make_template(pinned).render([{"role": "user", "content": "x"}])


def test_the_arguments_reach_the_template_wherever_text_becomes_tokens():
    source = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ mode }}{% endif %}")
    template = make_template(source, mode="brief")
    tokenizer = template.tokenizer
    user = {"role": "user", "content": "hi"}
    texts = [
        tokenizer.decode(template.encode_prompt([user])),
        tokenizer.decode(template.encode_first_prompt([user], "more", [], "x:1")),
        tokenizer.decode(template.encode_first_prompt([user], "<|im_end|>", [], "x:1")),
        tokenizer.decode(template.encode_continuation([user], tokenizer.eos_token_id)),
    ]
    assert all(text.endswith("<|im_start|>assistant\nbrief") for text in texts), texts


@pytest.mark.parametrize(
    ("call", "formats"),
    [
        ("<tool_call>{{ c.function | tojson }}</tool_call>", ["hermes"]),
        ("call {{ c.function.name }} with {{ c.function.arguments | tojson }}", []),
    ],
)
def test_a_tool_parser_must_read_the_templates_own_call(call, formats):
    source = CHATML.replace("<tool_call>{{ c.function | tojson }}</tool_call>", call)
    candidates = ["hermes", "qwen3_coder", "no such parser"]
    found = template_trial.find_tool_formats(make_template(source), candidates)
    assert list(found) == formats
