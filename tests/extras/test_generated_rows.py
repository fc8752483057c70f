"""A Python function generates the rows of each batch, while a run trains."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from types import SimpleNamespace

import pytest
from conftest import load

import env
from env import take_batch
from kit.data.episode import Episode, TurnSpan, append_tokens
from kit.data.metrics import update_pass_rates
from kit.data.rollout_files import assign_record_indices, load_replay
from kit.data.tasks import FileRows, TaskLoader
from kit.errors import ConfigError, UserFunctionError
from kit.extras.generated_rows import FunctionEntry, FunctionRows, MixedRows
from kit.runs import prepare, summary
from kit.runs.run_dir import Run

MADE = """
import random

def rows(batch, size, seed, pass_rates, top=10):
    draw = random.Random(f"{seed} {batch}")
    level = sum(sum(rates.values()) > len(rates) / 2 for rates in pass_rates.values())
    return [made(f"say {draw.randrange(top)} of {level}") for _ in range(size)]

def made(text):
    return {"responses_create_params": {"input": text}, "answer": "7"}

def verls(batch, size, seed, pass_rates):
    return [{"prompt": f"{batch} {k}", "data_source": "x"} for k in range(size)]

def raises(batch, size, seed, pass_rates):
    return 1 / 0

def nothing(batch, size, seed, pass_rates):
    pass

def few(batch, size, seed, pass_rates):
    return rows(batch, size - 1, seed, pass_rates)

def yields(batch, size, seed, pass_rates):
    yield from rows(batch, size, seed, pass_rates)

def no_rows(batch, size, seed, pass_rates):
    return [*rows(batch, size - 1, seed, pass_rates), ["say 7"]]

def twice(batch, size, seed, pass_rates):
    return rows(batch, 1, seed, pass_rates) * size

def long(batch, size, seed, pass_rates):
    return [made("x" * 99) for _ in range(size)]

def other(batch, size, seed, pass_rates):
    return [made(str(random.random())) for _ in range(size)]

def late(batch, size, seed, pass_rates):
    return rows(batch, size if batch < 2 else 1, seed, pass_rates)
"""


@pytest.fixture
def desk(workspace, tmp_path, monkeypatch):
    """A folder with custom tasks, as the current folder."""
    (tmp_path / "my_tasks.py").write_text(MADE)
    monkeypatch.chdir(tmp_path)
    return workspace


def draw(data, batch, size=8, rates=()):
    return data.source.batch(batch, size, dict(rates))


def test_a_function_generates_the_rows_of_each_batch(desk):
    config, data = load(desk, "env.train_files=[{function: my_tasks.py:rows, top: 5}]")
    first = draw(data, 1)
    assert [t.row_id for t in first] == [f"my_tasks.py:rows#1.{k}" for k in range(8)]
    assert (
        [t.row for t in first] == [t.row for t in data.generated]
        and first[0].prompt_ids
        and data.train == []
    )
    asked = [t.messages[0]["content"] for t in draw(data, 2)]
    again = random.Random("1 2")
    assert asked == [f"say {again.randrange(5)} of 0" for _ in range(8)]
    told = {
        "my_tasks.py:rows#1.0": 1.0,
        "my_tasks.py:rows#1.1": 0.5,
        "a.jsonl:3": 0.0,
        "my_tasks.py:rows#2.1": 1.0,
    }
    assert {t.messages[0]["content"][-1] for t in draw(data, 3, rates=told)} == {"2"}
    assert "rows        8 of each batch from my_tasks.py:rows, " in summary.summarize(
        config, data, "train"
    )
    assert data.per_epoch == math.inf and "epochs" not in summary.summarize(config, data, "train")


def test_functions_and_files_share_a_batch_by_weight(desk):
    files = (
        f"{{path: {desk / 'train.jsonl'}, weight: 2}}, {{function: my_tasks.py:rows, weight: 1}}"
    )
    other = "{function: my_tasks.py:rows, weight: 1, top: 3, server: reasoning_gym}"
    both = f"env.train_files=[{files}, {other}]"
    _, data = load(desk, both, "env.max_rows=4")
    names = [t.row_id for t in draw(data, 5)]
    assert [name.partition("#")[0] for name in names[4:]] == ["my_tasks.py:rows"] * 2 + [
        "my_tasks.py:rows(2)"
    ] * 2
    assert {name.rpartition(":")[2] for name in names[:4]} == {
        "1",
        "2",
        "3",
        "4",
    }  # the first env.max_rows
    assert data.per_epoch == 8  # prompts, of which half are the 4 rows of the file
    assert [t.row_id for t in draw(data, 5)] == names
    _, data = load(desk, both, "env.sampler=templates/samplers.py:by_pass_rate")
    assert len(draw(data, 5)) == 8


WATCH = """
seen = []

