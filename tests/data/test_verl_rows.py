"""Rows of other shapes: verl's files, both ways; any table by a function; rows made on the fly, in a run's batches."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
import tempfile
from types import SimpleNamespace

import numpy as np
import pandas
import pyarrow
import pytest
from conftest import ROOT, load, row, run, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from pyarrow import parquet

import env
from kit.data import verl_rows
from kit.data.episodes import Episode, append, load_replay, pass_rates
from kit.errors import ConfigError, PluginError
from kit.extras import convert, sft
from kit.runs import preparation
from kit.runs.run_dir import Run

set_hypothesis_home_dir(f"{tempfile.gettempdir()}/hypothesis")  # not into the repository
often = settings(max_examples=100, derandomize=True, deadline=None)


def gsm8k(i: int, **changes) -> dict:
    """A row as verl's examples/data_preprocess/gsm8k.py makes it."""
    made = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i} + 1? Let's think step by step."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {
            "split": "train",
            "index": i,
            "answer": f"So #### {i + 1}",
            "question": f"{i} + 1?",
        },
    }
    return made | changes


def as_gym(i: int) -> dict:
    verls = gsm8k(i)
    return {"responses_create_params": {"input": verls.pop("prompt")}, **verls}


def command(*words, cwd=ROOT, **variables):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        return run([sys.executable, str(ROOT / "env.py"), *map(str, words)], cwd=cwd, timeout=60)


def written(monkeypatch, capsys, *words) -> tuple[int, str]:
    """(exit status, what was printed last or why it ended) of a command of kit/extras/convert.py, in this process."""
    monkeypatch.setattr(sys, "argv", ["env.py", *map(str, words)])
    try:
        convert.main()
    except SystemExit as end:
        return (end.code, "") if isinstance(end.code, int) else (1, str(end.code))
    return 0, capsys.readouterr().out


# --- verl's files --------------------------------------------------------------------------------


def test_verls_files_are_read_as_they_are_whatever_wrote_them(tmp_path):
    verls = [gsm8k(i) for i in range(3)]
    pandas.DataFrame(verls).to_parquet(tmp_path / "pandas.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(verls), tmp_path / "arrow.parquet")
    write_rows(tmp_path / "lines.jsonl", verls)
    (tmp_path / "list.json").write_text("\n" + json.dumps(verls, indent=1))
    write_rows(tmp_path / "lines.json", verls)
    for name in ("pandas.parquet", "arrow.parquet", "lines.jsonl", "list.json", "lines.json"):
        path = tmp_path / name
        assert list(verl_rows.read(str(path))) == [
            (f"{path}:{i + 1}", as_gym(i)) for i in range(3)
        ], name
    mixed = write_rows(tmp_path / "mixed.jsonl", [gsm8k(0), row(), gsm8k(1, prompt="as text")])
    assert [r["responses_create_params"]["input"] for _, r in verl_rows.read(str(mixed))] == [
        gsm8k(0)["prompt"],
        row()["responses_create_params"]["input"],
        "as text",
    ]
    asked = write_rows(tmp_path / "asked.jsonl", [{"asked": "2?", "prompt": 7}])
    assert [r for _, r in verl_rows.read(str(asked), "asked")] == [
        {"responses_create_params": {"input": "2?"}, "prompt": 7}
    ]


def test_what_numpy_and_pandas_hold_becomes_plain():
    odd = gsm8k(1, prompt=np.array([{"role": "user", "content": "x"}], dtype=object))
    odd["extra_info"] = {
        "n": np.int64(3),
        "x": np.array([[1.5], [2.0]]),
        "day": pandas.Timestamp("2026-01-02"),
    }
    made = verl_rows.parse(odd, "x:1")
    assert made["responses_create_params"]["input"] == [{"role": "user", "content": "x"}]
    assert made["extra_info"] == {"n": 3, "x": [[1.5], [2.0]], "day": "2026-01-02T00:00:00"}


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (gsm8k(0, prompt=None), "x:1: `prompt` is null; it must be text, or chat messages"),
        (gsm8k(0, prompt=[]), r"x:1: `prompt` is \[\]"),
        (gsm8k(0, prompt=7), "x:1: `prompt` is 7"),
        (
            {"question": "2?", "answer": "2"},
            "x:1: neither Gym's .* nor verl's `prompt` .* it has question, answer",
        ),
        (gsm8k(0, images=[{"bytes": "x"}]), "x:1: images: the kit trains text models only"),
        (gsm8k(0, extra_info=b"x"), "x:1: not JSON .a bytes in it"),
        (gsm8k(0, extra_info=math.nan), "x:1: not JSON"),
        (
            gsm8k(0, prompt=[{"role": "assistant", "content": "", "tool_calls": [{}]}]),
            "x:1: tool_calls in `prompt`",
        ),
        (
            gsm8k(0, extra_info={"gym_row": json.dumps(row("other"))}),
            "x:1: `prompt` is not that of extra_info.gym_row",
        ),
        (gsm8k(0, extra_info={"gym_row": "{}"}), "x:1: no responses_create_params"),
        (7, "x:1: a row must be a JSON object, this is a int"),
    ],
)
def test_a_row_that_is_neither_is_told_by_its_line(bad, told):
    with pytest.raises(env.DataError, match=f"^{told}"):
        verl_rows.parse(bad, "x:1")


