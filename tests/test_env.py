"""Rows in, prompts out: shapes, refusals with file and line, files, routing, order, generators, the command."""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from conftest import GYM_PYTHON, ROOT, row, run, write_rows
from pyarrow import parquet

import env
from kit.extras import convert


@pytest.fixture(scope="module")
def shipped():
    """[(server, file)] of the example rows in the installed nemo-gym."""
    assert GYM_PYTHON.is_file(), f"{GYM_PYTHON}: no NeMo Gym; `make gym` installs it"
    done = run(
        [str(GYM_PYTHON), "-c", "import nemo_gym; print(nemo_gym.__file__)"], cwd=ROOT, timeout=60
    )
    assert done.returncode == 0, done.stderr
    files = sorted(
        (Path(done.stdout.strip()).parent.parent / "resources_servers").glob(
            "*/data/*example*.jsonl"
        )
    )
    no_rows = (
        "rollouts",
        "bixbench_example",
        "example_questions",
    )  # results; questions without a prompt
    return [
        (file.parts[-3], file) for file in files if not any(name in file.name for name in no_rows)
    ]


def rendered(**params):
    return env.render({"responses_create_params": params}, "x.jsonl:1")


def messages_of(**params):
    return rendered(**params)[0]


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def said(text, *calls):
    """An assistant message; calls: (id, name, arguments)."""
    functions = [
        {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls
    ]
    return {"role": "assistant", "content": text} | ({"tool_calls": functions} if calls else {})


def called(call_id, arguments, name="f"):
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "id": None,
    }


def returned(call_id, output):
    return {"type": "function_call_output", "call_id": call_id, "output": output, "status": None}


def thought(*texts):
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
        ({"input": "hi"}, [user("hi")]),
        ({"input": [user("hi")]}, [user("hi")]),
        ({"input": [{"type": "message", **user("hi")}]}, [user("hi")]),
        ({"input": [{"type": None, **user("hi")}]}, [user("hi")]),
        ({"input": [{"role": "developer", "content": "x"}, user("hi")]}, [system("x"), user("hi")]),
        ({"input": [{"role": "user", "content": PARTS}]}, [user("abc")]),
        ({"input": [{"role": "user", "content": None}]}, [user("")]),
        ({"input": [user("a"), user("b")]}, [user("a"), user("b")]),
        # the environment writes the prompt
        ({"input": []}, []),
        ({"input": ""}, []),
        ({"input": None}, []),
        ({}, []),
        ({"instructions": "i"}, [system("i")]),
        # keys spelled out with null
        ({"input": "hi", "instructions": None, "tools": None, "metadata": None}, [user("hi")]),
        # instructions and the system messages that follow become one; without instructions they stay as they are
        ({"input": "hi", "instructions": "i"}, [system("i"), user("hi")]),
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
        ({"input": [system("s"), system("t"), user("u")]}, [system("s"), system("t"), user("u")]),
        # history
        ({"input": [user("a"), said("b"), user("c")]}, [user("a"), said("b"), user("c")]),
        ({"input": [user("a"), said(""), user("c")]}, [user("a"), user("c")]),
        (
            {"input": [user("a"), thought("t", "", "u"), said("b")]},
            [user("a"), said("<think>t</think><think>u</think>b")],
        ),
        ({"input": [user("a"), {"type": "reasoning", "summary": []}]}, [user("a")]),
        (
            {"input": [user("a"), called("c1", '{"x": 1}'), returned("c1", "one")]},
            [
                user("a"),
                said("", ("c1", "f", {"x": 1})),
                {"role": "tool", "tool_call_id": "c1", "content": "one", "name": "f"},
            ],
        ),
        (
            {
                "input": [
                    thought("t"),
                    said("b"),
                    called("c1", "{oops"),
                    called("c2", "[2]", "g"),
                    returned("c2", "two"),
                    returned("elsewhere", [{"type": "input_text", "text": "three"}]),
                    called("c3", "{}"),
                ]
            },
            [
                said("<think>t</think>b", ("c1", "f", "{oops"), ("c2", "g", "[2]")),
                {"role": "tool", "tool_call_id": "c2", "content": "two", "name": "g"},
                {"role": "tool", "tool_call_id": "elsewhere", "content": "three"},
                said("", ("c3", "f", {})),
            ],
        ),
    ],
)
def test_input_shapes(params, messages):
    assert messages_of(**params) == messages


FLAT = {
    "type": "function",
    "name": "f",
    "description": "Does f.",
    "parameters": {"type": "object"},
    "strict": True,
}
CHAT = {
    "type": "function",
    "function": {"name": "f", "description": "Does f.", "parameters": {"type": "object"}},
}


