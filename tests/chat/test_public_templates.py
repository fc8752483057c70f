"""Episodes with the chat templates of public packages have the tokens that the template writes.

Each template is tried (kit/chat/template_trial.py). A part that fails is refused. For the parts
that pass, the tokens of an episode equal the template's own rendering of the whole conversation.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import re
from typing import Any, NamedTuple

import pytest

import env
import gym_client
from kit.chat import tool_calls
from kit.chat.processor import TextProcessor
from kit.chat.responses import parse_response
from kit.chat.template import (
    CALLS,
    LATER_SYSTEM,
    OUTPUTS,
    PARALLEL,
    SYSTEM,
    TOOLS,
    TURNS,
    ChatTemplate,
    RenderError,
    make_call,
    make_output,
)
from kit.chat.template_trial import ANSWERS, PROMPTS, find_tool_formats, try_template
from kit.data.episode import Episode
from tests.helpers.public_templates import PublicTemplate, list_template_files, load
from tests.helpers.rollouts import Game, Script, ToolSession, ask_endpoint, context_of, play

FAMILIES = (  # the others have the same forms; `make soak` tests all
    *("axolotl/alpaca", "axolotl/command_a_tool_use", "axolotl/deepseek_v3", "axolotl/exaone4"),
    *("axolotl/mistral_v3_tekken", "trl/deepseek_r1_distill", "trl/deepseekv3", "trl/gemma"),
    *("trl/gemma4", "trl/gemma4_v2", "trl/glm4moe", "trl/gptoss", "trl/idefics3", "trl/lfm2_2_5"),
    *("trl/llama3_1", "trl/nemotron_3_nano", "trl/phi3", "trl/qwen3", "trl/qwen3_5_nothink"),
    "vllm/template_minicpmv45",
)
NAMES = [
    pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.soak)
    for name in list_template_files()
]
ROW_TOOL = {
    "type": "function",
    "name": "look_up",
    "description": "Look it up.",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },
}
# A template may leave an empty thought out of past answers, or add it.
EMPTY_THOUGHT = re.compile(
    r"<think>\s*</think>\s*|<think>\s*(?=<|\S)|<\|channel>thought\s*<channel\|>"
)


@functools.cache
def try_once(name: str) -> ChatTemplate:
    """The template with this name, after its trial."""
    public = load(name)
    template = ChatTemplate(TextProcessor(public.tokenizer), public.stop_ids)
    template.failures = try_template(template)
    return template


def make_template(public: PublicTemplate) -> ChatTemplate:
    return copy.copy(try_once(public.name))


@functools.cache
def list_readable_formats(name: str) -> list[str]:
    """The tool parsers that read a template's calls."""
    return list(find_tool_formats(try_once(name), tool_calls.list_tool_formats()))


@pytest.fixture
def public(request):
    return load(request.param)


def make_context(client, public, template, tool_format="hermes"):
    return context_of(client, public.tokenizer, tool_format=tool_format, template=template)


def make_task(template, items, tools=()) -> env.Task:
    """Make a task of these items, without the system message if the template takes none."""
    if SYSTEM in template.failures:
        items = [item for item in items if item.get("role") != "system"]
    row = {"responses_create_params": {"input": items, "tools": list(tools)}}
    messages, chat_tools = env.render_row(row, "x:1")
    ids = template.encode_prompt(messages, chat_tools, "x:1")
    return env.Task("x:1", row, "server", messages, ids, tools=chat_tools)


QUESTION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Question one?"},
]


def check_whole_conversation(ids, conversation, tools, template) -> bool:
    """Compare the ids of an episode with one rendering of its conversation by the template.

    Returns whether they are equal, apart from the end of the last turn. Some templates cannot be
    equal: in past turns they drop thoughts, the system message or the stop token. Then the texts
    after the first prompt must be equal without these.
    """
    tokenizer = template.tokenizer
    adapted = [template.adapt(message) for message in conversation]
    whole = tokenizer.apply_chat_template(adapted, tools=tools or None, tokenize=False)
    whole_ids = tokenizer.encode(whole, add_special_tokens=False)
    shorter = min(len(ids), len(whole_ids))
    if ids[:shorter] == whole_ids[:shorter] and abs(len(ids) - len(whole_ids)) <= 1:
        return True
    text = tokenizer.decode(ids)
    assert remove_optional(text, template) == remove_optional(whole, template)
    return False