def test_a_file_that_cannot_be_read_is_told_and_not_loaded_whole(tmp_path, monkeypatch):
    other = tmp_path / "other.parquet"
    pandas.DataFrame({"question": ["2?"], "answer": ["2"]}).to_parquet(other)
    told = re.escape(
        f"{other}: cannot be read (it needs prompt, a string column `row`, or just one of strings; it has ["
    )
    with pytest.raises(env.DataError, match=told):
        list(verl_rows.read(str(other)))
    pandas.DataFrame(
        [gsm8k(0), gsm8k(1, prompt=[{"role": "user", "content": "x" * 5000}])]
    ).to_parquet(tmp_path / "huge.parquet")
    write_rows(tmp_path / "huge.jsonl", [gsm8k(0), gsm8k(1, prompt="x" * 5000)])
    (tmp_path / "huge.json").write_text(json.dumps([gsm8k(1, prompt="x" * 50000)]))
    monkeypatch.setattr(env, "MOST", 3000)
    for name, why in (
        ("huge.jsonl", "a line of over"),
        ("huge.json", "a line of over"),
        ("huge.parquet", "a row of"),
    ):
        with pytest.raises(env.DataError, match=rf"{re.escape(name)}.*{why}"):
            list(verl_rows.read(str(tmp_path / name)))
    frame = pandas.DataFrame(
        [gsm8k(0), gsm8k(1, prompt=[{"role": "user", "content": "x" * 200_000}])]
    )
    frame.to_parquet(
        tmp_path / "huge.parquet"
    )  # told by what the file says of itself, before anything is read
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", None)
    with pytest.raises(
        env.DataError,
        match=r"huge\.parquet: cannot be read \(prompt\.list\.element\.content: .* MiB",
    ):
        list(verl_rows.read(str(tmp_path / "huge.parquet")))


def test_verls_rows_are_trained_on_beside_gyms(workspace, tmp_path):
    pandas.DataFrame([gsm8k(i) for i in range(8)]).to_parquet(tmp_path / "train.parquet")
    both = f"env.train_files=[{tmp_path / 'train.parquet'}, {workspace / 'train.jsonl'}]"
    _, data = load(workspace, both, "data.max_prompt_length=64")
    assert (
        len(data.train) == 16
        and data.train[0].row == as_gym(0)
        and data.train[0].row_id.endswith("train.parquet:1")
    )
    assert data.tokenizer.decode(data.train[0].prompt_ids).startswith("0 <unk> 1?")
    asked = write_rows(tmp_path / "asked.jsonl", [{"asked": f"say {i}"} for i in range(8)])
    _, data = load(workspace, f"env.train_files=[{asked}]", "data.prompt_key=asked")
    assert data.train[7].messages == [{"role": "user", "content": "say 7"}]
    with pytest.raises(
        env.DataError, match=r"asked\.jsonl:1: neither .* nor verl's `prompt` \(data\.prompt_key\)"
    ):
        load(workspace, f"env.train_files=[{asked}]")