def test_tools_become_chat_tools():
    assert rendered(input="hi", tools=[FLAT])[1] == [CHAT]
    assert rendered(input="hi", tools=[CHAT])[1] == [CHAT]
    bare = {
        "type": "function",
        "name": "g",
        "description": None,
        "parameters": None,
        "strict": None,
    }
    assert rendered(input="hi", tools=[FLAT, bare])[1] == [
        CHAT,
        {"type": "function", "function": {"name": "g"}},
    ]
    assert rendered(input="hi")[1] == []


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (
            {"input": [{"role": "system", "content": [{"type": "input_image"}, PARTS[0]]}]},
            "input_image: the kit trains",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "input_audio: the kit trains text",
        ),
        (
            {"input": "hi", "metadata": {"audio_path": "a.wav"}},
            r"metadata\.audio_path: the kit trains text",
        ),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "web_search_call"),
        ({"input": "hi", "tools": [FLAT, {"type": "web_search"}]}, "web_search"),
    ],
)
def test_what_the_kit_cannot_ask_is_refused(params, named):
    with pytest.raises(env.Refused, match=r"^x\.jsonl:1: .*" + named):
        messages_of(**params)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"input": 3}, "input must be text or a list"),
        ({"input": "hi", "instructions": ["i"]}, "instructions text"),
        ({"input": ["hi"]}, "an input item must be a JSON object, this is a str"),
        ({"input": [{"content": "hi"}]}, "role None"),
        ({"input": [{"role": "tool", "content": "hi"}]}, "role 'tool'"),
        ({"input": [{"role": "user", "content": 3}]}, "content must be text"),
        ({"input": [{"role": "user", "content": ["hi"]}]}, "content must be text"),
        ({"input": [{"role": "user", "content": [{"text": "hi"}]}]}, "content must be text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "`image_url` of a input_image must be text",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "`text` of a text must be text: 3",
        ),
        (
            {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
            "`call_id` of a function_call",
        ),
        ({"input": [called("c", {"x": 1})]}, "`arguments` of a function_call"),
        (
            {"input": [{"type": "function_call_output", "output": "x"}]},
            "`call_id` of a function_call_output",
        ),
        ({"input": "hi", "tools": {"name": "f"}}, "tools must be a list"),
        ({"input": "hi", "tools": ["f"]}, "tools must be a list"),
        ({"input": "hi", "tools": [{"type": "function"}]}, "`name` of a function"),
    ],
)
def test_malformed_rows_are_errors_not_refusals(params, named):
    with pytest.raises(env.DataError, match=r"^x\.jsonl:1: .*" + named) as raised:
        messages_of(**params)
    assert not isinstance(raised.value, env.Refused)


SOUND = "metadata.audio_url: the kit trains text models only; leave such rows out"
ROLES = ("system", "user", "assistant", "tool")
REFUSED = {"asr_with_pc": SOUND}


def test_the_example_rows_of_all_servers_load_or_are_refused(shipped):
    assert len({server for server, _ in shipped}) == 95
    refused, empty, tools, seeing = {}, set(), set(), set()
    for server, file in shipped:
        for where, example in env.read_rows(file):
            try:
                messages, offered = env.render(example, where)
            except env.Refused as error:
                refused.setdefault(server, set()).add(str(error).removeprefix(f"{where}: "))
                continue
            lists = {server for m in messages if isinstance(m["content"], list)}
            seeing |= lists
            assert all(m["role"] in ROLES for m in messages) and lists <= {
                "circle_click",
                "circle_count",
                "vlm_eval_kit",
            }
            assert all(
                set(t) == {"type", "function"} and "strict" not in t["function"] for t in offered
            ), where
            empty |= set() if messages else {server}
            tools |= {server} if offered else set()
    assert {name: {reason} for name, reason in REFUSED.items()} == refused
    assert empty == {"aviary", "gdpval", "scicode"}
    assert len(tools) >= 15 and "workplace_assistant" in tools and len(seeing) == 3


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


def test_rendering_agrees_with_gyms_own_converter(shipped):
    """Apart from what chat templates want: developer, content null, arguments as JSON, the name of a tool's answer."""
    rows = []
    for server, file in shipped:
        if server not in REFUSED:
            rows += list(env.read_rows(file))
    for _, example in rows:  # the installed Gym drops instructions; the merge is tested above
        example["responses_create_params"].pop("instructions", None)
        example["responses_create_params"].setdefault("input", [])
    params = [json.dumps(example["responses_create_params"]) + "\n" for _, example in rows]
    arguments = [str(GYM_PYTHON), "-c", CONVERT]
    done = subprocess.run(
        arguments, input="".join(params), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(theirs) == len(rows) > 300

    def plain(message):
        content, calls = message.get("content") or "", message.get("tool_calls") or []
        parts = [content] if isinstance(content, str) else [said(part) for part in content]
        called = [
            (c["id"], c["function"]["name"], decoded(c["function"]["arguments"])) for c in calls
        ]
        return (
            message["role"].replace("developer", "system"),
            "".join(parts),
            called,
            message.get("tool_call_id"),
        )

    def said(part):
        return part.get("text") or part.get("image") or part["image_url"]["url"]

    def decoded(arguments):
        return json.loads(arguments) if isinstance(arguments, str) else arguments

    for (where, example), chat in zip(rows, theirs, strict=True):
        messages, tools = env.render(example, where)
        assert [plain(m) for m in messages] == [plain(m) for m in chat["messages"]], where
        assert tools == (chat.get("tools") or []), where


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"responses_create_params": {}}\n{oops\n', r"rows\.jsonl:2: not JSON"),
        ('{"responses_create_params": {}, "x": NaN}\n', r"rows\.jsonl:1: not JSON \(Out of range"),
        (
            '{"responses_create_params": {}, "x": 1e999}\n',
            r"rows\.jsonl:1: not JSON \(Out of range",
        ),
        (
            '{"responses_create_params": {}, "x": "\\ud800"}\n',
            r"rows\.jsonl:1: not JSON .*surrogates not allowed",
        ),
        ("[" * 5000 + "\n", r"rows\.jsonl:1: not JSON \(maximum recursion depth"),
        (
            '\n{"x": ' + "[" * 5000 + "]" * 5000 + "}\n",
            r"rows\.jsonl:2: not JSON \(maximum recursion depth",
        ),
        (
            '{"responses_create_params": ' + '{"x": ' * 64 + "1" + "}" * 65,
            r"rows\.jsonl:1: nested over 64 deep",
        ),
        ("[1]\n", r"rows\.jsonl:1: a row must be a JSON object"),
        ('\n\n{"question": "x"}\n', r"rows\.jsonl:3: no responses_create_params"),
    ],
)
def test_malformed_lines_name_file_and_line(tmp_path, text, named):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(env.DataError, match=named):
        list(env.read_rows(tmp_path / "rows.jsonl"))