def remove_optional(text, template) -> str:
    """Remove what a template may write for the last turn only, after the first question."""
    text = EMPTY_THOUGHT.sub("", text.partition("one?")[2])
    for token in (*template.stop_texts, "<|end|>"):
        text = text.replace(token, "")
    if text.endswith("<|CHATBOT_TOKEN|>"):  # the next turn of Command A's template
        text = text.removesuffix("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
    return re.sub(r"\s+", " ", text).strip()


def encode_answer(template, message, previous="user") -> list[int]:
    """Encode an answer as a policy would sample it, with a stop token."""
    try:
        ids = template.encode_answer(message, previous)
    except RenderError:  # the prompt opens a thought, and the template drops those of past turns
        text = template.markers.end + message["content"]
        ids = template.tokenizer.encode(text, add_special_tokens=False)
    return ids if ids[-1] in template.stop_ids else [*ids, template.tokenizer.eos_token_id]


# --- the trial -----------------------------------------------------------------------------------


@pytest.mark.soak
def test_there_are_templates_of_many_models():
    files = list_template_files()
    usable = [name for name in files if try_once(name).failures.keys() <= {LATER_SYSTEM}]
    assert {*FAMILIES} <= {*files} and len(files) >= 100 and len(usable) >= 50, usable


# --- episodes ------------------------------------------------------------------------------------


class LongGame(Game):
    """A game of three steps, each with another observation."""

    async def step(self, response, last):
        result = await super().step(response, last)
        observation = f"Observation {self.steps_left}." if result.observation else None
        return gym_client.StepResult(observation, 0.5, result.terminated, result.truncated)


@pytest.mark.parametrize("public", NAMES, indirect=True)
def test_a_game_of_three_turns_has_the_templates_tokens(public):
    template = make_template(public)
    if {TURNS, PROMPTS, ANSWERS} & template.failures.keys():
        return  # a recipe that needs this is refused
    texts = ["Answer A.", "Answer B.", "Answer C."]
    answers = [{"role": "assistant", "content": text} for text in texts]
    client = Script([encode_answer(template, answer) for answer in answers])
    task = make_task(template, QUESTION)
    game = LongGame(3, observation=None)
    episode = play(task, game, make_context(client, public, template))
    assert (episode.status, episode.ended) == ("ok", "terminated")
    messages = []
    for body in game.bodies:
        messages += [item["content"][0]["text"].strip() for item in body]
    assert messages == texts
    conversation = [*task.messages]
    for number, answer in enumerate(answers):
        conversation.append(answer)
        if number < 2:
            conversation.append({"role": "user", "content": f"Observation {2 - number}."})
    ids = episode.prompt_ids + episode.response_ids
    check_whole_conversation(ids, conversation, [], template)
    if "deepseek_r1" not in public.name and "deepseekv3" not in public.name:  # thoughts are dropped
        assert_chat_is_the_episode(episode, conversation, task, template)


def make_tool_conversation(template, count: int) -> list[dict[str, Any]]:
    """Make the answers and outputs of an episode: `count` calls, one call, a text."""
    letters = "ab"[:count]
    calls = [make_call(letter, {"text": f"argument {letter}"}) for letter in letters]
    last_call = make_call("c", {"text": "argument c"})
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        *[make_output(letter, f"Output {letter}.") for letter in letters],
        {"role": "assistant", "content": "", "tool_calls": [last_call]},
        make_output("c", "Output c."),
        {"role": "assistant", "content": "The end."},
    ]


def encode_answers(template, conversation) -> list[list[int]]:
    """Encode each answer of a conversation as a policy would sample it."""
    answers = []
    previous = "user"
    for message in conversation:
        if message["role"] == "assistant":
            answers.append(encode_answer(template, message, previous))
        previous = message["role"]
    return answers


def find_setting(public, template) -> tuple[int, str] | None:
    """Find how many calls to make in one answer, and the tool parser; None if tools are refused."""
    if {TOOLS, CALLS, OUTPUTS, PARALLEL, ANSWERS} & template.failures.keys():
        return None
    readable = list_readable_formats(public.name)
    assert readable, "no tool parser reads the template's calls"
    one_call = template.is_harmony or readable[0] == "llama3_json"
    return (1 if one_call else template.max_calls), readable[0]


class ToolEpisode(NamedTuple):
    """An episode with tools, and the two sides that played it."""

    episode: Episode
    task: env.Task
    conversation: list[dict[str, Any]]  # after the task's messages
    policy: Script
    answers: list[list[int]]  # of the policy
    session: ToolSession
    outputs: list[str]  # of the session
    tool_format: str