# --- both ways -----------------------------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8"), max_size=8)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    leaves | texts, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3)
)
said = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": texts}
)
extras = st.dictionaries(texts, values, max_size=3)
verls_rows = st.fixed_dictionaries(
    {"data_source": texts, "prompt": texts.filter(bool) | st.lists(said, min_size=1, max_size=3)},
    optional={
        "reward_model": extras,
        "extra_info": extras | st.none(),
        "ability": texts,
        "other": values,
    },
)
inputs = texts.filter(bool) | st.lists(
    said | said.map(lambda s: s | {"type": "message"}), min_size=1, max_size=3
)
gym_rows = st.fixed_dictionaries(
    {
        "responses_create_params": st.fixed_dictionaries(
            {"input": inputs}, optional={"temperature": st.just(0.5)}
        )
    },
    optional={
        **{
            "agent_ref": st.just({"type": "responses_api_agents", "name": "mcqa_simple_agent"}),
            "answer": values,
        },
        **{"extra_info": extras, "reward_model": extras, "data_source": values, "prompt": values},
    },
)


def text_of(found) -> str:
    return json.dumps(found, sort_keys=True)  # 1, 1.0 and true are not the same


@often
@given(verls_rows)
def test_a_row_of_verls_is_the_same_after_both_ways(theirs):
    ours = verl_rows.parse(theirs, "x:1")
    assert {
        **theirs,
        "responses_create_params": ours["responses_create_params"],
    }.keys() - ours.keys() == {"prompt"}
    assert text_of(verl_rows.to_verl(ours, "x:1")) == text_of(theirs)


@often
@given(gym_rows)
def test_a_gym_row_is_the_same_after_both_ways(ours):
    try:
        theirs = verl_rows.to_verl(ours, "x:1")
    except (
        env.Refused
    ) as why:  # an assistant who says nothing is no message, and then there may be none
        assert "its environment writes the prompt" in str(why)
        return
    assert {"prompt", "data_source"} <= theirs.keys() or "reward_model" in theirs
    assert text_of(verl_rows.parse(theirs, "x:1")) == text_of(ours)


@settings(often, max_examples=25)
@given(st.lists(verls_rows, max_size=3), st.lists(gym_rows, max_size=3))
def test_files_are_the_same_after_both_ways(tmp_path_factory, verls, gyms):
    """Whatever is in them: where parquet would not give the rows back, they are written as JSON."""
    folder = tmp_path_factory.getbasetemp()
    theirs = convert.write_verl(folder / "verl.parquet", verls, "prompt")
    env.write_rows(folder / "gym.jsonl", convert.gym_rows(str(theirs), "prompt"))
    back = [verl_rows.to_verl(r, where) for where, r in verl_rows.read(str(folder / "gym.jsonl"))]
    assert text_of(back) == text_of(verls)
    gyms = [r for r in gyms if env.render(r, "x:1")[0]]
    made = convert.write_verl(
        folder / "made.parquet", [verl_rows.to_verl(r, "x:1") for r in gyms], "prompt"
    )
    assert text_of([r for _, r in verl_rows.read(str(made))]) == text_of(gyms)
    assert not list(folder.glob("*.part*"))


def test_the_commands_write_verls_files_as_gyms_and_back(tmp_path):
    verls = [gsm8k(i) for i in range(3)]
    pandas.DataFrame(verls).to_parquet(tmp_path / "train.parquet")
    done = command("from-verl", tmp_path / "train.parquet", "--out", tmp_path / "gym")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/gym/train.jsonl: 3 rows\n"), (
        done.stderr
    )
    done = command("to-verl", tmp_path / "gym" / "train.jsonl", "--out", tmp_path / "verl")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/verl/train.parquet: 3 rows\n"), (
        done.stderr
    )
    assert parquet.read_table(tmp_path / "verl" / "train.parquet").to_pylist() == verls
    done = command("check", tmp_path / "train.parquet", tmp_path / "gym" / "train.jsonl")
    assert done.returncode == 0 and done.stdout.count("3 rows load, 0 refused") == 2