def test_arguments_nested_too_deep_for_json_stay_text():
    deep = '{"x": ' + "[" * 5000
    assert (
        messages_of(input=[called("c", deep)])[0]["tool_calls"][0]["function"]["arguments"] == deep
    )


@pytest.mark.parametrize(
    ("name", "todo"),
    [
        ("gsm8k_train.jsonl", "run `python env.py gsm8k --out {}`"),
        ("arithmetic_validation.jsonl", "run `python env.py arithmetic --out {}`"),
        (
            "math_with_judge_examples.jsonl",
            "run `python env.py examples --server math_with_judge --out {}`",
        ),
        ("gsm8k_train.jsonl.gz", "give one that is there"),
        ("gsm8k.jsonl", "give one that is there"),
        ("my_task_train.jsonl", "give one that is there"),
        ("_examples.jsonl", "give one that is there"),
    ],
)
def test_a_missing_file_is_named_with_the_command_that_writes_it(tmp_path, name, todo):
    with pytest.raises(env.DataError) as raised:
        list(env.read_rows(tmp_path / name))
    assert str(raised.value) == f"{tmp_path}/{name}: no such file; {todo.format(tmp_path)}"


ROWS = [row("one", metadata={"n": 1}), row("zwei: ü", other=[1, {"x": None}]), row("three")]


def test_gzip_reads_as_plain_text_does(tmp_path):
    text = "".join(json.dumps(r) + "\n" for r in ROWS)
    text = text.replace("\n", "\n\n", 1)
    (tmp_path / "rows.jsonl").write_text(text)
    zipped = tmp_path / "rows.jsonl.gz"
    zipped.write_bytes(gzip.compress(text.encode()))
    assert list(env.read_rows(zipped)) == [
        (f"{zipped}:{n}", r) for n, r in zip((1, 3, 4), ROWS, strict=True)
    ]
    assert [r for _, r in env.read_rows(tmp_path / "rows.jsonl")] == ROWS

    zipped.write_bytes(zipped.read_bytes()[:40])
    with pytest.raises(env.DataError, match=r"rows\.jsonl\.gz: cannot be read"):
        list(env.read_rows(zipped))
    zipped.write_text("no gzip")
    with pytest.raises(env.DataError, match=r"rows\.jsonl\.gz: cannot be read"):
        list(env.read_rows(zipped))


def test_text_that_is_not_utf8_names_the_file(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"x": "\xff"}\n')
    with pytest.raises(env.DataError, match=r"rows\.jsonl: cannot be read"):
        list(env.read_rows(tmp_path / "rows.jsonl"))


def write_parquet(path, **columns):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_parquet_holds_rows_as_json(tmp_path):
    texts, numbers = [json.dumps(r) for r in ROWS], [1, 2, 3]
    only = write_parquet(tmp_path / "only.parquet", n=numbers, anything=texts)
    assert list(env.read_rows(only)) == [(f"{only}:{n}", r) for n, r in enumerate(ROWS, 1)]
    named = write_parquet(tmp_path / "named.parquet", source=["a", "b", "c"], row=texts)
    assert [r for _, r in env.read_rows(named)] == ROWS

    unclear = write_parquet(tmp_path / "unclear.parquet", source=["a", "b", "c"], text=texts)
    with pytest.raises(env.DataError, match=r"unclear\.parquet: .*'source', 'text'"):
        list(env.read_rows(unclear))
    with pytest.raises(env.DataError, match=r"none\.parquet: .*'n'"):
        list(env.read_rows(write_parquet(tmp_path / "none.parquet", n=numbers)))
    null = write_parquet(tmp_path / "null.parquet", row=[texts[0], None])
    with pytest.raises(
        env.DataError, match=r"null\.parquet:2: a row must be a JSON object, this is a NoneType"
    ):
        list(env.read_rows(null))
    only.write_bytes(only.read_bytes()[:100])
    with pytest.raises(env.DataError, match=r"only\.parquet: cannot be read"):
        list(env.read_rows(only))


def agent(name):
    return row(agent_ref={"type": "responses_api_agents", "name": name})


def test_the_server_of_a_row():
    both = ["mcqa", "reasoning_gym"]
    assert env.server_of(agent("mcqa"), both, "x:1") == "mcqa"
    assert env.server_of(agent("reasoning_gym_simple_agent"), both, "x:1") == "reasoning_gym"
    assert env.server_of(row(agent_ref={"name": "mcqa_v2"}), both, "x:1") == "mcqa"
    assert env.server_of(row(), ["mcqa"], "x:1") == "mcqa"
    assert env.server_of(row(agent_ref=None), ["mcqa"], "x:1") == "mcqa"
    with pytest.raises(env.DataError, match=r"x:1: agent_ref None matches none of gym\.servers"):
        env.server_of(row(), both, "x:1")
    with pytest.raises(env.DataError, match=r"'other' matches none of gym.servers \(mcqa\)"):
        env.server_of(agent("other"), ["mcqa"], "x:1")
    with pytest.raises(env.DataError, match="'mcqaplus_agent'"):
        env.server_of(agent("mcqaplus_agent"), ["mcqa"], "x:1")
    with pytest.raises(env.DataError, match="empty"):
        env.server_of(row(), [], "x:1")