def play_tools(public, template) -> ToolEpisode | None:
    """Play an episode with three answers; None if the template lacks a part that it needs."""
    setting = find_setting(public, template)
    if not setting:
        return None
    count, tool_format = setting
    task = make_task(template, QUESTION, [ROW_TOOL])
    conversation = make_tool_conversation(template, count)
    answers = encode_answers(template, conversation)
    policy = Script(answers)
    outputs = [message["content"] for message in conversation if message["role"] == "tool"]
    session = ToolSession(outputs)
    episode = play(task, session, make_context(policy, public, template, tool_format))
    return ToolEpisode(episode, task, conversation, policy, answers, session, outputs, tool_format)


@pytest.mark.parametrize("public", NAMES, indirect=True)
def test_an_episode_with_tools_has_the_templates_tokens(public):
    template = make_template(public)
    played = play_tools(public, template)
    if not played:
        return  # a recipe that needs this is refused
    episode = played.episode
    assert (episode.status, episode.error, episode.ended) == ("ok", "", "stop")
    assert len(episode.turns) == 3 and not played.session.answers
    ids = episode.prompt_ids + episode.response_ids
    whole = [*played.task.messages, *played.conversation]
    check_whole_conversation(ids, whole, played.task.tools, template)
    assert_chat_is_the_episode(episode, whole, played.task, template)


def assert_chat_is_the_episode(episode, messages, task, template) -> None:
    """`sft` trains on the tokens that RL samples, and on no others."""
    from extras import sft

    row = {"messages": messages, "tools": task.tools}
    example = sft.tokenize(row, template, "x:1")
    assert example.prompt_ids == episode.prompt_ids
    assert example.response_ids == episode.response_ids
    assert example.response_mask == episode.response_mask


@pytest.mark.parametrize("public", NAMES, indirect=True)
def test_the_endpoint_gives_an_agent_the_same_tokens(public):
    template = make_template(public)
    played = play_tools(public, template)
    if not played:
        return  # a recipe that needs this is refused
    outputs = [*played.outputs]
    agent = Script(played.answers)
    context = make_context(agent, public, template, played.tool_format)
    history = [*played.task.messages]
    for _ in played.answers:
        body = {"messages": history, "tools": played.task.tools}
        reply = ask_endpoint(body, context)
        assert reply.status == 200, reply.body
        message = reply.body["choices"][0]["message"]
        history = [*history, message]
        for call in message["tool_calls"] or []:
            output = {"role": "tool", "tool_call_id": call["id"], "content": outputs.pop(0)}
            history.append(output)
    assert agent.prompts == played.policy.prompts
    assert played.episode.prompt_ids == agent.prompts[0]


# --- thoughts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("public", NAMES, indirect=True)
def test_an_unfinished_thought_is_no_answer_and_makes_no_calls(public):
    template = make_template(public)
    if {PROMPTS, ANSWERS} & template.failures.keys() or template.is_harmony:
        return  # refused, or in tests/chat/test_thoughts.py
    tokenizer = template.tokenizer
    task = make_task(template, QUESTION)
    opened = template.render(task.messages, add_generation_prompt=True)
    start, end = template.markers
    is_open = opened.rstrip().endswith(start)
    is_usable = template.failures.keys() <= {LATER_SYSTEM}
    readable = list_readable_formats(public.name) if is_usable else []
    context = make_context(None, public, template, readable[0] if readable else "hermes")
    call = make_call("a", {"text": "a draft"})
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    draft = ""
    if readable:
        ids = template.encode_answer(answer)
        draft = tokenizer.decode(ids[:-1]).partition(end)[2] or tokenizer.decode(ids[:-1])
    tools = [{"type": "function", "function": {**ROW_TOOL}}] if readable else []
    thought = f"{'' if is_open else start}Let me see: {draft}"

    def parse(text):
        ids = tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
        return asyncio.run(parse_response(context.template, ids, tools, task.prompt_ids))

    unfinished = parse(thought)
    assert (unfinished.text, unfinished.calls) == ("", [])
    assert unfinished.reasoning.startswith("Let me see:")
    finished = parse(f"{thought}{end}\n\nIt is 7.")
    assert (finished.text, finished.calls) == ("It is 7.", [])
    assert finished.reasoning.startswith("Let me see:")
    plain = parse("It is 7.")
    assert plain.text == ("" if is_open else "It is 7.")