def test_a_gym_row_goes_to_verl_with_what_its_reward_function_asks_for():
    theirs = verl_rows.to_verl(row("2?", answer=7, agent_ref={"name": "mcqa_simple_agent"}), "x:1")
    assert theirs["data_source"] == "mcqa" and theirs["prompt"] == [
        {"role": "user", "content": "2?"}
    ]
    assert theirs["reward_model"] == {"style": "rule", "ground_truth": "7"}
    for params, why in (
        ({"input": []}, "its environment writes"),
        ({"input": "x", "tools": [TOOL]}, "tools, which"),
    ):
        with pytest.raises(env.Refused, match=f"x:1: {why}"):
            verl_rows.to_verl({"responses_create_params": params}, "x:1")


TOOL = {"type": "function", "name": "f", "parameters": {}}


def test_nothing_is_written_unless_all_is_in_order(tmp_path, monkeypatch, capsys):
    path = write_rows(tmp_path / "bad.jsonl", [gsm8k(0), gsm8k(1, prompt=None)])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bad.jsonl").write_text("as it was")
    for words in (["from-verl", path], ["to-verl", path], ["to-verl", tmp_path / "none.jsonl"]):
        status, why = written(monkeypatch, capsys, *words, "--out", tmp_path / "out")
        assert status == 1 and re.fullmatch(
            rf"error: {tmp_path}/(bad\.jsonl:2|none\.jsonl): [^\n]+", why
        )
    assert (tmp_path / "out" / "bad.jsonl").read_text() == "as it was" and len(
        list((tmp_path / "out").iterdir())
    ) == 1
    status, why = written(monkeypatch, capsys, "from-verl", path, "--out", tmp_path)
    assert status == 1 and "bad.jsonl: would be written over itself" in why
    status, why = written(
        monkeypatch, capsys, "from-verl", path, "elsewhere/bad.json", "--out", tmp_path / "out"
    )
    assert status == 1 and "more than one of the files would go there" in why


# --- any table -----------------------------------------------------------------------------------

