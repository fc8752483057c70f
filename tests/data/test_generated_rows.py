"""A Python function that the recipe names generates the rows of each training batch."""

from __future__ import annotations

import json
import math
import os
import random
from types import SimpleNamespace

import pytest

import env
from kit.data.episode import Episode, TurnSpan, append_tokens
from kit.data.generated_rows import FunctionRows, RowSource
from kit.data.metrics import update_pass_rates
from kit.data.rollout_files import assign_record_indices, load_replay
from kit.data.tasks import TaskLoader
from kit.errors import ConfigError, UserFunctionError
from kit.recipe.entries import Entry
from kit.run import summary
from kit.run.run import Run
from tests.helpers.recipes import load

TASK_FUNCTIONS = """
import random

def rows(batch, size, seed, pass_rates, top=10):
    draw = random.Random(f"{seed} {batch}")
    level = sum(sum(rates.values()) > len(rates) / 2 for rates in pass_rates.values())
    return [make_row(f"say {draw.randrange(top)} of {level}") for _ in range(size)]

def make_row(text):
    return {"responses_create_params": {"input": text}, "answer": "7"}

def verls(batch, size, seed, pass_rates):
    return [{"prompt": f"{batch} {k}", "data_source": "x"} for k in range(size)]

def raises(batch, size, seed, pass_rates):
    return 1 / 0

def no_rows(batch, size, seed, pass_rates):
    return [*rows(batch, size - 1, seed, pass_rates), ["say 7"]]

def long(batch, size, seed, pass_rates):
    return [make_row("x" * 99) for _ in range(size)]

def other(batch, size, seed, pass_rates):
    return [make_row(str(random.random())) for _ in range(size)]
"""


@pytest.fixture
def folder(workspace, tmp_path, monkeypatch):
    """The workspace. The current folder is another one, with TASK_FUNCTIONS in my_tasks.py."""
    (tmp_path / "my_tasks.py").write_text(TASK_FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return workspace


def draw_batch(data, batch, size=8, pass_rates=()):
    return data.source.batch(batch, size, (batch - 1) * size, dict(pass_rates))


def test_a_function_generates_the_rows_of_each_batch(folder):
    recipe, data, _ = load(folder, "env.train_files=[{function: my_tasks.py:rows, top: 5}]")
    first = draw_batch(data, 1)
    assert [task.row_id for task in first] == [f"my_tasks.py:rows#1.{k}" for k in range(8)]
    assert [task.row for task in first] == [task.row for task in data.generated]
    assert first[0].prompt_ids and data.train == []
    texts = [task.messages[0]["content"] for task in draw_batch(data, 2)]
    generator = random.Random("1 2")  # the function's own generator for seed 1 and batch 2
    assert texts == [f"say {generator.randrange(5)} of 0" for _ in range(8)]
    # the function counts the batches whose mean pass rate is over a half: batches 1 and 2
    rates = {"1.0": 1.0, "1.1": 0.5, "2.1": 1.0}
    pass_rates = {f"my_tasks.py:rows#{name}": rate for name, rate in rates.items()}
    pass_rates["a.jsonl:3"] = 0.0
    third = draw_batch(data, 3, pass_rates=pass_rates)
    assert {task.messages[0]["content"][-1] for task in third} == {"2"}
    text = summary.summarize(recipe, data)
    assert "rows        8 of each batch from my_tasks.py:rows, " in text
    assert data.per_epoch == math.inf and "epochs" not in text


def test_functions_and_files_share_a_batch_by_weight(folder):
    file = f"{{path: {folder / 'train.jsonl'}, weight: 2}}"
    function = "{function: my_tasks.py:rows, weight: 1}"
    other = "{function: my_tasks.py:rows, weight: 1, top: 3, server: reasoning_gym}"
    train_files = f"env.train_files=[{file}, {function}, {other}]"
    data = load(folder, train_files, "env.max_rows=4").inputs
    row_ids = [task.row_id for task in draw_batch(data, 5)]
    functions = [row_id.partition("#")[0] for row_id in row_ids[4:]]
    assert functions == ["my_tasks.py:rows"] * 2 + ["my_tasks.py:rows(2)"] * 2
    line_numbers = {row_id.rpartition(":")[2] for row_id in row_ids[:4]}
    assert line_numbers == {"1", "2", "3", "4"}  # env.max_rows=4 keeps the first four
    assert data.per_epoch == 8  # prompts, of which half are the 4 rows of the file
    assert [task.row_id for task in draw_batch(data, 5)] == row_ids


def test_a_function_may_generate_rows_of_verl_and_rows_for_other_commands(folder):
    """Commands other than `train` generate env.max_rows rows, once."""
    data = load(folder, "env.train_files=[{function: my_tasks.py:verls}]").inputs
    assert data.generated[3].row == {
        "responses_create_params": {"input": "1 3"},
        "data_source": "x",
    }
    files = [
        f"env.{name}=[{{function: my_tasks.py:verls}}]" for name in ("train_files", "val_files")
    ]
    message = r"my_tasks\.py:verls generates any number of rows\. Set env\.max_rows"
    with pytest.raises(ConfigError, match=message):
        load(folder, *files, command="rollout")
    changes = [*files, "env.max_rows=5", "env.val_max_rows=3"]
    tasks = load(folder, *changes, command="rollout").inputs.train
    assert tasks[4].row_id == "my_tasks.py:verls#0.4"
    for command in ("evaluate", "train"):
        assert len(load(folder, *changes, command=command).inputs.validation) == 3


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("raises}", r"my_tasks\.py:raises failed at .*my_tasks\.py:16: ZeroDivisionError"),
        ("no_rows}", "my_tasks.py:no_rows#1.7: the row is a list"),
        ("long}", r"my_tasks\.py:long#1\.0 \(100 tokens\) would be dropped, by data\.max_prompt"),
        ("other}", "my_tasks.py:other#1.0 is not deterministic: it changed on a second call"),
        ("rows}, FILE", "a function next to other rows needs a share of each batch"),
    ],
)
def test_an_error_of_a_function_is_one_line_before_anything_starts(folder, entry, message):
    entry = "{function: my_tasks.py:" + entry.replace("FILE", str(folder / "train.jsonl"))
    with pytest.raises((UserFunctionError, ConfigError, env.DataError), match=message) as caught:
        load(folder, f"env.train_files=[{entry}]")
    assert "\n" not in str(caught.value)


