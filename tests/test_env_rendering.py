"""Tests how Gym rows become chat messages, tools and token ids. Invalid rows are errors."""

from __future__ import annotations

import json
import subprocess

import pytest

import env
from kit.data.verl_rows import read_rows
from tests.helpers.recipes import GYM_PYTHON, gym_examples

# names in paths of examples without prompts: questions, and tasks of an environment server
NO_ROWS = ("bixbench_example", "example_questions", "nemo_user_sim")


def render(**params):
    return env.render_row({"responses_create_params": params}, "x.jsonl:1")


def render_messages(**params):
    return render(**params)[0]


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, *calls):
    """An assistant message. calls: (id, name, arguments) of each tool call."""
    message = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
            for i, n, a in calls
        ]
    return message


def call_item(call_id, arguments, name="f"):
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "id": None,
    }


def output_item(call_id, output):
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": None}


def reasoning_item(*texts):
    return {
        "type": "reasoning",
        "id": "rs",
        "summary": [{"type": "summary_text", "text": text} for text in texts],
    }


PARTS = [
    {"type": "input_text", "text": "a"},
    {"type": "output_text", "text": "b"},
    {"type": "text", "text": "c"},
]


@pytest.mark.parametrize(
    ("params", "messages"),
    [
        ({"input": [{"role": "user", "content": PARTS}]}, [user("abc")]),
        # the environment writes the prompt
        ({"input": []}, []),
        ({"instructions": "i"}, [system("i")]),
        # null is the same as a missing key
        ({"input": "hi", "instructions": None, "tools": None, "metadata": None}, [user("hi")]),
        # instructions are merged with the system messages after them; others stay separate
        (
            {
                "instructions": "i",
                "input": [
                    system("s"),
                    {"role": "developer", "content": "d"},
                    user("u"),
                    system("t"),
                ],
            },
            [system("i\n\ns\n\nd"), user("u"), system("t")],
        ),
        # history
        ({"input": [user("a"), assistant(""), user("c")]}, [user("a"), user("c")]),
        (
            {"input": [user("a"), reasoning_item("t", "", "u"), assistant("b")]},
            [user("a"), {**assistant("b"), "reasoning_content": "t\nu"}],
        ),
        (
            {
                "input": [
                    reasoning_item("t"),
                    assistant("b"),
                    call_item("c1", "{oops"),
                    call_item("c2", "[2]", "g"),
                    output_item("c2", "two"),
                    output_item("elsewhere", [{"type": "input_text", "text": "three"}]),
                    call_item("c3", "{}"),
                ]
            },
            [
                {
                    **assistant("b", ("c1", "f", "{oops"), ("c2", "g", "[2]")),
                    "reasoning_content": "t",
                },
                {"role": "tool", "tool_call_id": "c2", "content": "two", "name": "g"},
                {"role": "tool", "tool_call_id": "elsewhere", "content": "three"},
                assistant("", ("c3", "f", {})),
            ],
        ),
    ],
)
def test_each_form_of_input_is_rendered(params, messages):
    assert render_messages(**params) == messages


RESPONSES_TOOL = {
    "type": "function",
    "name": "f",
    "description": "Does f.",
    "parameters": {"type": "object"},
    "strict": True,
}

CHAT_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}},
}