def test_an_alias_goes_before_the_longest_server_name():
    servers = {
        "math": "math",
        "math_with_code": "math_with_code",
        "mcqa": "mcqa",
        "math_with_code_x": "mcqa",
    }
    assert env.server_of(agent("math_with_code_x"), servers, "x:1") == "mcqa"
    assert env.server_of(agent("math_with_code_y"), servers, "x:1") == "math_with_code"
    assert env.server_of(agent("math_with_judge_simple_agent"), servers, "x:1") == "math"
    assert (
        env.server_of(row(), {"math": "math", "some_agent": "math"}, "x:1") == "math"
    )  # one server, two names
    with pytest.raises(env.DataError, match=r"\(math, math_with_code, mcqa\)"):
        env.server_of(agent("other"), servers, "x:1")


@pytest.fixture(scope="module")
def tokenizer(workspace):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "tied")


@pytest.fixture
def with_template(tokenizer, monkeypatch):
    def change(template):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return tokenizer

    return change


def test_long_prompts_are_dropped_counted_and_listed(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [row("short"), row("x" * 40), row("also short")])
    tasks, dropped = env.load_tasks([str(path)], tokenizer, ["reasoning_gym"], max_prompt_length=20)
    assert [t.row_id for t in tasks] == [f"{path}:1", f"{path}:3"]
    assert dropped == [f"{path}:2 (41 tokens)"]  # 40 characters and the template's space
    assert tasks[0].row == row("short")  # verbatim
    assert tokenizer.decode(tasks[0].prompt_ids) == "short "
    assert (tasks[0].tools, tasks[0].file, tasks[0].weight) == ([], str(path), None)


def test_a_row_without_a_prompt_is_a_task_without_ids(tmp_path, tokenizer):
    path = write_rows(
        tmp_path / "rows.jsonl", [{"responses_create_params": {"input": [], "tools": [FLAT]}}]
    )
    ((task,), dropped) = env.load_tasks([path], tokenizer, ["blackjack"], max_prompt_length=20)
    assert (task.messages, task.prompt_ids, task.tools, dropped) == ([], [], [CHAT], [])


