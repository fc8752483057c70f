"""The commands of env.py that check row files and make them from others."""

from __future__ import annotations

import json
import re
import sys
import tempfile

import pandas
import pytest
from conftest import GYM_PYTHON, ROOT, row, run, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from pyarrow import parquet

import env
from kit.data import verl_rows
from kit.data.tasks import match_server
from kit.data.verl_rows import read_rows
from kit.extras import convert

set_hypothesis_home_dir(f"{tempfile.gettempdir()}/hypothesis")  # not into the repository


often = settings(max_examples=100, derandomize=True, deadline=None)


def gsm8k(i: int, **changes) -> dict:
    """Make a row as verl's examples/data_preprocess/gsm8k.py does."""
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


def command(*words, cwd=ROOT, **variables):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        return run([sys.executable, str(ROOT / "env.py"), *map(str, words)], cwd=cwd, timeout=60)


def written(monkeypatch, capsys, *words) -> tuple[int, str]:
    """Run a command in this process -> (exit status, its output or error)."""
    monkeypatch.setattr(sys, "argv", ["env.py", *map(str, words)])
    try:
        convert.main()
    except SystemExit as end:
        return (end.code, "") if isinstance(end.code, int) else (1, str(end.code))
    return 0, capsys.readouterr().out


# --- check ----------------------------------------------------------------------------------------


def test_check_counts_and_names(tmp_path):
    def picture(kind):
        return {
            "responses_create_params": {"input": [{"role": "user", "content": [{"type": kind}]}]}
        }

    good = write_rows(
        tmp_path / "good.jsonl", [row(), picture("input_audio"), row(), picture("input_audio")]
    )
    done = command("check", good)
    reason = "is not supported here, only text. Remove such rows."
    text = f"{good}: 2 rows load, 2 refused\n    2 x input_audio {reason} (first {good}:2)\n"
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
    assert lines[1] == f"    1 x input_file {reason} (first {bad}:3)"
    assert lines[2].startswith(f"    error: {bad}:1: not JSON")
    assert lines[3].startswith(
        f"    error: {bad}:2: it has question, but neither Gym's responses_create_params "
        "nor verl's `prompt`"
    )
    assert lines[5].startswith(f"    error: {tmp_path}/nowhere.jsonl: no such file")
    assert "\n".join(lines[6:]) + "\n" == text
    assert command("check").returncode == 2


def test_check_continues_after_an_unexpected_exception(tmp_path, monkeypatch, capsys):
    file = write_rows(tmp_path / "rows.jsonl", [row("a"), row("b")])
    render = env.render_row

    def broken(given, where):
        return {}["gap"] if where.endswith(":1") else render(given, where)

    monkeypatch.setattr(env, "render_row", broken)
    assert not convert.check(str(file))
    assert (
        capsys.readouterr().out
        == f"{file}: 1 rows load, 0 refused\n    error: {file}:1: KeyError('gap')\n"
    )


# --- examples of nemo-gym -------------------------------------------------------------------------


def test_examples_of_a_server(tmp_path):
    done = command("examples", "--server", "mcqa", "--out", tmp_path, "--python", GYM_PYTHON)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/mcqa_examples.jsonl: 10 rows\n"), (
        done.stderr
    )
    written = [r for _, r in read_rows(tmp_path / "mcqa_examples.jsonl")]
    shipped = GYM_PYTHON.parent.parent.glob(
        "lib/*/site-packages/resources_servers/mcqa/data/*example*.jsonl"
    )
    rows = [
        r
        for path in sorted(shipped)
        if "rollouts" not in path.name
        for _, r in read_rows(str(path))
    ]
    reference = {"type": "responses_api_agents", "name": "mcqa_simple_agent"}
    assert written == [{"agent_ref": reference} | r for r in rows]
    assert all(match_server(r, {"mcqa": "mcqa", "math": "math"}) == "mcqa" for r in written)

    own = list(convert.read_examples("blackjack", str(GYM_PYTHON)))
    assert own[0]["agent_ref"]["name"] == "blackjack_gymnasium_agent"
    assert len(own) == 5 and own[0] == own[1]  # two rows of the game are equal
    twice = list(
        convert.read_examples("structured_outputs", str(GYM_PYTHON))
    )  # its v4 rows are in two files
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
        failed.returncode == 1
        and f"--python {tmp_path}/python cannot import nemo_gym" in failed.stderr
    )
    assert command("examples", "--out", tmp_path).returncode == 2


# --- rows of Gym and verl -------------------------------------------------------------------------


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
    return json.dumps(found, sort_keys=True)  # 1, 1.0 and true differ


@often
@given(verls_rows)
def test_a_row_of_verl_is_the_same_after_both_conversions(theirs):
    ours = verl_rows.parse_row(theirs, "x:1")
    assert {
        **theirs,
        "responses_create_params": ours["responses_create_params"],
    }.keys() - ours.keys() == {"prompt"}
    assert text_of(convert.to_verl(ours, "x:1")) == text_of(theirs)