def test_tools_become_chat_tools():
    bare = dict.fromkeys(("description", "parameters", "strict")) | {
        "type": "function",
        "name": "g",
    }
    assert render(input="hi", tools=[RESPONSES_TOOL, CHAT_TOOL, bare])[1] == [
        CHAT_TOOL,
        CHAT_TOOL,
        {"type": "function", "function": {"name": "g"}},
    ]
    assert render(input="hi")[1] == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"input": [{"role": "system", "content": [{"type": "input_image"}, PARTS[0]]}]},
            "input_image is not supported",
        ),
        ({"input": [], "metadata": {"audio_path": "a"}}, r"metadata\.audio_path is not supported"),
        ({"input": "hi", "tools": [RESPONSES_TOOL, {"type": "web_search"}]}, "web_search"),
    ],
)
def test_valid_rows_that_the_kit_cannot_use_are_unsupported(params, message):
    with pytest.raises(env.UnsupportedRowError, match=r"^x\.jsonl:1: .*" + message):
        render_messages(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"input": 3}, "input must be text or a list"),
        ({"input": [{"role": "function", "content": "hi"}]}, "the role 'function'"),
        (
            {"input": [{"role": "user", "content": [{"text": "hi"}]}]},
            "must be an object with a type",
        ),
        ({"input": [call_item("c", {"x": 1})]}, "`arguments` of a function_call"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "`name` of a function"),
        ({"input": [{"role": "assistant", "tool_calls": ["f"]}]}, "tool_calls must be a list"),
        (
            {"input": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]},
            "`function` of a tool call",
        ),
        ({"input": [{"role": "tool", "tool_call_id": 3, "content": "x"}]}, "`tool_call_id` of a"),
    ],
)
def test_malformed_rows_are_errors_and_not_unsupported(params, message):
    with pytest.raises(env.DataError, match=r"^x\.jsonl:1: .*" + message) as raised:
        render_messages(**params)
    assert not isinstance(raised.value, env.UnsupportedRowError)


def test_arguments_nested_too_deep_for_json_stay_text():
    deep = '{"x": ' + "[" * 5000
    (message,) = render_messages(input=[call_item("c", deep)])
    assert message["tool_calls"][0]["function"]["arguments"] == deep


# {server: why its example rows are unsupported}
UNSUPPORTED = {"asr_with_pc": "audio_data is not supported"}


CONVERT = """
import json, sys
from nemo_gym.openai_utils import NeMoGymResponseCreateParamsNonStreaming as Params
from nemo_gym.responses_converter import ResponsesConverter
converter = ResponsesConverter(return_token_id_information=False)
for line in sys.stdin:
    params = {key: value for key, value in json.loads(line).items() if key in ("input", "tools")}
    chat = converter.responses_to_chat_completion_create_params(Params.model_validate(params))
    print(json.dumps(chat.model_dump(mode="json", exclude_unset=True)))
"""