def test_the_template_decides_what_is_asked(with_template):
    plain = with_template(
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}?{% endif %}"
    )
    ids = env.encode([user("hi")], [], plain)
    assert all(type(i) is int for i in ids) and plain.decode(ids) == "hi ?"
    with pytest.raises(
        env.DataError, match=r"^x:1: .*does not show tools.*model\.custom_chat_template"
    ):
        env.encode([user("hi")], [CHAT], plain, "x:1")

    shows = with_template(
        "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    )
    assert shows.decode(env.encode([user("hi")], [CHAT], shows)) == "f hi"

    refuses = with_template("{{ raise_exception('no system here') }}")
    with pytest.raises(env.DataError, match=r"^x:1: the chat template .*no system here"):
        env.encode([system("hi")], [], refuses, "x:1")
    for broken in (
        "{{ 1 // 0 }}",
        "{{ messages[0]['nothing'].x }}",
        "{{ [].pop() }}",
        "{% for x in 3 %}{% endfor %}",
    ):
        with pytest.raises(
            env.DataError, match=r"^x:1: the chat template does not take these messages: "
        ):
            env.encode([user("hi")], [], with_template(broken), "x:1")
    adds = with_template("{{ 'text' + messages[0].tool_calls[0].function.arguments }}")
    with pytest.raises(
        env.DataError, match=r"^the chat template does not take these messages: .*concatenate"
    ):
        env.encode(messages_of(input=[called("c", "{}")]), [], adds)


def test_files_with_a_server_and_a_weight(tmp_path, tokenizer):
    a = write_rows(tmp_path / "a.jsonl", [agent("mcqa_simple_agent"), row()])
    b = write_rows(tmp_path / "b.jsonl", [agent("alias"), agent("mcqa")])
    servers = {"mcqa": "mcqa", "math": "math", "alias": "math"}
    files = [
        {"path": str(a), "weight": 3, "server": "math"},
        {"path": str(b), "weight": 0.5, "server": None},
    ]
    tasks, dropped = env.load_tasks(files, tokenizer, servers, 20)
    assert [(t.file, t.server, t.weight) for t in tasks] == [
        (str(a), "math", 3),
        (str(a), "math", 3),
        (str(b), "math", 0.5),
        (str(b), "mcqa", 0.5),
    ]
    assert dropped == [] and tasks[0].row["agent_ref"]["name"] == "mcqa_simple_agent"  # verbatim
    assert [
        t.server
        for t in env.load_tasks([{"path": str(b), "server": "alias"}], tokenizer, servers, 20)[0]
    ] == [
        "math",
        "math",
    ]


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"path": "a.jsonl", "wieght": 1}, "wieght"),
        ({"weight": 1}, "weight"),
        ({"path": "a.jsonl", "weight": 0}, "more than 0"),
        ({"path": "a.jsonl", "weight": float("nan")}, "more than 0"),
        ({"path": "a.jsonl", "weight": "1"}, "more than 0"),
        (
            {"path": "{tmp}/a.jsonl", "server": "mcqa_v2"},
            r"a\.jsonl:1: server 'mcqa_v2' matches none .*\(mcqa\)",
        ),
        ("{tmp}/other.jsonl", r"other\.jsonl:1: agent_ref 'other' matches none"),
        ("{tmp}/refused.jsonl", r"refused\.jsonl:1: input_file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, tokenizer, entry, named):
    write_rows(tmp_path / "a.jsonl", [row()])
    write_rows(tmp_path / "other.jsonl", [agent("other")])
    picture = [{"role": "user", "content": [{"type": "input_file"}]}]
    write_rows(tmp_path / "refused.jsonl", [{"responses_create_params": {"input": picture}}])
    entry = json.loads(json.dumps(entry).replace("{tmp}", str(tmp_path)))
    with pytest.raises(env.DataError, match=named):
        env.load_tasks([entry], tokenizer, ["mcqa"], 20)


def test_only_leaves_the_rows_of_other_servers_out(tmp_path, tokenizer):
    picture = agent("other") | {"responses_create_params": {"input": [{"type": "computer_call"}]}}
    a = write_rows(
        tmp_path / "a.jsonl",
        [agent("mcqa"), agent("math"), picture, agent("mcqa_simple_agent"), row()],
    )
    b = write_rows(tmp_path / "b.jsonl", [agent("mcqa")])
    c = write_rows(tmp_path / "c.jsonl", [agent("mcqa")])
    files = [str(a), str(b), {"path": str(c), "server": "mcqa_elsewhere"}]
    tasks, dropped = env.load_tasks(files, tokenizer, ["mcqa", "math"], 20, only=["mcqa"])
    assert [t.row_id for t in tasks] == [f"{a}:1", f"{a}:4", f"{b}:1"]
    assert dropped == [f"{a}: 3 rows of other servers", f"{c}: 1 rows of other servers"]


def some_tasks(**files):
    """Tasks of made-up files: name = (rows, weight)."""
    return [
        env.Task(f"{file}:{n}", {}, "mcqa", [], [], file=file, weight=weight)
        for file, (count, weight) in files.items()
        for n in range(1, count + 1)
    ]


def ids(tasks):
    return [task.row_id for task in tasks]


@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (3, 7), (1, 2)])
def test_batches_are_one_stream_that_shows_each_row_once_an_epoch(count, size):
    tasks = some_tasks(a=(count, None))
    batches = [ids(env.batch(tasks, size, step, seed=1)) for step in range(1, 21)]
    assert {len(b) for b in batches} == {size}
    stream = [row_id for b in batches for row_id in b]
    epochs = [stream[i : i + count] for i in range(0, len(stream) - count + 1, count)]
    assert len(epochs) >= 2 and all(sorted(epoch) == sorted(ids(tasks)) for epoch in epochs)
    alone = {
        step: ids(env.batch(list(tasks), size, step, seed=1)) for step in reversed(range(1, 21))
    }
    assert [alone[step] for step in range(1, 21)] == batches


def test_the_order_of_batches():
    tasks = some_tasks(a=(30, None))
    first, second, other = (
        ids(env.batch(tasks, 30, step, seed)) for step, seed in ((1, 1), (2, 1), (1, 2))
    )
    assert (
        first != second and first != other and first != ids(tasks)
    )  # seeded, and another order each epoch
    assert ids(env.batch(tasks, 3, 2, seed=1, shuffle=False)) == ["a:4", "a:5", "a:6"]
    assert ids(env.batch(some_tasks(a=(4, None)), 3, 2, seed=1, shuffle=False)) == [
        "a:4",
        "a:1",
        "a:2",
    ]
    with pytest.raises(env.DataError, match="no rows"):
        env.batch([], 3, 1, seed=1)


def test_weighted_batches_have_the_same_composition_and_read_every_file_through():
    tasks = some_tasks(a=(7, 0.5), b=(40, 0.3), c=(1, 0.2))
    batches = [env.batch(tasks, 8, step, seed=3) for step in range(1, 21)]
    for b in batches:
        assert [task.file for task in b] == ["a"] * 4 + ["b"] * 2 + ["c"] * 2
    for file, count in (("a", 7), ("b", 40), ("c", 1)):
        stream = [task.row_id for b in batches for task in b if task.file == file]
        epochs = [stream[i : i + count] for i in range(0, len(stream) - count + 1, count)]
        assert epochs and all(len(set(epoch)) == count for epoch in epochs)
    a = [task.row_id for b in batches for task in b if task.file == "a"]
    assert a[:7] != a[7:14]
    alone = {step: env.batch(tasks, 8, step, seed=3) for step in reversed(range(1, 21))}
    assert [alone[step] for step in range(1, 21)] == batches
    assert [env.batch(tasks, 8, step, seed=4) for step in range(1, 21)] != batches


def test_files_of_one_size_have_orders_of_their_own():
    picked = ids(env.batch(some_tasks(a=(20, 1), b=(20, 1)), 40, 1, seed=1))
    assert [i.split(":")[1] for i in picked[:20]] != [i.split(":")[1] for i in picked[20:]]


