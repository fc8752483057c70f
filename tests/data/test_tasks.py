"""Tests how entries name files, and how their rows become tasks with a server and prompt ids."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import env
from kit.data.row_files import find_files
from kit.data.tasks import TaskLoader, limit_rows
from kit.errors import ConfigError
from kit.recipe.entries import Entry, parse_entry
from kit.run import summary
from tests.helpers.recipes import load, row, write_rows

LIMIT = 20  # prompt tokens


class Letters:
    """A chat template with one token for each letter of the last message."""

    def __init__(self):
        self.prompts: list[str] = []
        self.processor: Any = SimpleNamespace(read_images=lambda *_: ())

    def encode_prompt(self, messages, tools, row_id, images):
        self.prompts.append(messages[-1]["content"])
        return [ord(letter) for letter in messages[-1]["content"]]


def make_loader(aliases=("a", "b"), template=None, **settings):
    """Make a loader. aliases: names of servers, or {alias: server}."""
    aliases = aliases if isinstance(aliases, dict) else {name: name for name in aliases}
    return TaskLoader(template or Letters(), aliases, LIMIT, **settings)


def load_tasks(entries, **settings):
    return make_loader(**settings).load_files(map(parse_entry, entries)).tasks


def write_numbers(path, count=8):
    """Write rows with the prompts `say 0`, `say 1`, ..."""
    return write_rows(path, [row(f"say {n}", agent_ref={"name": "a"}) for n in range(count)])


# --- servers --------------------------------------------------------------------------------------


TWO = ["mcqa", "math"]
NAMES = {"math": "math", "math_with_code": "math_with_code", "mcqa": "mcqa", "alias": "mcqa"}


@pytest.mark.parametrize(
    ("fields", "aliases", "server"),
    [
        ({}, ["mcqa"], "mcqa"),
        ({"agent_ref": None}, {"math": "math", "some_agent": "math"}, "math"),  # one server
        ({"agent_ref": {"name": "alias"}}, NAMES, "mcqa"),
        ({"agent_ref": {"name": "math_with_code_y"}}, NAMES, "math_with_code"),
        ({"agent_ref": {"name": "math_with_judge_simple_agent"}}, NAMES, "math"),
        # the data's source decides, not the agent that once ran the row
        ({"task_source": "mcqa", "agent_ref": {"name": "math_simple_agent"}}, TWO, "mcqa"),
        ({"task_source": "unknown", "agent_ref": {"name": "math_simple_agent"}}, TWO, "math"),
        ({"_ng_task_id": {"taskset": "math:train", "task_id": "0"}}, TWO, "math"),
    ],
    ids=str,
)
def test_a_row_matches_its_server(fields, aliases, server):
    assert make_loader(aliases).find_server(row(**fields), "x:1", "") == server


def test_a_row_that_matches_no_server_shows_all_that_it_names():
    with pytest.raises(
        env.DataError, match=r"agent_ref 'mcqaplus_agent', .*: mcqa\. Add 'gym\.servers\.mcqaplus="
    ):
        make_loader(["mcqa"]).find_server(row(agent_ref={"name": "mcqaplus_agent"}), "x:1", "")


def test_rows_of_other_servers_are_counted_for_each_file_and_may_have_any_form(tmp_path):
    picture = {"responses_create_params": {"input": [{"type": "computer_call"}]}}
    one = [row("x", agent_ref={"name": name}) for name in "ab"] + [picture | {"task_source": "b"}]
    paths = [write_rows(tmp_path / "one.jsonl", one), write_numbers(tmp_path / "two.jsonl", 1)]
    entries = [Entry(str(path)) for path in paths]
    loaded = make_loader(only_servers=["a"]).load_files(entries)
    assert [task.row_id for task in loaded.tasks] == [f"{path}:1" for path in paths]
    assert loaded.dropped == [f"{paths[0]}: 2 rows of other servers"]


# --- entries --------------------------------------------------------------------------------------


def test_an_entry_gives_its_rows_a_server_and_a_weight(tmp_path):
    rows = [row("x", agent_ref={"name": "a"}), row("y", agent_ref={"name": "alias"})]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    aliases = {"a": "a", "b": "b", "alias": "b"}
    entries = [{"path": path, "weight": 3, "server": "alias"}, {"path": path, "weight": 0.5}]
    tasks = load_tasks(entries, aliases=aliases)
    assert [(task.server, task.weight) for task in tasks] == [
        ("b", 3),
        ("b", 3),
        ("a", 0.5),
        ("b", 0.5),
    ]
    assert [task.row for task in tasks] == rows * 2  # verbatim
    with pytest.raises(
        env.DataError, match=r"rows\.jsonl:1: .* server 'c', .*: a, b\. Add 'gym\.servers\.c={"
    ):
        load_tasks([{"path": path, "server": "c"}])


def test_a_file_in_two_entries_keeps_both_weights_and_servers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_numbers(tmp_path / "rows.jsonl")
    second = {"path": "*.jsonl", "weight": 3, "server": "b"}
    loaded = load_tasks([{"path": "rows.jsonl", "weight": 1, "server": "a"}, second])
    assert len({task.row_id for task in loaded}) == len(loaded) == 16
    assert [task.row_id for task in loaded[:8]] == [f"rows.jsonl:{n}" for n in range(1, 9)]
    drawn = Counter()
    for step in range(10):
        drawn.update(task.server for task in env.take_batch(loaded, 32, 32 * step, 0))
    assert drawn == {"a": 80, "b": 240}


# --- folders and patterns -------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """A folder with shards of two rows each, and other files."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "sub/spark.jsonl/part-0.jsonl"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_numbers(path, 2)
    for name in ("README.md", ".hidden.jsonl", "_metadata.json", "a.jsonl.part"):
        (tmp_path / "data" / name).write_text("no row")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("data", ["a.jsonl", "b.jsonl"]),
        (
            "data/**/*.jsonl",
            ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/spark.jsonl/part-0.jsonl"],
        ),
        ("data/sub", ["sub/c.jsonl", "sub/spark.jsonl/part-0.jsonl"]),
    ],
)
def test_a_folder_or_pattern_stands_for_its_files_in_sorted_order(shards, path, files):
    loaded = load_tasks([{"path": path, "weight": 2}])
    expected = [f"data/{name}:{number}" for name in files for number in (1, 2)]
    assert [task.row_id for task in loaded] == expected
    assert {(task.file, task.weight) for task in loaded} == {(path, 2)}