MAP = """
def row(entry):
    truth = {"ground_truth": str(entry["answer"])}
    return {"prompt": entry["question"], "data_source": "trivia", "reward_model": truth}

def nothing(entry):
    return None if entry["answer"] == 2 else row(entry)

def raises(entry):
    return entry["wrong"]

def no_row(entry):
    return {"question": entry["question"]}
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A folder with a map and a table of two rows, as CSV, JSON and parquet."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "my_map.py").write_text(MAP)
    frame = pandas.DataFrame({"question": ["one?", 'two, "2"?\nor'], "answer": [1, 2]})
    frame.to_csv(folder / "t.csv", index=False)
    frame.to_csv(folder / "t.tsv", index=False, sep="\t")
    frame.to_parquet(folder / "t.parquet")
    frame.to_json(folder / "t.jsonl", orient="records", lines=True)
    return folder


def test_a_table_becomes_rows_by_a_function(table, monkeypatch, capsys):
    monkeypatch.chdir(table)
    for name in ("t.csv", "t.tsv", "t.parquet", "t.jsonl"):
        status, said = written(
            monkeypatch, capsys, "from", "--data", name, "--map", "my_map.py:row", "--out", "out"
        )
        assert (status, said) == (0, "out/t.jsonl: 2 rows\n"), name
        found = [r for _, r in env.read_rows("out/t.jsonl")]
        assert [r["responses_create_params"]["input"] for r in found] == ["one?", 'two, "2"?\nor']
        assert [r["reward_model"]["ground_truth"] for r in found] == ["1", "2"]


@pytest.mark.parametrize(
    ("data", "function", "told"),
    [
        (
            "t.csv",
            "my_map.py:raises",
            r"t\.csv:1: --map=my_map\.py:raises failed at .*my_map\.py:10: KeyError: 'wrong'",
        ),
        (
            "t.csv",
            "my_map.py:nothing",
            r"t\.csv:2: --map=my_map\.py:nothing returned None; it must return a row",
        ),
        ("t.csv", "my_map.py:no_row", "t.csv:1: neither Gym's .* it has question"),
        (
            "t.csv",
            "my_map.py:other",
            r"--map=my_map\.py:other: .* has no function other; it has row, nothing",
        ),
        ("t.csv", "other.py:row", "--map=other.py:row: no file other.py here"),
        ("none.csv", "my_map.py:row", "none.csv: no such file"),
        ("my_map.py", "my_map.py:row", "my_map.py: a table of another kind"),
        ("torn.parquet", "my_map.py:row", "torn.parquet: cannot be read after row 0"),
    ],
)
def test_what_a_map_or_a_table_does_wrong_is_one_line(
    table, monkeypatch, capsys, data, function, told
):
    monkeypatch.chdir(table)
    (table / "torn.parquet").write_bytes((table / "t.parquet").read_bytes()[:200])
    status, why = written(
        monkeypatch, capsys, "from", "--data", data, "--map", function, "--out", "nowhere"
    )
    assert status == 1 and re.fullmatch(f"error: {told}[^\n]*", why), why
    assert not (table / "nowhere").exists() or not list((table / "nowhere").iterdir())


def test_a_hub_that_cannot_be_reached_is_one_line(table):
    variables = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": table / "hub",
        "HF_HUB_OFFLINE": "0",
    }
    failed = command(
        "from", "--data", "openai/gsm8k", "--map", "my_map.py:row", cwd=table, **variables
    )
    assert failed.returncode == 1 and "give --data a file of it" in failed.stderr
    assert re.fullmatch(
        r"error: openai/gsm8k: no file here, and not to be had of the hub \([^\n]+\n", failed.stderr
    )


# --- sft, and epochs -----------------------------------------------------------------------------


def test_sft_takes_prompt_and_response(tmp_path):
    both = [
        {"prompt": "2?", "response": "4"},
        {"prompt": [{"role": "user", "content": "2?"}], "response": "4"},
    ]
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]
    write_rows(tmp_path / "a.jsonl", [*both, {"messages": chat, "prompt": "other"}])
    assert [r["messages"] for _, r in sft.read_conversations(str(tmp_path / "a.jsonl"))] == [
        chat
    ] * 3
    pandas.DataFrame(both[:1]).to_parquet(tmp_path / "a.parquet")
    assert [r["messages"] for _, r in sft.read_conversations(str(tmp_path / "a.parquet"))] == [chat]
    asked = write_rows(tmp_path / "asked.jsonl", [{"asked": "2?", "response": "4"}])
    assert [r["messages"] for _, r in sft.read_conversations(str(asked), "asked")] == [chat]
    for bad in (
        {"prompt": "2?"},
        {"prompt": None, "response": "4"},
        {"prompt": "2?", "response": ["4"]},
    ):
        with pytest.raises(
            env.DataError,
            match=r"b\.jsonl:1: `prompt` must be text or messages, and `response` text",
        ):
            list(sft.read_conversations(str(write_rows(tmp_path / "b.jsonl", [bad]))))


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        (
            ["trainer.total_epochs=3"],
            6,
        ),  # 8 rows are two whole batches of 3, as verl drops the last one
        (["trainer.total_training_steps=null", "trainer.total_epochs=3"], 6),
        (["trainer.total_epochs=3", "trainer.total_training_steps=5"], 5),
        (["trainer.total_training_steps=5", "trainer.total_epochs=3"], 5),  # as in verl, the steps
        (["trainer.total_training_steps=null"], 60),  # verl's 30 epochs
    ],
)
def test_epochs_make_steps_as_verl_counts_them(workspace, changes, steps):
    config, data = load(workspace, "data.train_batch_size=3", *changes)
    assert (
        config.trainer.total_training_steps
        == config.actor_rollout_ref.actor.optim.total_training_steps
        == steps
    )
    assert f"training    {steps} steps = {steps * 3 / 8:.2f} epochs" in preparation.summary(
        config, data, "train"
    )


def test_epochs_that_are_none_are_refused(workspace):
    with pytest.raises(ConfigError, match=r"trainer\.total_epochs=0: wants 1 or more"):
        load(workspace, "trainer.total_epochs=0")


# --- made on the fly -----------------------------------------------------------------------------

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
    """A folder with tasks of one's own, in which one stands."""
    (tmp_path / "my_tasks.py").write_text(MADE)
    monkeypatch.chdir(tmp_path)
    return workspace


