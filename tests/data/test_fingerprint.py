"""Tests of fingerprints: what makes rows, functions, models and recipes the same or others."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import env
from kit.data.fingerprint import (
    Fingerprint,
    hash_contents,
    hash_problem,
    hash_row,
    name_rates,
    name_row,
    place_rates,
)
from tests.helpers.recipes import row

FUNCTION = f"""
from package import (
    helper,
)
PROMPT = open('judge.txt') if False else '{"请" * 150}'
def f(e):
    return 1.0
"""


PROMPT = {"responses_create_params": {"input": "say 8", "tools": []}}


@pytest.mark.parametrize(
    ("change", "is_same_row", "is_same_problem"),
    [
        ({"agent_ref": {"name": "other"}}, True, True),
        ({"level": None, "extra_info": {"answer": "7", "k": None}}, True, True),
        ({"extra_info": {"answer": "7", "qid": "q-7"}}, False, True),
        ({"answer": "8"}, False, False),
        (PROMPT, False, False),
    ],
)
def test_a_row_is_its_fields_and_a_problem_is_its_prompt_and_its_truth(
    change, is_same_row, is_same_problem
):
    """Nulls are how a table fills the cells of rows with other columns."""
    first = row(extra_info={"answer": "7"})
    other = dict(reversed(list((first | change).items())))
    assert (hash_row(first) == hash_row(other)) is is_same_row
    assert (hash_problem(first) == hash_problem(other)) is is_same_problem


def test_without_a_truth_or_a_prompt_all_fields_make_the_problem():
    for fields in ({}, {"answer": "7", "responses_create_params": {"input": []}}):
        assert hash_problem({"level_id": 1, **fields}) != hash_problem({"level_id": 2, **fields})


@given(st.lists(st.sampled_from("abc"), max_size=9), st.randoms())
def test_names_of_rows_do_not_depend_on_their_order(answers, generator: random.Random):
    """Copies have different names."""
    rows = [row(answer=answer) for answer in answers]
    shuffled = generator.sample(rows, len(rows))
    copies: Counter[str] = Counter()
    names = [name_row(hash_problem(one), copies) for one in rows]
    copies.clear()
    assert sorted(names) == sorted(name_row(hash_problem(one), copies) for one in shuffled)
    assert len(set(names)) == len(names)


def make_tasks(answers: str) -> list[env.Task]:
    copies: Counter[str] = Counter()
    rows = [row(answer=answer) for answer in answers]
    return [
        env.Task(f"rows.jsonl:{line}", one, "s", [], [], key=name_row(hash_problem(one), copies))
        for line, one in enumerate(rows, 1)
    ]


def test_pass_rates_follow_their_rows_and_the_function_that_made_them():
    before = make_tasks("abb")
    rates = {task.row_id: rate for task, rate in zip(before, (0.1, 0.2, 0.3), strict=True)}
    saved = name_rates(rates | {"t.py:f#1.0": 0.5}, before, "digest")
    after = make_tasks("cbba")  # a row in front, and the others moved
    placed = place_rates(saved, after, "digest")
    by_line = [placed.get(task.row_id) for task in after]
    assert by_line == [None, 0.2, 0.3, 0.1] and placed["t.py:f#1.0"] == 0.5
    assert "t.py:f#1.0" not in place_rates(saved, after, "after an edit")
    assert place_rates(rates, before, "") == rates  # of an earlier version, by place


def test_the_order_of_rows_stays_if_others_come_or_go():
    answers = []
    for text in ("abcdefgh", "xyhgfedca"):
        tasks = make_tasks(text)
        batch = env.take_batch(tasks, len(tasks), 0, seed=3)
        answers.append([t.row["answer"] for t in batch if t.row["answer"] not in "bxy"])
    assert answers[0] == answers[1] != sorted(answers[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The current folder, with a function, a module and a text that it names, and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rw.py").write_text(FUNCTION)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "helper.py").write_text("")
    (tmp_path / "judge.txt").write_text("Be strict.")
    (tmp_path / "unrelated.py").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "a.safetensors").write_bytes(bytes(3 * 2**20))
    return tmp_path


def hash_all() -> tuple[str, ...]:
    values = {"env.reward": {"function": "rw.py:f", "k": 2}, "model.path": "model"}
    return tuple(hash_contents(value, key) for key, value in values.items())


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("rw.py", [True, False]),
        ("package/helper.py", [True, False]),
        ("judge.txt", [True, False]),
        ("unrelated.py", [False, False]),
        ("model/a.safetensors", [False, True]),
    ],
)
def test_an_edit_changes_the_digest_of_what_names_the_file(folder, file, changed):
    before = hash_all()
    path = folder / file
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"#" if content else b"#")
    assert [a != b for a, b in zip(before, hash_all(), strict=True)] == changed
    path.write_bytes(content)
    assert hash_all() == before  # the time of a file does not matter


def test_another_function_or_setting_is_another_content_and_another_path_is_not(folder):
    (folder / "moved" / "package").mkdir(parents=True)
    for name in ("rw.py", "package/helper.py", "judge.txt"):
        (folder / "moved" / name).write_bytes((folder / name).read_bytes())
    values = [("rw.py:f", 2), ("moved/rw.py:f", 2), ("rw.py:g", 2), ("rw.py:f", 3)]
    same, moved, *others = [
        hash_contents({"function": function, "k": k}, "env.reward") for function, k in values
    ]
    assert same == moved and len({same, *others}) == 3
    assert hash_contents("grpo", "algorithm.adv_estimator") == ""


def test_changes_are_values_or_contents():
    before = Fingerprint({"a": 1, "f": "x.py:f", "m": "old"}, {"f": "1", "m": "9"}, {"k": ["r"]})
    assert Fingerprint(before.values, before.contents).list_changes(before) == {}
    now = Fingerprint({"a": 2, "f": "x.py:f", "m": "new"}, {"f": "2", "m": "9"})
    assert now.list_changes(before) == {"a": "a 1 -> 2", "f": "the content of f=x.py:f"}
    # an earlier version has written no digests
    assert now.list_changes(Fingerprint(now.values)) == {}


def test_changes_of_rows_are_counted():
    before = Fingerprint(rows={"k": ["r", "s", "t"]})
    for rows, expected in (
        (["r", "s", "t"], []),
        (["t", "s", "r"], ["k has the same rows in another order"]),
        (["r", "s", "u", "v"], ["k has other rows: 2 added, 1 removed"]),
    ):
        found = Fingerprint(rows={"k": rows}).list_row_changes(before)
        assert [text.partition(" (")[0] for text in found] == expected