def test_a_path_is_taken_literally_if_its_file_exists(tmp_path, monkeypatch):
    path = str(write_numbers(tmp_path / "rows[1].jsonl"))
    write_numbers(tmp_path / "rows1.jsonl")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(path) == find_files("~/rows[1].jsonl") == [path]


def test_a_pattern_or_a_folder_without_files_is_one_clear_error(tmp_path):
    with pytest.raises(env.DataError, match=r"no file matches this pattern\. Correct it\."):
        find_files(f"{tmp_path}/*.parquet")
    with pytest.raises(env.DataError, match=r"the folder has no file of rows \(\.jsonl, "):
        find_files(str(tmp_path))


# --- tasks ----------------------------------------------------------------------------------------


def test_a_prompt_at_the_limit_is_kept_and_a_longer_one_is_dropped_and_listed(tmp_path):
    rows = [row("x" * LIMIT), row("x" * (LIMIT + 1)), row("short")]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    loaded = make_loader(["a"]).load_files([Entry(path)])
    assert [task.row_id for task in loaded.tasks] == [f"{path}:1", f"{path}:3"]
    assert loaded.dropped == [(f"{path}:2", LIMIT + 1)]
    assert loaded.tasks[1].prompt_ids == [ord(letter) for letter in "short"]


def test_copies_of_rows_are_counted_in_one_line_and_encoded_once(tmp_path):
    rows = [{"prompt": f"say {n}", "extra_info": {"index": n}} for n in range(3)]
    copies = [{"prompt": "say 1", "extra_info": {"index": 9}}, *rows[:2]] * 4
    other = [{"prompt": "say 1", "extra_info": {"index": 1, "answer": 7}}]
    path = str(write_rows(tmp_path / "rows.jsonl", [*rows, *copies, *other]))
    lines: list[str] = []
    template = Letters()
    loaded = load_tasks([path], aliases=["a"], report=lines.append, template=template)
    assert len(lines) == 1 and lines[0].startswith(f"{path}: 11 of 16 rows have the prompt and")
    assert template.prompts == ["say 0", "say 1", "say 2", "say 1", "say 1"]
    assert [task.row_id for task in loaded] == [f"{path}:{n}" for n in range(1, 17)]
    expected = [[ord(letter) for letter in r["prompt"]] for r in [*rows, *copies, *other]]
    assert [task.prompt_ids for task in loaded] == expected
    indices = [task.row["extra_info"]["index"] for task in loaded]
    assert indices == [0, 1, 2] + [9, 0, 1] * 4 + [1]


def count_limited(limit, **files):
    """Limit the rows of files: name = (rows, weight). Returns the rows that are left of each."""
    tasks = []
    for file, (rows, weight) in files.items():
        tasks += [
            env.Task(f"{file}:{n}", {}, "", [], [], file=file, weight=weight) for n in range(rows)
        ]
    limited = limit_rows(tasks, limit)
    assert limited == [task for task in tasks if task in limited]  # the same order
    counts = Counter(task.file for task in limited)
    firsts = {f"{file}:{n}" for file, count in counts.items() for n in range(count)}
    assert {task.row_id for task in limited} == firsts
    return list(counts.values())


def test_a_limit_of_rows_is_shared_by_the_files():
    assert count_limited(10, a=(50, 0.8), b=(50, 0.2)) == [8, 2]
    assert count_limited(8, a=(100, None), b=(300, None)) == [2, 6]
    assert count_limited(50, a=(100, 1), b=(8, 1)) == [42, 8]  # the short file gives all
    with pytest.raises(env.DataError, match=r"A limit of 1 rows leaves none of b\."):
        count_limited(1, a=(8, 0.5), b=(8, 0.5))


def test_epochs_become_steps_as_in_verl(workspace):
    """8 rows are two batches of 3, since verl drops an incomplete batch."""
    changes = ["trainer.total_training_steps=null", "trainer.total_epochs=3"]
    recipe, inputs, _ = load(workspace, "data.train_batch_size=3", *changes)
    assert recipe.trainer.total_training_steps == recipe.actor.optim.total_training_steps == 6
    assert "training    6 steps = 2.25 epochs" in summary.summarize(recipe, inputs)
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs=0"):
        load(workspace, "trainer.total_epochs=0")