def drawn(data, batch, size=8, seed=1, rates=()):
    return data.sampler(data.train, size, batch, seed, dict(rates))


def test_a_function_makes_the_rows_of_each_batch(desk):
    config, data = load(desk, "env.train_files=[{function: my_tasks.py:rows, top: 5}]")
    first = drawn(data, 1)
    assert [t.row_id for t in first] == [f"my_tasks.py:rows#1.{k}" for k in range(8)]
    assert (
        [t.row for t in first] == [t.row for t in data.made]
        and first[0].prompt_ids
        and data.train == []
    )
    asked = [t.messages[0]["content"] for t in drawn(data, 2)]
    again = random.Random("1 2")
    assert asked == [f"say {again.randrange(5)} of 0" for _ in range(8)]
    told = {
        "my_tasks.py:rows#1.0": 1.0,
        "my_tasks.py:rows#1.1": 0.5,
        "a.jsonl:3": 0.0,
        "my_tasks.py:rows#2.1": 1.0,
    }
    assert {t.messages[0]["content"][-1] for t in drawn(data, 3, rates=told)} == {"2"}
    assert "made by my_tasks.py:rows: 8 of each batch" in preparation.summary(config, data, "train")
    assert data.per_epoch == math.inf and "epochs" not in preparation.summary(config, data, "train")


def test_functions_and_files_share_a_batch_by_weight(desk):
    files = (
        f"{{path: {desk / 'train.jsonl'}, weight: 2}}, {{function: my_tasks.py:rows, weight: 1}}"
    )
    both = f"env.train_files=[{files}, {{function: my_tasks.py:rows, weight: 1, top: 3, server: reasoning_gym}}]"
    _, data = load(desk, both, "env.max_rows=4")
    names = [t.row_id for t in drawn(data, 5)]
    assert [name.partition("#")[0] for name in names[4:]] == ["my_tasks.py:rows"] * 2 + [
        "my_tasks.py:rows(2)"
    ] * 2
    assert {name.rpartition(":")[2] for name in names[:4]} == {
        "1",
        "2",
        "3",
        "4",
    }  # of max_rows, in turn
    assert data.per_epoch == 8  # prompts, of which half are the 4 rows of the file
    assert [t.row_id for t in drawn(data, 5)] == names
    _, data = load(desk, both, "env.sampler=templates/samplers.py:by_pass_rate")
    assert len(drawn(data, 5)) == 8


def test_a_sampler_beside_functions_gets_what_it_gets_alone(desk, tmp_path):
    """Of files its part of the batch, and all pass rates; functions get those of their rows, by number."""
    (tmp_path / "watch.py").write_text(WATCH)
    files = f"{{path: {desk / 'train.jsonl'}, weight: 1}}, {{function: watch.py:rows, weight: 1}}"
    _, data = load(desk, f"env.train_files=[{files}]", "env.sampler=watch.py:last")
    rates = {f"{desk / 'train.jsonl'}:1": 0.25, "watch.py:rows#4.0": 0.5}
    watch = sys.modules[data.sampler.keywords["sampler"].__module__]
    watch.seen.clear()
    picked = drawn(data, 5, size=6, seed=9, rates=rates)
    assert watch.seen == [("last", 3, 5, 9, rates), ("rows", 3, 5, 9, {4: {0: 0.5}})]
    assert [t.row_id.rpartition(":")[2] for t in picked] == [
        "6",
        "7",
        "8",
        "rows#5.0",
        "rows#5.1",
        "rows#5.2",
    ]


