"""The batches of tasks, the generators of rows, and their command."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
from conftest import ROOT, run

import env
from kit.data.tasks import match_server
from kit.data.verl_rows import read_rows

# --- batches --------------------------------------------------------------------------------------


def some_tasks(**files):
    """Make tasks of files that do not exist: name = (rows, weight)."""
    return [
        env.Task(f"{file}:{n}", {}, "mcqa", [], [], file=file, weight=weight)
        for file, (count, weight) in files.items()
        for n in range(1, count + 1)
    ]


def ids(tasks):
    return [task.row_id for task in tasks]


@pytest.mark.parametrize(("count", "size"), [(10, 3), (9, 3), (3, 7), (1, 2)])
def test_batches_are_one_stream_with_each_row_once_per_epoch(count, size):
    tasks = some_tasks(a=(count, None))
    batches = [ids(env.take_batch(tasks, size, step, seed=1)) for step in range(1, 21)]
    assert {len(b) for b in batches} == {size}
    stream = [row_id for b in batches for row_id in b]
    epochs = [stream[i : i + count] for i in range(0, len(stream) - count + 1, count)]
    assert len(epochs) >= 2 and all(sorted(epoch) == sorted(ids(tasks)) for epoch in epochs)
    alone = {
        step: ids(env.take_batch(list(tasks), size, step, seed=1))
        for step in reversed(range(1, 21))
    }
    assert [alone[step] for step in range(1, 21)] == batches


def test_the_order_depends_on_seed_and_epoch():
    tasks = some_tasks(a=(30, None))
    first, second, other = (
        ids(env.take_batch(tasks, 30, step, seed)) for step, seed in ((1, 1), (2, 1), (1, 2))
    )
    assert (
        first != second and first != other and first != ids(tasks)
    )  # the order depends on the seed and the epoch
    assert ids(env.take_batch(tasks, 3, 2, seed=1, shuffle=False)) == ["a:4", "a:5", "a:6"]
    assert ids(env.take_batch(some_tasks(a=(4, None)), 3, 2, seed=1, shuffle=False)) == [
        "a:4",
        "a:1",
        "a:2",
    ]
    with pytest.raises(env.DataError, match="no rows"):
        env.take_batch([], 3, 1, seed=1)


def test_weighted_batches_have_one_composition_and_use_every_row():
    tasks = some_tasks(a=(7, 0.5), b=(40, 0.3), c=(1, 0.2))
    batches = [env.take_batch(tasks, 8, step, seed=3) for step in range(1, 21)]
    for b in batches:
        assert [task.file for task in b] == ["a"] * 4 + ["b"] * 2 + ["c"] * 2
    for file, count in (("a", 7), ("b", 40), ("c", 1)):
        stream = [task.row_id for b in batches for task in b if task.file == file]
        epochs = [stream[i : i + count] for i in range(0, len(stream) - count + 1, count)]
        assert epochs and all(len(set(epoch)) == count for epoch in epochs)
    a = [task.row_id for b in batches for task in b if task.file == "a"]
    assert a[:7] != a[7:14]
    alone = {step: env.take_batch(tasks, 8, step, seed=3) for step in reversed(range(1, 21))}
    assert [alone[step] for step in range(1, 21)] == batches
    assert [env.take_batch(tasks, 8, step, seed=4) for step in range(1, 21)] != batches


def test_files_of_one_size_have_different_orders():
    picked = ids(env.take_batch(some_tasks(a=(20, 1), b=(20, 1)), 40, 1, seed=1))
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
    assert list(env.compute_quotas(tasks, size).values()) == counts
    assert (
        list(Counter(task.file for task in env.take_batch(tasks, size, 5, seed=0)).values())
        == counts
    )


def test_a_file_without_a_row_in_the_batch_is_an_error():
    with pytest.raises(
        env.DataError, match=r"^b: weight=0.05 gives no row in a batch of 8\. Raise it\.$"
    ):
        env.take_batch(some_tasks(a=(9, 0.95), b=(9, 0.05)), 8, 1, seed=0)
    for files in ({"a": (9, 1.0), "b": (9, None)}, {"b": (9, None), "a": (9, 1.0)}):
        with pytest.raises(env.DataError, match=r"^b: weight=0 .*since other files have a weight"):
            env.take_batch(some_tasks(**files), 8, 1, seed=0)


# --- generators -----------------------------------------------------------------------------------


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
    with pytest.raises(env.DataError, match="holds out all"):
        env.arithmetic(arguments(high=5))


def test_gsm8k_rows(tmp_path):
    entry = {"question": "How many?", "answer": "He has <<3*400=1200>>1,200.\n#### 1,200"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(entry) + "\n")
    rows = list(env.gsm8k(arguments(source=str(tmp_path)))["train"])
    assert rows[0]["expected_answer"] == "1200" and rows[0]["question"] == "How many?"
    assert rows[0]["agent_ref"]["name"] == "math_with_judge_simple_agent"
    with pytest.raises(env.DataError, match=r"test\.jsonl: cannot be read"):
        (tmp_path / "test.jsonl").unlink()
        list(env.gsm8k(arguments(source=str(tmp_path)))["validation"])


def command(*arguments):
    return run([sys.executable, str(ROOT / "env.py"), *map(str, arguments)], cwd=ROOT, timeout=60)


def test_the_command_writes_the_rows_of_a_generator(tmp_path):
    done = command("arithmetic", "--out", tmp_path, "--high", 5, "--validation", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == f"{tmp_path}/arithmetic_validation.jsonl: 3 rows"
    assert command("check", *sorted(tmp_path.glob("*.jsonl"))).returncode == 0
    failed = command("arithmetic", "--out", tmp_path, "--high", 5)
    assert failed.returncode == 1 and failed.stderr.startswith(
        "error: --validation 128 holds out all 10 pairs. Lower it."
    )
    assert command("arithmetic", "--server", "mcqa").returncode == 2


def test_gsm8k_without_a_hub_fails_soon_with_one_line(tmp_path, monkeypatch):
    for name, value in {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
    }.items():
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    failed = command("gsm8k", "--out", tmp_path / "out")
    assert failed.returncode == 1 and not (tmp_path / "out").exists()
    hint = r"Set --source to a folder with its JSONL files\."
    assert re.fullmatch(
        rf"error: openai/gsm8k cannot be loaded: .+\. {hint}\n",
        failed.stderr,
    )
    assert time.monotonic() - begin < 20


def test_a_new_generator_needs_one_entry(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import env\n"
        "def ones(args):\n"
        "    return {'train': [env.make_row('mcqa', str(args.seed))]}\n"
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
    assert [r["agent_ref"]["name"] for _, r in read_rows(tmp_path / "ones_train.jsonl")] == [
        "mcqa_simple_agent"
    ]


def test_a_write_error_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    failed = command("counter", "--out", tmp_path / "file")
    assert failed.returncode == 1 and re.fullmatch(r"error: \[Errno \d+\] .*\n", failed.stderr)


def test_counter_rows(tmp_path):
    assert command("counter", "--out", tmp_path).returncode == 0
    rows = {
        split: [r for _, r in read_rows(tmp_path / f"counter_{split}.jsonl")]
        for split in ("train", "validation")
    }
    asked = {split: {r["expected_count"] for r in some} for split, some in rows.items()}
    assert asked["train"] | asked["validation"] == set(range(1, 100)) - {7}  # 7 is in the example
    assert not asked["train"] & asked["validation"]
    for r in rows["train"] + rows["validation"]:
        messages, tools = env.render_row(r, "x:1")
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
        servers = {name: name for name in ("example_session_state_mgmt", "mcqa")}
        assert match_server(r, servers) == "example_session_state_mgmt"
