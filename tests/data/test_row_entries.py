"""Tests how entries of env.train_files name files: patterns, folders, and one file twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import env
from extras import sft
from kit.data import row_files, tasks
from kit.data.row_files import find_files
from kit.data.tasks import FileEntry, TaskLoader, limit_rows, parse_entries
from kit.errors import ConfigError
from templates.samplers import by_pass_rate
from tests.helpers.recipes import load, row, write_rows

HYPOTHESIS_SETTINGS = settings(max_examples=40, derandomize=True, deadline=None)


class Letters:
    """A chat template with one token for each letter of the last message."""

    def __init__(self):
        self.prompts: list[str] = []

    def encode_prompt(self, messages, tools, row_id):
        self.prompts.append(messages[-1]["content"])
        return [ord(letter) for letter in messages[-1]["content"]]


def load_tasks(entries, report=lambda line: None, template=None):
    """Load the tasks of entries. Each entry may name the servers a and b."""
    servers = {"a": "a", "b": "b"}
    loader = TaskLoader(template or Letters(), servers, 99, report=report)
    return loader.load_files(entries).tasks


def write_numbers(path, count=8):
    """Write rows with the prompts `say 0`, `say 1`, ..."""
    return write_rows(path, [row(f"say {n}", agent_ref={"name": "a"}) for n in range(count)])


# --- one file twice -------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["{}", "./{}", "link.jsonl", "folder/../{}", "*.jsonl", "."])
def test_a_file_in_two_entries_keeps_both_weights_and_servers(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write_numbers(tmp_path / "rows.jsonl")
    if spelling == "link.jsonl":
        (tmp_path / spelling).symlink_to("rows.jsonl")
    second = {"path": spelling.format("rows.jsonl"), "weight": 3, "server": "b"}
    loaded = load_tasks([{"path": "rows.jsonl", "weight": 1, "server": "a"}, second])
    assert len({task.row_id for task in loaded}) == len(loaded) == 16
    assert [task.row_id for task in loaded[:8]] == [f"rows.jsonl:{n}" for n in range(1, 9)]
    for sampler in (env.take_batch, lambda *args: by_pass_rate(*args, {})):
        drawn = Counter()
        for step in range(10):
            drawn.update(task.server for task in sampler(loaded, 32, 32 * step, 0))
        assert drawn == {"a": 80, "b": 240}


def test_pass_rates_of_two_entries_of_one_file_are_apart(tmp_path):
    path = str(write_numbers(tmp_path / "rows.jsonl", 2))
    loaded = load_tasks([{"path": path, "server": "a"}, {"path": path, "server": "b"}])
    rates = {task.row_id: 0.5 if task.server == "b" else 1.0 for task in loaded}
    batch = by_pass_rate(loaded, 2, 1, 0, rates, floor=0.0)
    assert [task.server for task in batch] == ["b", "b"]


@HYPOTHESIS_SETTINGS
@given(st.lists(st.sampled_from(["x.jsonl", "x.jsonl(2)", "./x.jsonl", "y.jsonl"]), min_size=1))
def test_names_of_entries_and_files_are_unique_and_the_first_is_the_path(paths):
    entries = parse_entries(paths)
    names = [entry.name for entry in entries]
    file_names = [name for entry in entries for name in entry.files]
    assert len({*names}) == len({*file_names}) == len(paths)
    for index, path in enumerate(paths):
        if path not in paths[:index] and not names[:index].count(path):
            assert names[index] == path
        assert [*entries[index].files.values()] == [path.removeprefix("./")]


def test_validation_rows_of_one_file_twice_have_their_names_and_servers(workspace):
    path = workspace / "val.jsonl"
    entry = f"{{path: {path}, server: reasoning_gym}}"
    _, inputs = load(workspace, f"env.train_files=[{entry}]", f"env.val_files=[{entry}, {entry}]")
    count = len(inputs.train)
    assert [task.row_id for task in inputs.validation[:count]] == [t.row_id for t in inputs.train]
    assert len({task.row_id for task in inputs.validation}) == 2 * count


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
        ("data/", ["a.jsonl", "b.jsonl"]),
        ("data/*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("data/[b-z].jsonl", ["b.jsonl"]),
        ("data/?.jsonl", ["a.jsonl", "b.jsonl"]),
        (
            "data/**/*.jsonl",
            ["a.jsonl", "b.jsonl", "sub/c.jsonl", "sub/spark.jsonl/part-0.jsonl"],
        ),
        ("data/sub", ["sub/c.jsonl", "sub/spark.jsonl/part-0.jsonl"]),
        ("data/sub/spark.jsonl", ["sub/spark.jsonl/part-0.jsonl"]),
        ("data/a.jsonl", ["a.jsonl"]),
    ],
)
def test_a_folder_or_pattern_stands_for_its_files_in_sorted_order(shards, path, files):
    assert find_files(path) == [f"data/{name}" for name in files]
    assert find_files(str(shards / path)) == [str(shards / "data" / name) for name in files]
    loaded = load_tasks([{"path": path, "weight": 2}])
    expected = [f"data/{name}:{number}" for name in files for number in (1, 2)]
    assert [task.row_id for task in loaded] == expected
    assert {(task.file, task.weight) for task in loaded} == {(path, 2)}


def test_the_weight_of_a_pattern_is_that_of_all_its_files(shards):
    other = str(write_numbers(shards / "other.jsonl"))
    loaded = load_tasks([{"path": "data/*.jsonl", "weight": 1}, {"path": other, "weight": 3}])
    assert Counter(task.file for task in env.take_batch(loaded, 8, 0, 0)) == {
        "data/*.jsonl": 2,
        other: 6,
    }


def test_a_path_is_taken_literally_if_its_file_exists(tmp_path):
    path = str(write_numbers(tmp_path / "rows[1].jsonl"))
    write_numbers(tmp_path / "rows1.jsonl")
    assert find_files(path) == [path]


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = str(write_numbers(tmp_path / "rows.jsonl"))
    assert find_files("~/rows.jsonl") == find_files("~/*.jsonl") == [path]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("data/*.parquet", "data/*.parquet: no file matches this pattern. Correct it."),
        ("empty", "empty: the folder has no file of rows (.jsonl, .json, .ndjson, .csv, "),
        ("none.jsonl", "none.jsonl: no such file. Check the path."),
    ],
)
def test_a_path_without_files_is_one_clear_error(shards, workspace, path, message):
    (shards / "empty").mkdir()
    with pytest.raises((env.DataError, ConfigError)) as raised:
        load(workspace, f"env.train_files=['{path}']")
    assert message in str(raised.value)


def test_a_broken_link_of_a_pattern_is_an_error(shards):
    (shards / "data" / "c.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(env.DataError, match=r"data/c\.jsonl: no such file"):
        load_tasks(["data/*.jsonl"])


def test_conversations_are_read_from_patterns_and_from_one_file_twice(shards, workspace):
    write_rows(shards / "data" / "chats.jsonl", [{"prompt": "say 7", "response": "7"}] * 4)
    recipe, inputs = load(workspace)
    entries = [
        {"path": "data/chats*.jsonl", "weight": 1, "verifier": "ignored"},
        {"path": "data/chats.jsonl", "weight": 3},
    ]
    examples = sft.load_examples(recipe, inputs, entries)
    assert len({example.row_id for example in examples}) == 8
    assert [example.row_id for example in examples[3:5]] == [
        "data/chats.jsonl:4",
        "data/chats.jsonl(2):1",
    ]
    batch = env.take_batch(examples, 8, 0, 0)
    assert Counter(example.file for example in batch) == {
        "data/chats*.jsonl": 2,
        "data/chats.jsonl": 6,
    }


# --- copies and progress --------------------------------------------------------------------------


def test_copies_of_rows_are_counted_in_one_line_and_encoded_once(tmp_path):
    rows = [{"prompt": f"say {n}", "extra_info": {"index": n}} for n in range(3)]
    copies = [{"prompt": "say 1", "extra_info": {"index": 9}}, *rows[:2]] * 4
    other = [{"prompt": "say 1", "extra_info": {"index": 1, "answer": 7}}]
    path = str(write_rows(tmp_path / "rows.jsonl", [*rows, *copies, *other]))
    lines: list[str] = []
    template = Letters()
    loaded = load_tasks([{"path": path, "server": "a"}], lines.append, template)
    assert lines == [
        f"{path}: 11 of 16 rows have the prompt and the answer of an earlier row, "
        "and each copy counts. To use each row once, remove the copies from the file."
    ]
    assert template.prompts == ["say 0", "say 1", "say 2", "say 1", "say 1"]
    assert [task.row_id for task in loaded] == [f"{path}:{n}" for n in range(1, 17)]
    expected = [[ord(letter) for letter in r["prompt"]] for r in [*rows, *copies, *other]]
    assert [task.prompt_ids for task in loaded] == expected
    indices = [task.row["extra_info"]["index"] for task in loaded]
    assert indices == [0, 1, 2] + [9, 0, 1] * 4 + [1]


def test_rows_with_one_prompt_and_other_answers_are_no_copies(tmp_path):
    rows = [row("say", answer) for answer in ["1", "2", 3, 3.0, True]]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    lines: list[str] = []
    loaded = load_tasks([{"path": path, "server": "a"}] * 2, lines.append)
    assert lines == [] and [repr(task.row) for task in loaded[:5]] == [repr(r) for r in rows]


def test_long_loading_is_reported_and_short_loading_is_silent(monkeypatch):
    clock = iter(range(0, 1000, 2))  # each row takes 2 s
    monkeypatch.setattr(row_files.time, "monotonic", lambda: next(clock))
    lines: list[str] = []
    items = list(row_files.report_progress(range(30), "a.jsonl", lines.append))
    assert items == list(range(30))
    assert lines == ["a.jsonl: 3 rows loaded in 6 s", "a.jsonl: 19 rows loaded in 38 s"]
    monkeypatch.setattr(row_files.time, "monotonic", lambda: 0.0)
    list(row_files.report_progress(range(30), "a.jsonl", lines.append))
    assert len(lines) == 2


def test_a_long_load_of_a_recipe_prints_its_rows(workspace, monkeypatch, capsys):
    monkeypatch.setattr(row_files, "FIRST_REPORT_S", -1.0)
    load(workspace)
    assert "train.jsonl: 1 rows loaded in 0 s" in capsys.readouterr().out


def test_a_generated_row_has_the_name_of_its_function(tmp_path):
    entry = FileEntry("my(1)/tasks.py:rows")
    loader = TaskLoader(Letters(), {"a": "a"}, 99)
    (task,) = loader.make_tasks([("my(1)/tasks.py:rows#1.0", row())], entry).tasks
    assert (task.row_id, task.file) == ("my(1)/tasks.py:rows#1.0", "my(1)/tasks.py:rows")
    used: set[str] = set()
    names = [tasks.make_unique(name, used) for name in ("t(2)", "t", "t", "t", "t(2)")]
    assert names == ["t(2)", "t", "t(3)", "t(4)", "t(2)(2)"]


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
    assert count_limited(8, a=(8, 0.5), b=(8, 0.5)) == [4, 4]
    assert count_limited(10, a=(50, 0.8), b=(50, 0.2)) == [8, 2]
    assert count_limited(8, a=(100, None), b=(300, None)) == [2, 6]
    assert count_limited(8, a=(100, 0.999), b=(300, 0.001)) == [7, 1]
    assert count_limited(50, a=(100, 1), b=(8, 1)) == [42, 8]  # the short file gives all
    assert count_limited(None, a=(3, None), b=(2, None)) == [3, 2]
    with pytest.raises(env.DataError, match=r"A limit of 1 rows leaves none of b\."):
        count_limited(1, a=(8, 0.5), b=(8, 0.5))