@pytest.mark.parametrize(
    ("weights", "size", "counts"),
    [
        ((1, 1), 8, [4, 4]),
        ((1, 1), 5, [3, 2]),  # a tie: the first
        ((0.7, 0.2, 0.1), 16, [11, 3, 2]),
        ((0.1, 0.2, 0.7), 10, [1, 2, 7]),
        ((1000, 999, 1), 2000, [1000, 999, 1]),
    ],
)
def test_quotas_are_by_largest_remainder(weights, size, counts):
    tasks = some_tasks(**{name: (2, weight) for name, weight in zip("abc", weights, strict=False)})
    assert list(env.quotas(tasks, size).values()) == counts
    assert list(Counter(task.file for task in env.batch(tasks, size, 5, seed=0)).values()) == counts


def test_weights_that_cannot_be_kept():
    with pytest.raises(
        env.DataError, match=r"^b: weight=0.05 comes to no row in a batch of 8; raise it$"
    ):
        env.batch(some_tasks(a=(9, 0.95), b=(9, 0.05)), 8, 1, seed=0)
    for files in ({"a": (9, 1.0), "b": (9, None)}, {"b": (9, None), "a": (9, 1.0)}):
        with pytest.raises(env.DataError, match=r"^b: .*beside files with a weight"):
            env.batch(some_tasks(**files), 8, 1, seed=0)


def arguments(**changes):
    return argparse.Namespace(
        **{"seed": 0, "low": 2, "high": 29, "validation": 128, "source": None} | changes
    )


def test_arithmetic_holds_out_pairs_in_either_order():
    splits = {name: list(rows) for name, rows in env.arithmetic(arguments()).items()}

    def pairs(rows):
        found = [
            r["question"].removeprefix("Complete the equation: ").removesuffix(" =").split(" + ")
            for r in rows
        ]
        assert [r["answer"] for r in rows] == [f"{a} + {b} = {int(a) + int(b)}" for a, b in found]
        return {tuple(sorted(map(int, pair))) for pair in found}

    train, held_out = pairs(splits["train"]), pairs(splits["validation"])
    assert len(held_out) == 128 and not train & held_out and len(train | held_out) == 28 * 29 // 2
    again = {name: list(rows) for name, rows in env.arithmetic(arguments()).items()}
    assert again == splits
    assert list(env.arithmetic(arguments(seed=1))["validation"]) != splits["validation"]
    with pytest.raises(env.DataError, match="held out"):
        env.arithmetic(arguments(high=5))


def test_gsm8k_rows(tmp_path):
    entry = {"question": "How many?", "answer": "He has <<3*400=1200>>1,200.\n#### 1,200"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(entry) + "\n")
    rows = list(env.gsm8k(arguments(source=str(tmp_path)))["train"])
    assert rows[0]["expected_answer"] == "1200" and rows[0]["question"] == "How many?"
    assert rows[0]["agent_ref"]["name"] == "math_with_judge_simple_agent"
    with pytest.raises(env.DataError, match=r"test\.jsonl: no such file"):
        (tmp_path / "test.jsonl").unlink()
        list(env.gsm8k(arguments(source=str(tmp_path)))["validation"])


def command(*arguments):
    return run([sys.executable, str(ROOT / "env.py"), *map(str, arguments)], cwd=ROOT, timeout=60)


def test_check_counts_and_names(tmp_path):
    def picture(kind):
        return {
            "responses_create_params": {"input": [{"role": "user", "content": [{"type": kind}]}]}
        }

    good = write_rows(
        tmp_path / "good.jsonl", [row(), picture("input_audio"), row(), picture("input_audio")]
    )
    done = command("check", good)
    why = "the kit trains text models only; leave such rows out"
    text = f"{good}: 2 rows load, 2 refused\n    2 x input_audio: {why} (first {good}:2)\n"
    assert (done.returncode, done.stdout) == (0, text), done.stderr

    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        '{oops\n{"question": "x"}\n'
        + json.dumps(picture("input_file"))
        + "\n"
        + json.dumps(row())
        + "\n"
    )
    done = command("check", bad, tmp_path / "nowhere.jsonl", good)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0] == f"{bad}: 1 rows load, 1 refused"
    assert lines[1] == f"    1 x input_file: {why} (first {bad}:3)"
    assert lines[2].startswith(f"    error: {bad}:1: not JSON")
    assert lines[3].startswith(
        f"    error: {bad}:2: neither Gym's responses_create_params nor verl's `prompt`"
    )
    assert lines[5].startswith(f"    error: {tmp_path}/nowhere.jsonl: no such file")
    assert "\n".join(lines[6:]) + "\n" == text
    assert command("check").returncode == 2


def test_check_goes_on_after_what_no_one_expected(tmp_path, monkeypatch, capsys):
    file = write_rows(tmp_path / "rows.jsonl", [row("a"), row("b")])
    render = env.render

    def broken(given, where):
        return {}["gap"] if where.endswith(":1") else render(given, where)

    monkeypatch.setattr(env, "render", broken)
    assert not convert.check(str(file))
    assert (
        capsys.readouterr().out
        == f"{file}: 1 rows load, 0 refused\n    error: {file}:1: KeyError('gap')\n"
    )