def test_keys_that_do_not_fit_a_function_are_errors(folder):
    train_files = "env.train_files=[{function: my_tasks.py:rows}]"
    with pytest.raises(ConfigError, match=r"rows of a function in env\.train_files have no epochs"):
        load(folder, train_files, "trainer.total_epochs=2")
    with pytest.raises(ConfigError, match=r"env\.sampler picks rows of files"):
        load(folder, train_files, "env.sampler=templates/samplers.py:by_pass_rate")


def make_episode(task, batch: int, number: int) -> Episode:
    """Make an episode with one turn. In each four episodes, the first earns 0 and the others 1."""
    group_id = f"{batch}/{number}"
    episode = Episode(task.row_id, group_id, task.server, task.prompt_ids, row=task.row)
    append_tokens(episode, [5, 1], [-1.0, -2.0])
    episode.reward = float(number % 4 > 0)
    content = [{"type": "output_text", "text": "7"}]
    episode.output = [{"type": "message", "role": "assistant", "content": content}]
    episode.turns = [TurnSpan(0, 2, 1)]
    return episode


def list_rows(tasks_or_episodes) -> list[tuple[str, dict, list[int]]]:
    """(row id, row, prompt ids) of each task or episode."""
    return [(each.row_id, each.row, each.prompt_ids) for each in tasks_or_episodes]


def test_a_resumed_run_generates_the_same_rows_and_a_replay_has_them(folder, tmp_path):
    """Batches after a checkpoint depend on its state alone. Rollouts hold the generated rows."""
    file = f"{{path: {folder / 'train.jsonl'}, weight: 1}}"
    function = "{function: my_tasks.py:rows, weight: 1}"
    changes = (f"env.train_files=[{file}, {function}]", "env.val_files=[]")
    recipe, data, _ = load(folder, *changes)
    pass_rates = {}
    batches = []
    states = []  # the pass rates before each batch, as a checkpoint stores them
    for batch in range(1, 5):
        states.append(json.loads(json.dumps(pass_rates)))
        tasks = draw_batch(data, batch, pass_rates=pass_rates)
        batches.append(list_rows(tasks))
        episodes = [make_episode(task, batch, number) for number, task in enumerate(tasks)]
        pass_rates = pass_rates | update_pass_rates(episodes, pass_rates)
    resumed = load(folder, *changes).inputs
    for batch in (3, 4):
        tasks = draw_batch(resumed, batch, pass_rates=states[batch - 1])
        assert list_rows(tasks) == batches[batch - 1]
    # the function got the pass rates of three batches
    assert batches[3][-1][1]["responses_create_params"]["input"].endswith("of 3")

    run = Run(recipe)
    rollouts = run.folder / "rollouts"
    rollouts.mkdir(parents=True)
    assign_record_indices(episodes[:6], data.train)
    run.files.write_episodes("step_4", episodes[:6], data.train)
    assign_record_indices(episodes[6:], data.train, before=episodes[:6])
    run.files.write_episodes("step_4", episodes[6:], data.train, before=episodes[:6])
    text = (rollouts / "step_4.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    assert len({record["_ng_task_index"] for record in records}) == 8
    assert ["row" in record["_episode"] for record in records] == [False] * 4 + [True] * 4
    os.remove(tmp_path / "my_tasks.py")
    ((*replayed,),) = load_replay(rollouts / "step_4.jsonl", data.train)
    assert list_rows(replayed) == batches[3]

    run = Run(recipe.change("env.keep_rollouts=2"))
    for name in ("val_4", "step_9", "step_10"):
        run.files.write_episodes(name, episodes, data.train)
    assert {path.stem for path in rollouts.iterdir()} == {"val_4", "step_9", "step_10"}


def test_a_function_with_a_small_weight_has_a_row_in_some_batches():
    sizes = []

    def generate(batch, size, seed, pass_rates):
        sizes.append(size)
        return []

    entry = Entry("t.py:rows", 0.05)
    rows = FunctionRows(entry, generate, TaskLoader(None, {}, 100), seed=1)
    file = SimpleNamespace(file="a.jsonl", weight=0.95, key="a")
    mixed = RowSource([file], None, 1, functions=[rows])
    assert mixed.file_share() == pytest.approx(0.95)
    of_files = [len(mixed.batch(n + 1, 8, 8 * n, {})) for n in range(5)]
    assert sorted(of_files) == [7, 7, 8, 8, 8] and sizes == [1, 1]
    alone = RowSource([], None, 1, functions=[rows])
    assert alone.compute_quotas(8) == {"t.py:rows": 8} and alone.file_share() == 0
