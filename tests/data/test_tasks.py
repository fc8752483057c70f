"""Tests how rows become tasks, which have a server, prompt ids, and the weight of their file."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

import env
from kit.data.processor import TextProcessor
from kit.data.tasks import LoadedTasks, TaskLoader
from kit.errors import ConfigError
from kit.rollout.chat_template import ChatTemplate
from kit.runs import summary
from tests.helpers.recipes import load, row, write_rows


def agent(name):
    return row(agent_ref={"type": "responses_api_agents", "name": name})


def find_server(gym_row, servers) -> str | None:
    """Find the server of a row. servers: names, or {alias: name}."""
    template: Any = None
    return TaskLoader(template, make_aliases(servers), 20).find_server(gym_row, "x:1", "")


def load_files(files, tokenizer, servers, only=None) -> LoadedTasks:
    """Load tasks of at most 20 prompt tokens."""
    template = ChatTemplate(TextProcessor(tokenizer), {1}, {})
    return TaskLoader(template, make_aliases(servers), 20, only).load_files(files)


def make_aliases(servers) -> dict[str, str]:
    return servers if isinstance(servers, dict) else {name: name for name in servers}


# --- servers --------------------------------------------------------------------------------------


def test_the_server_of_a_row():
    both = ["mcqa", "reasoning_gym"]
    assert find_server(agent("mcqa"), both) == "mcqa"
    assert find_server(agent("reasoning_gym_simple_agent"), both) == "reasoning_gym"
    assert find_server(row(agent_ref={"name": "mcqa_v2"}), both) == "mcqa"
    assert find_server(row(), ["mcqa"]) == "mcqa"
    assert find_server(row(agent_ref=None), ["mcqa"]) == "mcqa"
    with pytest.raises(env.DataError, match=r"x:1: agent_ref None matches none of gym\.servers"):
        find_server(row(), both)
    with pytest.raises(env.DataError, match=r"'other' matches none of gym.servers \(mcqa\).* See "):
        find_server(agent("other"), ["mcqa"])
    with pytest.raises(env.DataError, match="'mcqaplus_agent'"):
        find_server(agent("mcqaplus_agent"), ["mcqa"])
    with pytest.raises(env.DataError, match="empty"):
        find_server(row(), [])


def test_an_alias_has_priority_over_the_longest_server_name():
    servers = {
        "math": "math",
        "math_with_code": "math_with_code",
        "mcqa": "mcqa",
        "math_with_code_x": "mcqa",
    }
    assert find_server(agent("math_with_code_x"), servers) == "mcqa"
    assert find_server(agent("math_with_code_y"), servers) == "math_with_code"
    assert find_server(agent("math_with_judge_simple_agent"), servers) == "math"
    assert (
        find_server(row(), {"math": "math", "some_agent": "math"}) == "math"
    )  # one server, two names
    with pytest.raises(env.DataError, match=r"\(math, math_with_code, mcqa\)"):
        find_server(agent("other"), servers)


@pytest.mark.parametrize(
    ("fields", "server"),
    [
        ({"task_source": "mcqa"}, "mcqa"),
        ({"task_source": "math_resources_server"}, "math"),
        # the data's source decides, not the agent that once ran the row
        ({"task_source": "mcqa", "agent_ref": {"name": "math_simple_agent"}}, "mcqa"),
        ({"task_source": "unknown", "agent_ref": {"name": "math_simple_agent"}}, "math"),
        ({"task_source": None, "agent_ref": {"name": "math"}}, "math"),
        ({"_ng_task_id": {"taskset": "math:train", "task_id": "0"}}, "math"),
        ({"_ng_task_id": {"taskset": "mcqa", "task_id": "0"}}, "mcqa"),
    ],
    ids=str,
)
def test_a_row_of_gym_0_7_matches_its_server_by_task_source_and_taskset(fields, server):
    assert find_server(row(**fields), ["mcqa", "math"]) == server


def test_a_row_that_matches_no_server_shows_all_that_it_names():
    gym_row = row(task_source="one", agent_ref={"name": "two"}, _ng_task_id={"taskset": "three:4"})
    problem = "x:1: task_source 'one', agent_ref 'two', taskset 'three' matches none"
    with pytest.raises(env.DataError, match=problem):
        find_server(gym_row, ["mcqa", "math"])
    # with one server too: a row without any name is its row, a row with another name is not
    with pytest.raises(env.DataError, match=problem):
        find_server(gym_row, ["mcqa"])


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(workspace):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(workspace / "tied")


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_long_prompts_are_dropped_counted_and_listed(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", [row("short"), row("x" * 40), row("also short")])
    tasks, dropped = load_files([str(path)], tokenizer, ["reasoning_gym"])
    assert [t.row_id for t in tasks] == [f"{path}:1", f"{path}:3"]
    assert dropped == [f"{path}:2 (41 tokens)"]  # 40 characters and the template's space
    assert tasks[0].row == row("short")  # verbatim
    assert tokenizer.decode(tasks[0].prompt_ids) == "short "
    assert (tasks[0].tools, tasks[0].file, tasks[0].weight) == ([], str(path), None)


def test_a_row_without_a_prompt_is_a_task_without_ids(tmp_path, tokenizer):
    path = write_rows(
        tmp_path / "rows.jsonl", [{"responses_create_params": {"input": [], "tools": [TOOL]}}]
    )
    ((task,), dropped) = load_files([path], tokenizer, ["blackjack"])
    assert (task.messages, task.prompt_ids, task.tools, dropped) == ([], [], [CHAT_TOOL], [])


def test_files_with_a_server_and_a_weight(tmp_path, tokenizer):
    a = write_rows(tmp_path / "a.jsonl", [agent("mcqa_simple_agent"), row()])
    b = write_rows(tmp_path / "b.jsonl", [agent("alias"), agent("mcqa")])
    servers = {"mcqa": "mcqa", "math": "math", "alias": "math"}
    files = [
        {"path": str(a), "weight": 3, "server": "math"},
        {"path": str(b), "weight": 0.5, "server": None},
    ]
    tasks, dropped = load_files(files, tokenizer, servers)
    assert [(t.file, t.server, t.weight) for t in tasks] == [
        (str(a), "math", 3),
        (str(a), "math", 3),
        (str(b), "math", 0.5),
        (str(b), "mcqa", 0.5),
    ]
    assert dropped == [] and tasks[0].row["agent_ref"]["name"] == "mcqa_simple_agent"  # verbatim
    tasks, _ = load_files([{"path": str(b), "server": "alias"}], tokenizer, servers)
    assert [t.server for t in tasks] == ["math", "math"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "a.jsonl", "wieght": 1}, "wieght"),
        ({"weight": 1}, "weight"),
        ({"path": "a.jsonl", "weight": 0}, "a weight must be a number over 0"),
        ({"path": "a.jsonl", "weight": float("nan")}, "a weight must be a number over 0"),
        ({"path": "a.jsonl", "weight": "1"}, "a weight must be a number over 0"),
        ({"path": "a.jsonl", "weight": True}, "a weight must be a number over 0"),
        (
            {"path": "{tmp}/a.jsonl", "server": "mcqa_v2"},
            r"a\.jsonl:1: server 'mcqa_v2' matches none .*\(mcqa\)",
        ),
        ("{tmp}/other.jsonl", r"other\.jsonl:1: agent_ref 'other' matches none"),
        ("{tmp}/refused.jsonl", r"refused\.jsonl:1: input_file"),
    ],
)
def test_an_invalid_entry_or_file_is_an_error(tmp_path, tokenizer, entry, message):
    write_rows(tmp_path / "a.jsonl", [row()])
    write_rows(tmp_path / "other.jsonl", [agent("other")])
    picture = [{"role": "user", "content": [{"type": "input_file"}]}]
    write_rows(tmp_path / "refused.jsonl", [{"responses_create_params": {"input": picture}}])
    entry = json.loads(json.dumps(entry).replace("{tmp}", str(tmp_path)))
    with pytest.raises(env.DataError, match=message):
        load_files([entry], tokenizer, ["mcqa"])


def test_only_servers_excludes_the_rows_of_others(tmp_path, tokenizer):
    picture = agent("other") | {"responses_create_params": {"input": [{"type": "computer_call"}]}}
    a = write_rows(
        tmp_path / "a.jsonl",
        [agent("mcqa"), agent("math"), picture, agent("mcqa_simple_agent"), row()],
    )
    b = write_rows(tmp_path / "b.jsonl", [agent("mcqa")])
    c = write_rows(tmp_path / "c.jsonl", [agent("mcqa")])
    files = [str(a), str(b), {"path": str(c), "server": "mcqa_elsewhere"}]
    tasks, dropped = load_files(files, tokenizer, ["mcqa", "math"], only=["mcqa"])
    assert [t.row_id for t in tasks] == [f"{a}:1", f"{a}:4", f"{b}:1"]
    assert dropped == [f"{a}: 3 rows of other servers", f"{c}: 1 rows of other servers"]


class Letters:
    """A tokenizer with one token for each letter of the last message."""

    chat_template = "{{ messages[-1].content }}"
    added_tokens_decoder: ClassVar[dict] = {}
    all_special_tokens = ()
    unk_token = None

    def apply_chat_template(self, messages, **_):
        return {"input_ids": [ord(letter) for letter in messages[-1]["content"]]}


def test_a_prompt_at_the_limit_is_kept_and_one_more_token_is_dropped(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [row("x" * 20), row("x" * 21)])
    tasks, dropped = load_files([str(path)], Letters(), ["s"])
    assert [len(task.prompt_ids) for task in tasks] == [20]
    assert dropped == [f"{path}:2 (21 tokens)"]


def test_rows_of_other_servers_are_counted_for_each_file(tmp_path):
    one = write_rows(
        tmp_path / "one.jsonl", [row("a"), row("b", agent_ref={"name": "b"}), row("c")]
    )
    two = write_rows(tmp_path / "two.jsonl", [row("d", agent_ref={"name": "b"})] * 2)
    files = [{"path": str(one), "weight": 2.0}, str(two)]
    tasks, dropped = load_files(files, Letters(), ["a", "b"], only=["b"])
    assert [task.row_id for task in tasks] == [f"{one}:2", f"{two}:1", f"{two}:2"]
    assert [(task.file, task.weight) for task in tasks] == [
        (str(one), 2.0),
        (str(two), None),
        (str(two), None),
    ]
    assert dropped == [f"{one}: 2 rows of other servers"]
    tasks, dropped = load_files(files, Letters(), ["a", "b"], only=["a"])
    excluded = [f"{one}: 3 rows of other servers", f"{two}: 2 rows of other servers"]
    assert tasks == [] and dropped == excluded


# --- epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        # 8 rows are two batches of 3, since verl drops an incomplete batch
        (["trainer.total_epochs=3"], 6),
        (["trainer.total_training_steps=null", "trainer.total_epochs=3"], 6),
        (["trainer.total_epochs=3", "trainer.total_training_steps=5"], 5),
        # as in verl, total_training_steps has priority
        (["trainer.total_training_steps=5", "trainer.total_epochs=3"], 5),
        (["trainer.total_training_steps=null"], 60),  # verl's default of 30 epochs
    ],
)
def test_epochs_become_steps_as_in_verl(workspace, changes, steps):
    recipe, inputs = load(workspace, "data.train_batch_size=3", *changes)
    assert recipe.trainer.total_training_steps == recipe.actor.optim.total_training_steps == steps
    line = f"training    {steps} steps = {steps * 3 / 8:.2f} epochs"
    assert line in summary.summarize(recipe, inputs)


def test_zero_epochs_are_an_error(workspace):
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs=0"):
        load(workspace, "trainer.total_epochs=0")