def test_generators_by_command(tmp_path):
    done = command("arithmetic", "--out", tmp_path, "--high", 5, "--validation", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == f"{tmp_path}/arithmetic_validation.jsonl: 3 rows"
    assert command("check", *sorted(tmp_path.glob("*.jsonl"))).returncode == 0
    failed = command("arithmetic", "--out", tmp_path, "--high", 5)
    assert failed.returncode == 1 and failed.stderr.startswith(
        "error: 10 pairs, 128 held out; lower --validation"
    )
    assert command("arithmetic", "--server", "mcqa").returncode == 2


def test_gsm8k_without_a_hub_is_one_line_at_once(tmp_path, monkeypatch):
    for name, value in {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }.items():
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    failed = command("gsm8k", "--out", tmp_path / "out")
    assert failed.returncode == 1 and not (tmp_path / "out").exists()
    assert re.fullmatch(
        r"error: openai/gsm8k: .+; give --source, a folder with its JSONL files\n", failed.stderr
    )
    assert time.monotonic() - begin < 20


def test_a_generator_of_ones_own_is_one_line_more(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import env\n"
        "def ones(args):\n"
        "    return {'train': [env._row('mcqa', str(args.seed))]}\n"
        "env.GENERATORS['ones'] = ones\n"
        "env.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("ones", "counter"):
        done = subprocess.run(
            [sys.executable, own, name, "--out", tmp_path], env=environment, capture_output=True
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "counter_train.jsonl").is_file()
    assert [r["agent_ref"]["name"] for _, r in env.read_rows(tmp_path / "ones_train.jsonl")] == [
        "mcqa_simple_agent"
    ]


def test_what_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    failed = command("counter", "--out", tmp_path / "file")
    assert failed.returncode == 1 and re.fullmatch(r"error: \[Errno \d+\] .*\n", failed.stderr)


def test_examples_of_a_server(tmp_path):
    done = command("examples", "--server", "mcqa", "--out", tmp_path, "--python", GYM_PYTHON)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/mcqa_examples.jsonl: 10 rows\n"), (
        done.stderr
    )
    written = [r for _, r in env.read_rows(tmp_path / "mcqa_examples.jsonl")]
    shipped = GYM_PYTHON.parent.parent.glob(
        "lib/*/site-packages/resources_servers/mcqa/data/*example*.jsonl"
    )
    rows = [
        r for path in sorted(shipped) if "rollouts" not in path.name for _, r in env.read_rows(path)
    ]
    reference = {"type": "responses_api_agents", "name": "mcqa_simple_agent"}
    assert written == [{"agent_ref": reference} | r for r in rows]
    assert all(env.server_of(r, ["mcqa", "math"], "x:1") == "mcqa" for r in written)

    own = list(convert.examples("blackjack", str(GYM_PYTHON)))
    assert own[0]["agent_ref"]["name"] == "blackjack_gymnasium_agent"
    assert len(own) == 5 and own[0] == own[1]  # as they ship: a game asks the same each time
    twice = list(
        convert.examples("structured_outputs", str(GYM_PYTHON))
    )  # its v4 rows ship in two files
    assert len(twice) == 10

    failed = command("examples", "--server", "mcqb", "--out", tmp_path, "--python", GYM_PYTHON)
    assert (
        failed.returncode == 1
        and "mcqb/data: no example*.jsonl" in failed.stderr
        and " mcqa," in failed.stderr
    )


def test_examples_without_gym_or_server(tmp_path):
    failed = command(
        "examples", "--server", "mcqa", "--out", tmp_path, "--python", tmp_path / "python"
    )
    assert (
        failed.returncode == 1 and f"--python {tmp_path}/python is no interpreter" in failed.stderr
    )
    assert command("examples", "--out", tmp_path).returncode == 2


def test_the_counters_rows(tmp_path):
    assert command("counter", "--out", tmp_path).returncode == 0
    rows = {
        split: [r for _, r in env.read_rows(tmp_path / f"counter_{split}.jsonl")]
        for split in ("train", "validation")
    }
    asked = {split: {r["expected_count"] for r in some} for split, some in rows.items()}
    assert asked["train"] | asked["validation"] == set(range(1, 100)) - {7}  # which is shown
    assert not asked["train"] & asked["validation"]
    for r in rows["train"] + rows["validation"]:
        messages, tools = env.render(r, "x:1")
        roles = [m["role"] for m in messages]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert messages[1]["tool_calls"][0]["function"] == {
            "name": "increment_counter",
            "arguments": {"count": 7},
        }
        assert (
            messages[-1]["content"] == f"Add {r['expected_count']} to the counter."
            and r["initial_count"] == 0
        )
        assert [tool["function"]["name"] for tool in tools] == ["increment_counter"]
        assert (
            env.server_of(r, ["example_session_state_mgmt", "mcqa"], "x:1")
            == "example_session_state_mgmt"
        )


# --- limits --------------------------------------------------------------------------------------

PEAK = """
import resource, sys
import pyarrow.compute
from pyarrow import parquet
import env
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for where, row in env.raw_rows(sys.argv[1], "prompt"):
        pass
except env.DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def reading(path) -> tuple[str, int]:
    """(the error, MiB of memory) that it takes another process to read all rows of a file."""
    done = run([sys.executable, "-c", PEAK, str(path)], cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    *told, peak = done.stdout.splitlines()
    return "".join(told), int(peak)


def test_a_value_that_parquet_stores_once_is_not_held_once_a_row(tmp_path):
    """Files of a few KB with 512 rows of 4 MiB: 2 GiB together, and 1 GiB in a batch of 256."""
    texts = pyarrow.DictionaryArray.from_arrays(np.zeros(512, np.int32), ["x" * 2**22])
    roles = pyarrow.array(["user"] * 512)
    chats = pyarrow.StructArray.from_arrays([roles, texts], ["role", "content"])
    lists = pyarrow.ListArray.from_arrays(pyarrow.array(range(513), pyarrow.int32()), chats)
    for name, table in (
        ("text", {"row": texts}),
        ("chats", {"prompt": lists, "n": pyarrow.array(range(512))}),
    ):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pyarrow.table(table), path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 8192
        told, peak = reading(path)
        assert told == "" and peak < 400


def test_a_row_that_parquet_stores_in_little_and_that_becomes_much_is_refused(tmp_path):
    count = 2**22
    ends = pyarrow.array([0, count], pyarrow.int32())
    repeated = pyarrow.DictionaryArray.from_arrays(np.zeros(count, np.int32), ["so"])
    texts = pyarrow.ListArray.from_arrays(ends, repeated)
    numbers = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, 2**26], pyarrow.int32()), np.zeros(2**26, np.int8)
    )
    tables = {"texts": ("a row of 256.0 MiB, over 64 MiB", texts)}
    tables["numbers"] = (
        "prompt.list.element: 67108864 values of 8 bytes in 1 rows: leave such rows out",
        numbers,
    )
    for name, (why, column) in tables.items():
        path = tmp_path / f"{name}.parquet"
        table = pyarrow.table({"prompt": column})
        parquet.write_table(table, path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 2048
        told, peak = reading(path)
        assert f"{name}.parquet: cannot be read ({why}" in told and peak < 200


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_rows_of_parquet_come_as_they_were_written(tmp_path, kind):
    """In several row groups, whose dictionaries end in the middle (after 1,000 bytes)."""
    kinds = {"string": pyarrow.string(), "large_string": pyarrow.large_string()}
    kinds["dictionary"] = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    rows = [
        {"prompt": f"say {i % 7}", "extra": {"n": i, "of": [str(i), None]}, "x": 0.5 * i}
        for i in range(600)
    ]
    rows[5] |= {"prompt": None, "extra": None, "x": None}
    of = pyarrow.struct({"n": pyarrow.int64(), "of": pyarrow.list_(kinds[kind])})
    schema = pyarrow.schema({"prompt": kinds[kind], "extra": of, "x": pyarrow.float64()})
    small = {
        "row_group_size": 250,
        "data_page_size": 500,
        "dictionary_pagesize_limit": 1000,
        "write_batch_size": 10,
    }
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), tmp_path / "r.parquet", **small)
    assert [r for _, r in env.raw_rows(tmp_path / "r.parquet", "prompt")] == rows
    lines = pyarrow.table({"row": pyarrow.array([json.dumps(r) for r in rows], kinds[kind])})
    parquet.write_table(lines, tmp_path / "lines.parquet")
    assert [json.loads(r) for _, r in env.raw_rows(tmp_path / "lines.parquet")] == rows


def test_a_batch_of_parquet_is_cut_to_what_memory_may_hold(monkeypatch):
    batch = pyarrow.RecordBatch.from_pylist(
        [{"t": "x" * 36}] * 5
    )  # 100 bytes each as objects, with Arrow's offsets
    sizes = [env._size_of(batch.slice(0, n).column(0)) for n in (1, 2, 4)]
    monkeypatch.setattr(env, "MOST", sizes[1])
    assert [part.num_rows for part in env._parts(batch)] == [2, 1, 2]
    monkeypatch.setattr(env, "MOST", sizes[0] - 1)
    with pytest.raises(ValueError, match=r"a row of 0\.0 MiB, over 0 MiB: leave such rows out"):
        list(env._parts(batch))


class Letters:
    """A tokenizer of one token for each letter of what the user says."""

    def apply_chat_template(self, messages, **_):
        return {"input_ids": [ord(letter) for letter in messages[-1]["content"]]}


def test_a_prompt_of_just_the_limit_is_taken_and_one_more_token_is_not(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [row("x" * 20), row("x" * 21)])
    tasks, dropped = env.load_tasks([str(path)], Letters(), ["s"], 20)
    assert [len(task.prompt_ids) for task in tasks] == [20]
    assert dropped == [f"{path}:2 (21 tokens)"]


def test_rows_of_other_servers_are_counted_for_each_file(tmp_path):
    one = write_rows(
        tmp_path / "one.jsonl", [row("a"), row("b", agent_ref={"name": "b"}), row("c")]
    )
    two = write_rows(tmp_path / "two.jsonl", [row("d", agent_ref={"name": "b"})] * 2)
    files = [{"path": str(one), "weight": 2.0}, str(two)]
    tasks, dropped = env.load_tasks(files, Letters(), ["a", "b"], 20, only=["b"])
    assert [task.row_id for task in tasks] == [f"{one}:2", f"{two}:1", f"{two}:2"]
    assert [(task.file, task.weight) for task in tasks] == [
        (str(one), 2.0),
        (str(two), None),
        (str(two), None),
    ]
    assert dropped == [f"{one}: 2 rows of other servers"]
    tasks, dropped = env.load_tasks(files, Letters(), ["a", "b"], 20, only=["a"])
    assert tasks == [] and dropped == [
        f"{one}: 3 rows of other servers",
        f"{two}: 2 rows of other servers",
    ]


@pytest.mark.parametrize(
    "tool", [{"name": "f"}, {"type": None, "name": "f"}, {"function": {"name": "f"}}]
)
def test_a_tool_without_a_type_is_refused(tool):
    with pytest.raises(
        env.Refused, match=r"^x:1: tool of type None: the kit takes functions only$"
    ):
        env.render_tools([tool], "x:1")