def test_rendering_agrees_with_gyms_converter():
    """The example rows of all servers. `simplify` removes the known differences.

    They are the role developer, null content, JSON arguments, reasoning, and the names of tool
    outputs.
    """
    files = [file for file in gym_examples() if not any(name in str(file) for name in NO_ROWS)]
    assert len({file.parts[-3] for file in files}) == 144
    rows = []
    for file in files:
        server = file.parts[-3]
        if server in UNSUPPORTED:
            with pytest.raises(env.UnsupportedRowError, match=UNSUPPORTED[server]):
                env.render_row(next(iter(read_rows(file)))[1], "x:1")
        else:
            rows += list(read_rows(file))
    for _, example in rows:
        # the installed Gym drops instructions; an earlier test checks how they are merged
        example["responses_create_params"].pop("instructions", None)
        example["responses_create_params"].setdefault("input", [])
    params = [json.dumps(example["responses_create_params"]) + "\n" for _, example in rows]
    arguments = [str(GYM_PYTHON), "-c", CONVERT]
    done = subprocess.run(
        arguments, input="".join(params), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    chats = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(chats) == len(rows) > 300
    for (where, example), chat in zip(rows, chats, strict=True):
        messages, tools = env.render_row(example, where)
        assert list(map(simplify, messages)) == list(map(simplify, chat["messages"])), where
        gym_tools = chat.get("tools") or []
        for tool in gym_tools:
            tool["function"].pop("strict", None)  # Gym's vllm_model removes it as well
        assert tools == gym_tools, where


def simplify(message):
    """(role, text, tool calls, tool call id) of a chat message."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [get_part_text(part) for part in content]
    if message.get("reasoning_content"):  # Gym writes it into the text
        texts.insert(0, f"<think>{message['reasoning_content']}</think>")
    calls = []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        calls.append((call["id"], call["function"]["name"], arguments))
    role = message["role"].replace("developer", "system")
    return role, "".join(texts), calls, message.get("tool_call_id")


def get_part_text(part):
    """The text of a content part, or the URL of its image."""
    return part.get("text") or part.get("image") or part["image_url"]["url"]


@pytest.fixture(scope="module")
def tokenizer(workspace):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "tied")


def test_the_chat_template_makes_the_prompt_and_its_errors_name_the_row(tokenizer, monkeypatch):
    def encode(template, messages, tools=()):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return tokenizer.decode(env.encode_messages(messages, tools, tokenizer, "x:1"))

    plain = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}?"
    assert encode(plain + "{% endif %}", [user("hi")]) == "hi ?"
    shows = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    assert encode(shows, [user("hi")], [CHAT_TOOL]) == "f hi"
    with pytest.raises(env.DataError, match=r"^x:1: the chat template .*no system here"):
        encode("{{ raise_exception('no system here') }}", [system("hi")])
    with pytest.raises(env.DataError, match=r"^x:1: the chat template cannot render"):
        encode("{{ [].pop() }}", [user("hi")])


# --- chat messages -------------------------------------------------------------------------------


def chat_call(arguments, call_id="c1", name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "tool_calls": [chat_call({"x": [1, None]})]},
    {"role": "tool", "tool_call_id": "c1", "content": "o", "name": "f"},
    {"role": "assistant", "content": "b", "reasoning_content": "t"},
]


def parts(text):
    return [{"type": "text", "text": text[:1]}, {"type": "text", "text": text[1:]}]


def write_parts(message):
    return {**message, "content": parts(message["content"])}


def write_json(message):
    calls = [
        chat_call(json.dumps(call["function"]["arguments"], indent=1))
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls or None, "name": None}


def write_developer(message):
    return {**message, "role": message["role"].replace("system", "developer")}


def write_thinking(message):
    message = dict(message)
    thought = message.pop("reasoning_content", None)
    return message | ({"thinking": thought, "reasoning": None} if thought else {})


def pad(message):
    """Add the keys that Arrow adds to each message of a table."""
    keys = ("content", "name", "tool_calls", "tool_call_id", "reasoning_content", "type")
    return {**dict.fromkeys(keys), **message}


@pytest.mark.parametrize(
    "write", [dict, write_parts, write_json, write_developer, write_thinking, pad]
)
def test_all_forms_of_a_chat_are_one(write):
    assert env.render_items([write(message) for message in CHAT], "x:1") == CHAT


def test_ids_that_a_chat_leaves_out_are_given_in_order():
    """Chats of TRL have neither ids of calls nor those of their outputs."""
    call_a = {"type": "function", "function": {"name": "f", "arguments": {}}}
    call_b = {"type": "function", "function": {"name": "g", "arguments": None}}
    chat = [
        user("u"),
        {"role": "assistant", "tool_calls": [call_a, call_b]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    _, answer, first, second = env.render_items(chat, "x:1")
    ids = [call["id"] for call in answer["tool_calls"]]
    assert len(set(ids)) == 2 and all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert [first["tool_call_id"], second["tool_call_id"]] == ids
    assert [first["name"], second["name"]] == ["f", "g"]


@pytest.mark.parametrize(
    ("schema", "rendered"),
    [
        (
            {"properties": {"city": {"type": "string", "enum": None}, "sign": None}},
            {"properties": {"city": {"type": "string"}}},
        ),
        ({"enum": ["a", None]}, {"enum": ["a", None]}),
        (
            {"anyOf": [{"type": "string", "items": None}, {"type": "null"}], "default": None},
            {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        ),
    ],
)
def test_null_keys_of_a_tools_schema_do_not_reach_the_model(schema, rendered):
    tool = {"type": "function", "name": "f", "description": None, "parameters": schema}
    (result,) = env.render_tools([tool], "x:1")
    assert result["function"] == {"name": "f", "parameters": rendered}