def last(tasks, size, batch, seed, pass_rates):
    seen.append(("last", size, batch, seed, dict(pass_rates)))
    return tasks[-size:]

def rows(batch, size, seed, pass_rates):
    seen.append(("rows", size, batch, seed, pass_rates))
    return [{"responses_create_params": {"input": f"say {k}"}, "answer": "7"} for k in range(size)]
"""


def test_a_sampler_gets_the_same_arguments_with_functions_as_alone(desk, tmp_path):
    """The sampler gets the size for files and all pass rates. A function gets those of its rows."""
    (tmp_path / "watch.py").write_text(WATCH)
    files = f"{{path: {desk / 'train.jsonl'}, weight: 1}}, {{function: watch.py:rows, weight: 1}}"
    _, data = load(desk, f"env.train_files=[{files}]", "env.sampler=watch.py:last", "data.seed=9")
    rates = {f"{desk / 'train.jsonl'}:1": 0.25, "watch.py:rows#4.0": 0.5}
    watch = sys.modules[data.source.files.sampler.__module__]
    watch.seen.clear()
    picked = draw(data, 5, size=6, rates=rates)
    assert watch.seen == [("last", 3, 5, 9, rates), ("rows", 3, 5, 9, {4: {0: 0.5}})]
    assert [t.row_id.rpartition(":")[2] for t in picked] == [
        "6",
        "7",
        "8",
        "rows#5.0",
        "rows#5.1",
        "rows#5.2",
    ]


def test_functions_may_generate_rows_of_verl_or_rows_once(desk):
    config, data = load(desk, "env.train_files=[{function: my_tasks.py:verls}]")
    assert data.generated[3].row == {
        "responses_create_params": {"input": "1 3"},
        "data_source": "x",
    }
    config, _ = load(desk)
    made = [{"function": "my_tasks.py:verls"}]
    config.env.train_files, config.env.val_files = made, made
    with pytest.raises(
        ConfigError, match=r"my_tasks\.py:verls generates any number of rows\. Set env\.max_rows"
    ):
        prepare.prepare(config, "rollout")
    config.env.max_rows, config.env.val_max_rows = 5, 3
    assert [t.row_id for t in prepare.prepare(config, "rollout").train][
        4
    ] == "my_tasks.py:verls#0.4"
    assert len(prepare.prepare(config, "evaluate").validation) == 3
    assert len(prepare.prepare(config, "train").validation) == 3


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            "{function: my_tasks.py:raises}",
            r"my_tasks\.py:raises failed at .*my_tasks\.py:16: ZeroDivisionError",
        ),
        (
            "{function: my_tasks.py:nothing}",
            r"my_tasks.py:nothing returned None\. Return a list of 8",
        ),
        (
            "{function: my_tasks.py:few}",
            r"my_tasks.py:few returned a list of 7\. Return a list of 8",
        ),
        (
            "{function: my_tasks.py:yields}",
            r"my_tasks.py:yields returned <generator .*\. Return a list of 8",
        ),
        (
            "{function: my_tasks.py:no_rows}",
            "my_tasks.py:no_rows#1.7: a row must be a JSON object, this is a list",
        ),
        (
            "{function: my_tasks.py:twice}",
            "my_tasks.py:twice: rows 0 and 1 of batch 1 are the same object",
        ),
        (
            "{function: my_tasks.py:long}",
            r"my_tasks\.py:long#1\.0 \(100 tokens\): over data\.max_prompt_length",
        ),
        (
            "{function: my_tasks.py:other}",
            "my_tasks.py:other#1.0 is not deterministic: it changed on a second call.*"
            r'See docs/guides/curriculum\.md, "3\. Make a run that can be resumed"\.$',
        ),
        (
            "{function: my_tasks.py:rows, bottom: 1}",
            "my_tasks.py:rows cannot be called with .* unexpected keyword",
        ),
        ("{function: my_tasks.py:rows, weight: -1}", "a weight must be a number over 0"),
        (
            "{function: my_tasks.py:rows, server: mcqa}",
            "rows#1.0: server 'mcqa' matches none of gym.servers",
        ),
        ("{function: my_tasks.py:gone}", "has no function gone"),
        (
            "{function: my_tasks.py:rows}, train.jsonl",
            "a function next to other rows needs a share of each batch",
        ),
    ],
)
def test_an_error_of_a_function_is_one_line_before_anything_starts(desk, entry, told):
    entry = entry.replace("train.jsonl", str(desk / "train.jsonl"))
    with pytest.raises((UserFunctionError, ConfigError, env.DataError), match=told) as raised:
        load(desk, f"env.train_files=[{entry}]")
    assert "\n" not in str(raised.value)


def test_a_later_error_names_the_function(desk):
    _, data = load(desk, "env.train_files=[{function: my_tasks.py:late}]")
    with pytest.raises(
        UserFunctionError,
        match=r"my_tasks\.py:late returned a list of 1\. Return a list of 8",
    ):
        draw(data, 2)


def test_keys_that_do_not_fit_a_function_are_errors(desk):
    made = "env.train_files=[{function: my_tasks.py:rows}]"
    with pytest.raises(ConfigError, match=r"rows of a function in env\.train_files have no epochs"):
        load(desk, made, "trainer.total_epochs=2")
    with pytest.raises(ConfigError, match=r"env\.sampler picks rows of files"):
        load(desk, made, "env.sampler=templates/samplers.py:by_pass_rate")
    config, _ = load(desk)
    config.env.train_files = [{"function": "my_tasks.py:rows"}]
    assert "`sft` reads files only" in str(next(prepare.check_files(config, "sft")))


def test_a_resumed_run_generates_the_same_rows_and_a_replay_has_them(desk, tmp_path):
    """Batches after a checkpoint depend on its state alone. Rollouts hold the generated rows."""
    files = (
        f"{{path: {desk / 'train.jsonl'}, weight: 1}}, {{function: my_tasks.py:rows, weight: 1}}"
    )
    config, data = load(desk, f"env.train_files=[{files}]", "env.val_files=[]")
    rates, batches, states = {}, [], []
    for batch in range(1, 5):
        states.append(json.loads(json.dumps(rates)))
        tasks = draw(data, batch, rates=rates)
        batches.append([(t.row_id, t.row, t.prompt_ids) for t in tasks])
        episodes = [
            Episode(t.row_id, f"{batch}/{i}", t.server, t.prompt_ids, row=t.row)
            for i, t in enumerate(tasks)
        ]
        for i, e in enumerate(episodes):
            append_tokens(e, [5, 1], [-1.0, -2.0])
            e.reward = float(i % 4 > 0)
            e.output = [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "7"}],
                }
            ]
            e.turns = [TurnSpan(0, 2, 1)]
        rates = rates | update_pass_rates(episodes, rates)
    _, again = load(desk, f"env.train_files=[{files}]", "env.val_files=[]")
    for batch in (3, 4):
        found = draw(again, batch, rates=states[batch - 1])
        assert [(t.row_id, t.row, t.prompt_ids) for t in found] == batches[batch - 1]
    assert batches[3][-1][1]["responses_create_params"]["input"].endswith(
        "of 3"
    )  # it got the pass rates

    ended = Run(config)
    (ended.folder / "rollouts").mkdir(parents=True)
    assign_record_indices(episodes[:6], data.train)
    ended.write_episodes("step_4", episodes[:6], data.train)
    assign_record_indices(episodes[6:], data.train, before=episodes[:6])
    ended.write_episodes("step_4", episodes[6:], data.train, before=episodes[:6])
    lines = [
        json.loads(line)
        for line in (ended.folder / "rollouts" / "step_4.jsonl").read_text().splitlines()
    ]
    assert len({line["_ng_task_index"] for line in lines}) == 8
    assert ["row" in line["_episode"] for line in lines] == [False] * 4 + [True] * 4
    os.remove(tmp_path / "my_tasks.py")
    ((*replayed,),) = load_replay(ended.folder / "rollouts" / "step_4.jsonl", data.train)
    assert [(e.row_id, e.row, e.prompt_ids) for e in replayed] == batches[3]

    config.env.keep_rollouts = 2
    for name in ("val_4", "step_9", "step_10"):
        ended.write_episodes(name, episodes, data.train)
    left = {path.name for path in (ended.folder / "rollouts").iterdir()}
    assert left == {"val_4.jsonl", "step_9.jsonl", "step_10.jsonl"}


def test_a_function_without_a_row_in_the_batch_is_an_error():
    entry = FunctionEntry("t.py:rows", 0.01, "", "env.train_files", lambda *_: [])
    rows = FunctionRows(entry, TaskLoader(None, {}, 100), seed=1)
    file = SimpleNamespace(file="a.jsonl", weight=1.0)
    mixed = MixedRows(FileRows([file], take_batch, 1), [rows])
    with pytest.raises(
        env.DataError, match=r"t\.py:rows: weight=0.01 gives no row in a batch of 8"
    ):
        mixed.compute_quotas(8)
    alone = MixedRows(FileRows([], take_batch, 1), [rows])
    assert alone.compute_quotas(8) == {"t.py:rows": 8}