WATCH = """
seen = []

def last(tasks, size, batch, seed, pass_rates):
    seen.append(("last", size, batch, seed, dict(pass_rates)))
    return tasks[-size:]

def rows(batch, size, seed, pass_rates):
    seen.append(("rows", size, batch, seed, pass_rates))
    return [{"responses_create_params": {"input": f"say {k}"}, "answer": "7"} for k in range(size)]
"""


def test_verls_rows_may_be_made_and_rows_made_once(desk):
    config, data = load(desk, "env.train_files=[{function: my_tasks.py:verls}]")
    assert data.made[3].row == {"responses_create_params": {"input": "1 3"}, "data_source": "x"}
    config, _ = load(desk)
    made = [{"function": "my_tasks.py:verls"}]
    config.env.train_files, config.env.val_files = made, made
    with pytest.raises(
        ConfigError, match=r"my_tasks\.py:verls makes rows without end; set env\.max_rows"
    ):
        preparation.prepare(config, "rollout")
    config.env.max_rows, config.env.val_max_rows = 5, 3
    assert [t.row_id for t in preparation.prepare(config, "rollout").train][
        4
    ] == "my_tasks.py:verls#0.4"
    assert len(preparation.prepare(config, "evaluate").validation) == 3
    assert len(preparation.prepare(config, "train").validation) == 3


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (
            "{function: my_tasks.py:raises}",
            r"my_tasks\.py:raises failed at .*my_tasks\.py:16: ZeroDivisionError",
        ),
        (
            "{function: my_tasks.py:nothing}",
            "my_tasks.py:nothing returned None; it must return a list of 8",
        ),
        (
            "{function: my_tasks.py:few}",
            "my_tasks.py:few returned a list of 7; it must return a list of 8",
        ),
        (
            "{function: my_tasks.py:yields}",
            "my_tasks.py:yields returned <generator .*; it must return a list of 8",
        ),
        (
            "{function: my_tasks.py:no_rows}",
            "my_tasks.py:no_rows#1.7: a row must be a JSON object, this is a list",
        ),
        (
            "{function: my_tasks.py:twice}",
            "my_tasks.py:twice: rows 0 and 1 of batch 1 are one and the same object",
        ),
        (
            "{function: my_tasks.py:long}",
            r"my_tasks\.py:long#1\.0 \(100 tokens\): over data\.max_prompt_length",
        ),
        ("{function: my_tasks.py:other}", "my_tasks.py:other#1.0 is another when it is made again"),
        (
            "{function: my_tasks.py:rows, bottom: 1}",
            "my_tasks.py:rows cannot be called with .* unexpected keyword",
        ),
        ("{function: my_tasks.py:rows, weight: -1}", "a weight must be more than 0"),
        (
            "{function: my_tasks.py:rows, server: mcqa}",
            "rows#1.0: server 'mcqa' matches none of gym.servers",
        ),
        ("{function: my_tasks.py:gone}", "has no function gone"),
        ("{function: my_tasks.py:rows}, train.jsonl", "no share of a batch beside other rows"),
    ],
)
def test_what_a_function_does_wrong_is_one_line_before_anything_starts(desk, entry, told):
    entry = entry.replace("train.jsonl", str(desk / "train.jsonl"))
    with pytest.raises((PluginError, ConfigError, env.DataError), match=told) as raised:
        load(desk, f"env.train_files=[{entry}]")
    assert "\n" not in str(raised.value)


def test_what_goes_wrong_later_names_the_function(desk):
    _, data = load(desk, "env.train_files=[{function: my_tasks.py:late}]")
    with pytest.raises(
        PluginError, match=r"my_tasks\.py:late returned a list of 1; it must return a list of 8"
    ):
        drawn(data, 2)