@often
@given(gym_rows)
def test_a_gym_row_is_the_same_after_both_conversions(ours):
    try:
        theirs = convert.to_verl(ours, "x:1")
    except (
        env.UnsupportedRowError
    ) as why:  # an empty message of the assistant is dropped, so there may be none
        assert "its environment writes the prompt" in str(why)
        return
    assert {"prompt", "data_source"} <= theirs.keys() or "reward_model" in theirs
    assert text_of(verl_rows.parse_row(theirs, "x:1")) == text_of(ours)


@settings(often, max_examples=25)
@given(st.lists(verls_rows, max_size=3), st.lists(gym_rows, max_size=3))
def test_files_are_the_same_after_both_conversions(tmp_path_factory, verls, gyms):
    """For any values: if parquet would change the rows, they are written as JSON."""
    folder = tmp_path_factory.getbasetemp()
    theirs = convert.write_verl(folder / "verl.parquet", verls, "prompt")
    env.write_rows(folder / "gym.jsonl", convert.read_supported_rows(str(theirs), "prompt"))
    back = [
        convert.to_verl(r, where) for where, r in verl_rows.read_rows(str(folder / "gym.jsonl"))
    ]
    assert text_of(back) == text_of(verls)
    gyms = [r for r in gyms if env.render_row(r, "x:1")[0]]
    made = convert.write_verl(
        folder / "made.parquet", [convert.to_verl(r, "x:1") for r in gyms], "prompt"
    )
    assert text_of([r for _, r in verl_rows.read_rows(str(made))]) == text_of(gyms)
    assert not list(folder.glob("*.part*"))


def test_the_commands_convert_files_of_verl_to_gym_and_back(tmp_path):
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


TOOL = {"type": "function", "name": "f", "parameters": {}}


def test_a_gym_row_gets_the_fields_of_verls_reward_functions():
    theirs = convert.to_verl(row("2?", answer=7, agent_ref={"name": "mcqa_simple_agent"}), "x:1")
    assert theirs["data_source"] == "mcqa" and theirs["prompt"] == [
        {"role": "user", "content": "2?"}
    ]
    assert theirs["reward_model"] == {"style": "rule", "ground_truth": "7"}
    for params, why in (
        ({"input": []}, "its environment writes"),
        ({"input": "x", "tools": [TOOL]}, "verl's rows have no tools"),
    ):
        with pytest.raises(env.UnsupportedRowError, match=f"x:1: {why}"):
            convert.to_verl({"responses_create_params": params}, "x:1")


@pytest.mark.parametrize(
    ("keys", "truth"),
    [
        ({"expected_answer": "right", "answer": "a whole solution"}, "right"),
        ({"expected_answer": None, "answer": "right"}, "right"),
        ({"answer": "right"}, "right"),
    ],
)
def test_expected_answer_has_priority_over_answer(keys, truth):
    gym_row = {key: value for key, value in row("2?").items() if key != "answer"} | keys
    assert convert.to_verl(gym_row, "x:1")["reward_model"]["ground_truth"] == truth


def test_rows_of_verl_use_the_prompt_key_of_the_recipe():
    theirs = convert.to_verl(
        verl_rows.parse_row({"asked": "2?", "data_source": "x", "prompt": 7}, "x:1", "asked"),
        "x:1",
        "asked",
    )
    assert theirs == {"asked": "2?", "data_source": "x", "prompt": 7}
    theirs = convert.to_verl(
        row("2?", expected_answer="a", answer="b"), "x:1"
    )  # the ground truth is the first of the two
    assert theirs["reward_model"]["ground_truth"] == "a"


def test_nothing_is_written_unless_all_rows_are_valid(tmp_path, monkeypatch, capsys):
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
    assert status == 1 and "bad.jsonl: the command would overwrite its input" in why
    status, why = written(
        monkeypatch, capsys, "from-verl", path, "elsewhere/bad.json", "--out", tmp_path / "out"
    )
    assert status == 1 and "more than one of the files would be written there" in why


# --- any table ------------------------------------------------------------------------------------


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
        found = [r for _, r in read_rows("out/t.jsonl")]
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
            r"t\.csv:2: --map=my_map\.py:nothing returned None\. Return a row",
        ),
        ("t.csv", "my_map.py:no_row", "t.csv:1: it has question, but neither Gym's"),
        (
            "t.csv",
            "my_map.py:other",
            r"--map=my_map\.py:other: .* has no function other\. It has no_row, nothing",
        ),
        ("t.csv", "other.py:row", "--map=other.py:row: no file other.py in the current folder"),
        ("none.csv", "my_map.py:row", "none.csv: no such file"),
        ("my_map.py", "my_map.py:row", "my_map.py: this is no known table"),
        ("torn.parquet", "my_map.py:row", "torn.parquet: cannot be read after row 0"),
    ],
)
def test_an_error_of_a_map_or_a_table_is_one_line(table, monkeypatch, capsys, data, function, told):
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
    assert failed.returncode == 1 and "set --data to its file" in failed.stderr
    assert re.fullmatch(
        r"error: openai/gsm8k: no such file, and it cannot be loaded from the hub \([^\n]+\n",
        failed.stderr,
    )
