"""Tests of env.py: batches of tasks, generators of rows, and the command line."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import env
from kit.data.tasks import match_server
from kit.data.verl_rows import read_rows
from tests.helpers.recipes import ROOT, run

# --- batches --------------------------------------------------------------------------------------


def make_tasks(**files):
    """Make tasks of files that do not exist: name = (number of rows, weight)."""
    tasks = []
    for file, (count, weight) in files.items():
        for n in range(1, count + 1):
            tasks.append(env.Task(f"{file}:{n}", {}, "mcqa", [], [], file=file, weight=weight))
    return tasks


def list_row_ids(tasks):
    return [task.row_id for task in tasks]


def split_epochs(row_ids, count):
    """Split a stream of row ids into its complete epochs of `count` rows."""
    return [row_ids[i : i + count] for i in range(0, len(row_ids) - count + 1, count)]


@pytest.mark.parametrize(("count", "size"), [(10, 3), (3, 7), (1, 2)])
def test_batches_are_one_stream_with_each_row_once_per_epoch(count, size):
    """A batch does not depend on the batches before it, and batches may have any sizes."""
    tasks = make_tasks(a=(count, None))
    starts = range(0, 20 * size, size)
    batches = {start: env.take_batch(tasks, size, start, seed=1) for start in reversed(starts)}
    assert {len(batch) for batch in batches.values()} == {size}
    stream = list_row_ids(itertools.chain.from_iterable(batches[start] for start in starts))
    epochs = split_epochs(stream, count)
    row_ids = sorted(list_row_ids(tasks))
    assert len(epochs) >= 2 and all(sorted(epoch) == row_ids for epoch in epochs)
    assert list_row_ids(env.take_batch(tasks, 20 * size, 0, seed=1)) == stream


def test_the_order_depends_on_seed_and_epoch():
    tasks = make_tasks(a=(30, None))
    first = list_row_ids(env.take_batch(tasks, 30, 0, 1))
    other_epoch = list_row_ids(env.take_batch(tasks, 30, 30, 1))
    other_seed = list_row_ids(env.take_batch(tasks, 30, 0, 2))
    assert first != other_epoch and first != other_seed and first != list_row_ids(tasks)
    unshuffled = env.take_batch(tasks, 3, 3, seed=1, shuffle=False)
    assert list_row_ids(unshuffled) == ["a:4", "a:5", "a:6"]
    with pytest.raises(env.DataError, match="no rows"):
        env.take_batch([], 3, 1, seed=1)


def test_weighted_batches_have_nearly_the_same_composition_and_use_every_row():
    tasks = make_tasks(a=(7, 0.5), b=(40, 0.3), c=(1, 0.2))
    batches = [env.take_batch(tasks, 8, 8 * i, seed=3) for i in range(20)]
    counts = [Counter(task.file for task in batch) for batch in batches]
    assert all(count["a"] == 4 and count["b"] in (2, 3) for count in counts)
    stream = list(itertools.chain.from_iterable(batches))
    for file, count in (("a", 7), ("b", 40), ("c", 1)):
        row_ids = [task.row_id for task in stream if task.file == file]
        epochs = split_epochs(row_ids, count)
        assert epochs and all(len(set(epoch)) == count for epoch in epochs)
    rows_of_a = [task.row_id for task in stream if task.file == "a"]
    assert rows_of_a[:7] != rows_of_a[7:14]


@given(
    weights=st.lists(st.sampled_from([0.01, 0.2, 0.33, 1, 1, 7]), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30),
)
def test_quotas_carry_their_remainder_to_the_next_batch(weights, sizes):
    """Batches may have any sizes, and the counts depend on the rows before alone."""
    names = [f"f{place}" for place in range(len(weights))]
    tasks = make_tasks(**{name: (2, w) for name, w in zip(names, weights, strict=True)})
    counts = Counter(dict.fromkeys(names, 0))
    start = 0
    for size in sizes:
        quotas = env.compute_quotas(tasks, size, start)
        assert sum(quotas.values()) == size and min(quotas.values()) >= 0
        counts.update(quotas)
        start += size
    assert counts == env.compute_quotas(tasks, start)
    for name, weight in zip(names, weights, strict=True):
        assert abs(counts[name] - start * weight / sum(weights)) < 2


def test_a_file_without_a_weight_beside_others_is_an_error():
    for files in ({"a": (9, 1.0), "b": (9, None)}, {"b": (9, None), "a": (9, 1.0)}):
        with pytest.raises(env.DataError, match=r"^b: weight=0 .*since other files have a weight"):
            env.take_batch(make_tasks(**files), 8, 1, seed=0)


# --- generators -----------------------------------------------------------------------------------


def make_arguments(**changes):
    """The parsed command line of a generator."""
    defaults = {"seed": 0, "low": 2, "high": 29, "validation": 128, "source": None}
    return argparse.Namespace(**(defaults | changes))


def test_arithmetic_holds_out_pairs_in_either_order():
    splits = {name: list(rows) for name, rows in env.arithmetic(make_arguments()).items()}

    def list_pairs(rows):
        pairs = []
        for r in rows:
            sum_text = r["question"].removeprefix("Complete the equation: ").removesuffix(" =")
            pairs.append(sum_text.split(" + "))
        assert [r["answer"] for r in rows] == [f"{a} + {b} = {int(a) + int(b)}" for a, b in pairs]
        return {tuple(sorted(map(int, pair))) for pair in pairs}

    train = list_pairs(splits["train"])
    held_out = list_pairs(splits["validation"])
    assert len(held_out) == 128 and not train & held_out and len(train | held_out) == 28 * 29 // 2
    assert list(env.arithmetic(make_arguments())["validation"]) == splits["validation"]
    assert list(env.arithmetic(make_arguments(seed=1))["validation"]) != splits["validation"]
    with pytest.raises(env.DataError, match="holds out all"):
        env.arithmetic(make_arguments(high=5))
    with pytest.raises(env.DataError, match="--validation -1 is negative"):
        env.arithmetic(make_arguments(validation=-1))


def test_gsm8k_rows(tmp_path):
    entry = {"question": "How many?", "answer": "He has <<3*400=1200>>1,200.\n#### 1,200"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(entry) + "\n")
    rows = list(env.gsm8k(make_arguments(source=str(tmp_path)))["train"])
    assert rows[0]["expected_answer"] == "1200" and rows[0]["question"] == "How many?"
    assert rows[0]["agent_ref"]["name"] == "math_with_judge_simple_agent"
    with pytest.raises(env.DataError, match="no question, or no answer after ####"):
        env.make_gsm8k_row({"question": "q", "answer": "42"})


def run_env(*arguments):
    """Run env.py with these arguments."""
    return run([sys.executable, str(ROOT / "env.py"), *map(str, arguments)], cwd=ROOT, timeout=60)


def test_the_command_writes_the_rows_of_a_generator(tmp_path):
    done = run_env("arithmetic", "--out", tmp_path, "--high", 5, "--validation", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == f"{tmp_path}/arithmetic_validation.jsonl: 3 rows"
    assert run_env("check", *sorted(tmp_path.glob("*.jsonl"))).returncode == 0
    failed = run_env("arithmetic", "--out", tmp_path, "--high", 5)
    assert failed.returncode == 1 and failed.stderr.startswith(
        "error: --validation 128 holds out all 10 pairs. Lower it."
    )


def test_counter_rows(tmp_path):
    assert run_env("counter", "--out", tmp_path).returncode == 0
    rows = {
        split: [r for _, r in read_rows(tmp_path / f"counter_{split}.jsonl")]
        for split in ("train", "validation")
    }
    train = {r["expected_count"] for r in rows["train"]}
    validation = {r["expected_count"] for r in rows["validation"]}
    assert train | validation == set(range(1, 100)) - {7}  # the prompt's example uses 7
    assert not train & validation
    for r in rows["train"] + rows["validation"]:
        messages, tools = env.render_row(r, "x:1")
        roles = [m["role"] for m in messages]
        assert roles == ["user", "assistant", "tool", "assistant", "user"]
        assert messages[1]["tool_calls"][0]["function"] == {
            "name": "increment_counter",
            "arguments": {"count": 7},
        }
        assert messages[-1]["content"] == f"Add {r['expected_count']} to the counter."
        assert [tool["function"]["name"] for tool in tools] == ["increment_counter"]
        servers = {name: name for name in ("example_session_state_mgmt", "mcqa")}
        assert match_server(r, servers) == "example_session_state_mgmt"