def test_what_makes_no_sense_with_a_function_is_refused(desk):
    made = "env.train_files=[{function: my_tasks.py:rows}]"
    with pytest.raises(ConfigError, match=r"rows of a function in env\.train_files have no epochs"):
        load(desk, made, "trainer.total_epochs=2")
    with pytest.raises(ConfigError, match=r"env\.sampler picks rows of files"):
        load(desk, made, "env.sampler=templates/samplers.py:by_pass_rate")
    config, _ = load(desk)
    config.env.train_files = [{"function": "my_tasks.py:rows"}]
    assert "`sft` takes files" in str(next(preparation.check_files(config, "sft")))


def test_a_resumed_run_makes_the_same_rows_and_a_replay_has_them(desk, tmp_path):
    """The batches that follow a checkpoint are of its state alone; a rollouts file holds the rows that no file has."""
    files = (
        f"{{path: {desk / 'train.jsonl'}, weight: 1}}, {{function: my_tasks.py:rows, weight: 1}}"
    )
    config, data = load(desk, f"env.train_files=[{files}]", "env.val_files=[]")
    rates, batches, states = {}, [], []
    for batch in range(1, 5):
        states.append(json.loads(json.dumps(rates)))
        tasks = drawn(data, batch, rates=rates)
        batches.append([(t.row_id, t.row, t.prompt_ids) for t in tasks])
        episodes = [
            Episode(t.row_id, f"{batch}/{i}", t.server, t.prompt_ids, row=t.row)
            for i, t in enumerate(tasks)
        ]
        for i, e in enumerate(episodes):
            append(e, [5, 1], [-1.0, -2.0])
            e.reward = float(i % 4 > 0)
            e.output = [
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "7"}],
                }
            ]
            e.turns = [(0, 2, 1)]
        rates = rates | pass_rates(episodes, rates)
    _, again = load(desk, f"env.train_files=[{files}]", "env.val_files=[]")
    for batch in (3, 4):
        found = drawn(again, batch, rates=states[batch - 1])
        assert [(t.row_id, t.row, t.prompt_ids) for t in found] == batches[batch - 1]
    assert batches[3][-1][1]["responses_create_params"]["input"].endswith(
        "of 3"
    )  # the pass rates were told

    ended = Run(config)
    (ended.folder / "rollouts").mkdir(parents=True)
    ended.write_episodes("step_4", episodes[:6], data.train)
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


def test_a_row_without_gyms_field_is_verls_only_by_the_key_of_the_recipe():
    both = {"responses_create_params": {"input": "gym"}, "prompt": "verl", "asked": "other"}
    assert verl_rows.parse(both, "x:1")["responses_create_params"] == {"input": "gym"}
    assert verl_rows.parse({"prompt": "verl", "asked": "other"}, "x:1", "asked") == {
        "responses_create_params": {"input": "other"},
        "prompt": "verl",
    }


def test_verls_row_is_made_with_the_key_of_the_recipe():
    theirs = verl_rows.to_verl(
        verl_rows.parse({"asked": "2?", "data_source": "x", "prompt": 7}, "x:1", "asked"),
        "x:1",
        "asked",
    )
    assert theirs == {"asked": "2?", "data_source": "x", "prompt": 7}
    theirs = verl_rows.to_verl(
        row("2?", expected_answer="a", answer="b"), "x:1"
    )  # the first of the two is the truth
    assert theirs["reward_model"]["ground_truth"] == "a"


def test_quotas_name_who_gets_no_row():
    made = verl_rows.Made("t.py:rows", 0.01, "", "env.train_files", lambda *_: [])
    file = SimpleNamespace(file="a.jsonl", weight=1.0)
    with pytest.raises(
        env.DataError, match=r"t\.py:rows: weight=0.01 comes to no row in a batch of 8"
    ):
        verl_rows.shares([made], [file], 8)
    assert verl_rows.shares([made], [], 8) == {"t.py:rows": 8}
