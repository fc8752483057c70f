"""The commands of env.py: check row files, and convert other files to rows."""

from __future__ import annotations

import json
import re
import sys
import tempfile

import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from pyarrow import parquet

import env
from kit.data import verl_rows
from kit.data.tasks import match_server
from kit.data.verl_rows import read_rows
from lab import convert
from tests.helpers.recipes import GYM_PYTHON, ROOT, row, run, write_rows

# Otherwise Hypothesis writes its files into the repository.
set_hypothesis_home_dir(f"{tempfile.gettempdir()}/hypothesis")
HYPOTHESIS_SETTINGS = settings(max_examples=100, derandomize=True, deadline=None)


def make_gsm8k_row(i: int, **changes) -> dict:
    """Make a row as verl's examples/data_preprocess/gsm8k.py does."""
    gsm8k_row = {
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
    return gsm8k_row | changes


def run_command(*arguments, cwd=ROOT, **variables):
    """Run `python env.py` with these arguments and environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        command = [sys.executable, str(ROOT / "env.py"), *map(str, arguments)]
        return run(command, cwd=cwd, timeout=60)


def run_in_process(monkeypatch, capsys, *arguments) -> tuple[int, str]:
    """Run a command of env.py in this process. Return its exit status, and its output or error."""
    monkeypatch.setattr(sys, "argv", ["env.py", *map(str, arguments)])
    try:
        convert.main()
    except SystemExit as error:
        if isinstance(error.code, int):
            return error.code, ""
        return 1, str(error.code)
    return 0, capsys.readouterr().out


# --- check ----------------------------------------------------------------------------------------


def make_row_with_content(kind: str) -> dict:
    """Make a row whose message has one content part of this type."""
    message = {"role": "user", "content": [{"type": kind}]}
    return {"responses_create_params": {"input": [message]}}


def test_check_counts_the_rows_and_names_the_first_line_of_each_problem(tmp_path):
    audio = make_row_with_content("input_audio")
    good = write_rows(tmp_path / "good.jsonl", [row(), audio, row(), audio])
    done = run_command("check", good)
    reason = "is not supported here, only text. Remove such rows."
    text = f"{good}: 2 rows load, 2 refused\n    2 x input_audio {reason} (first {good}:2)\n"
    assert (done.returncode, done.stdout) == (0, text), done.stderr

    bad = tmp_path / "bad.jsonl"
    bad.write_text("{oops\n" + "".join(f"{json.dumps(r)}\n" for r in ({"question": "x"}, row())))
    done = run_command("check", bad, tmp_path / "nowhere.jsonl", good)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[0] == f"{bad}: 1 rows load, 0 refused"
    assert lines[1].startswith(f"    error: {bad}:1: not JSON")
    assert lines[2].startswith(f"    error: {bad}:2: it has question")
    assert lines[4].startswith(f"    error: {tmp_path}/nowhere.jsonl: no such file")
    assert "\n".join(lines[5:]) + "\n" == text
    assert run_command("check").returncode == 2


# --- examples of nemo-gym -------------------------------------------------------------------------


def test_examples_writes_the_rows_that_gym_ships_with_a_server(tmp_path):
    done = run_command("examples", "--server", "mcqa", "--out", tmp_path, "--python", GYM_PYTHON)
    output = f"{tmp_path}/mcqa_examples.jsonl: 10 rows\n"
    assert (done.returncode, done.stdout) == (0, output), done.stderr
    written = [example for _, example in read_rows(tmp_path / "mcqa_examples.jsonl")]
    reference = {"type": "responses_api_agents", "name": "mcqa_simple_agent"}
    assert len(written) == 10 and all(example["agent_ref"] == reference for example in written)
    servers = {"mcqa": "mcqa", "math": "math"}
    assert all(match_server(example, servers) == "mcqa" for example in written)

    with pytest.raises(env.DataError, match=r"mcqb/data: no example\*\.jsonl.* mcqa,"):
        list(convert.read_examples("mcqb", str(GYM_PYTHON)))


# --- rows of Gym and verl -------------------------------------------------------------------------


# Strategies of Hypothesis: each draws one kind of value.
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
)


def nest(values):
    """Return a strategy for lists and dictionaries of these values."""
    return st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3)


JSON_VALUES = st.recursive(SCALARS | TEXTS, nest)
JSON_OBJECTS = st.dictionaries(TEXTS, JSON_VALUES, max_size=3)
ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGES = st.fixed_dictionaries({"role": ROLES, "content": TEXTS})
VERL_PROMPTS = TEXTS.filter(bool) | st.lists(MESSAGES, min_size=1, max_size=3)
VERL_ROWS = st.fixed_dictionaries(
    {"data_source": TEXTS, "prompt": VERL_PROMPTS},
    optional={
        "reward_model": JSON_OBJECTS,
        "extra_info": JSON_OBJECTS | st.none(),
        "ability": TEXTS,
        "other": JSON_VALUES,
    },
)
GYM_INPUTS = TEXTS.filter(bool) | st.lists(MESSAGES, min_size=1, max_size=3)
GYM_PARAMETERS = st.fixed_dictionaries(
    {"input": GYM_INPUTS}, optional={"temperature": st.just(0.5)}
)
AGENT_REFERENCE = {"type": "responses_api_agents", "name": "mcqa_simple_agent"}
GYM_ROWS = st.fixed_dictionaries(
    {"responses_create_params": GYM_PARAMETERS},
    optional={
        "agent_ref": st.just(AGENT_REFERENCE),
        "answer": JSON_VALUES,
        "extra_info": JSON_OBJECTS,
        "reward_model": JSON_OBJECTS,
        "data_source": JSON_VALUES,
        "prompt": JSON_VALUES,
    },
)


def to_json(value) -> str:
    """Return JSON, in which 1, 1.0 and true differ, although they are equal in Python."""
    return json.dumps(value, sort_keys=True)


@HYPOTHESIS_SETTINGS
@given(VERL_ROWS)
def test_a_row_of_verl_is_the_same_after_both_conversions(verl_row):
    gym_row = verl_rows.parse_row(verl_row, "x:1")
    names = {*verl_row, "responses_create_params"}
    assert names - gym_row.keys() == {"prompt"}
    assert to_json(convert.to_verl(gym_row, "x:1")) == to_json(verl_row)


@HYPOTHESIS_SETTINGS
@given(GYM_ROWS)
def test_a_gym_row_is_the_same_after_both_conversions(gym_row):
    try:
        verl_row = convert.to_verl(gym_row, "x:1")
    except env.UnsupportedRowError as error:
        # An empty message of the assistant is dropped, so no message may remain.
        assert "verl's rows have a prompt" in str(error)
        return
    assert {"prompt", "data_source"} <= verl_row.keys() or "reward_model" in verl_row
    assert to_json(verl_rows.parse_row(verl_row, "x:1")) == to_json(gym_row)


def test_rows_that_parquet_would_change_are_refused(tmp_path):
    """A column has one type, and each row gets the keys of all rows."""
    path = tmp_path / "verl.parquet"
    for change in ({"another": 1}, {"extra_info": {"index": 1.5}}):
        with pytest.raises(env.DataError, match="Parquet would change these rows"):
            convert.write_verl(path, [make_gsm8k_row(0), make_gsm8k_row(1, **change)])
    assert not list(tmp_path.iterdir())


def test_the_commands_convert_files_of_verl_to_gym_and_back(tmp_path):
    rows = [make_gsm8k_row(i) for i in range(3)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    done = run_command("from-verl", tmp_path / "train.parquet", "--out", tmp_path / "gym")
    output = f"{tmp_path}/gym/train.jsonl: 3 rows\n"
    assert (done.returncode, done.stdout) == (0, output), done.stderr
    done = run_command("to-verl", tmp_path / "gym" / "train.jsonl", "--out", tmp_path / "verl")
    output = f"{tmp_path}/verl/train.parquet: 3 rows\n"
    assert (done.returncode, done.stdout) == (0, output), done.stderr
    assert parquet.read_table(tmp_path / "verl" / "train.parquet").to_pylist() == rows
    done = run_command("check", tmp_path / "train.parquet", tmp_path / "gym" / "train.jsonl")
    assert done.returncode == 0 and done.stdout.count("3 rows load, 0 refused") == 2


TOOL = {"type": "function", "name": "f", "parameters": {}}


def test_a_gym_row_gets_the_fields_of_verls_reward_functions():
    gym_row = row("2?", answer=7, agent_ref={"name": "mcqa_simple_agent"})
    verl_row = convert.to_verl(gym_row, "x:1")
    prompt = [{"role": "user", "content": "2?"}]
    assert verl_row["data_source"] == "mcqa" and verl_row["prompt"] == prompt
    assert verl_row["reward_model"] == {"style": "rule", "ground_truth": "7"}
    for params in ({"input": []}, {"input": "x", "tools": [TOOL]}):
        with pytest.raises(env.UnsupportedRowError, match="x:1: verl's rows have a prompt without"):
            convert.to_verl({"responses_create_params": params}, "x:1")


def test_nothing_is_written_unless_all_rows_are_valid(tmp_path, monkeypatch, capsys):
    rows = [make_gsm8k_row(0), make_gsm8k_row(1, prompt=None)]
    path = write_rows(tmp_path / "bad.jsonl", rows)
    out = tmp_path / "out"
    out.mkdir()
    (out / "bad.jsonl").write_text("as it was")
    pattern = rf"error: {tmp_path}/(bad\.jsonl:2|none\.jsonl): [^\n]+"
    commands = [["from-verl", path], ["to-verl", path], ["to-verl", tmp_path / "none.jsonl"]]
    for arguments in commands:
        status, error = run_in_process(monkeypatch, capsys, *arguments, "--out", out)
        assert status == 1 and re.fullmatch(pattern, error)
    assert (out / "bad.jsonl").read_text() == "as it was" and len(list(out.iterdir())) == 1
    status, error = run_in_process(monkeypatch, capsys, "from-verl", path, "--out", tmp_path)
    assert status == 1 and "bad.jsonl: the command would overwrite an input" in error
    arguments = ["from-verl", path, "elsewhere/bad.json", "--out", out]
    status, error = run_in_process(monkeypatch, capsys, *arguments)
    assert status == 1 and "or write two files there" in error


# --- any table ------------------------------------------------------------------------------------


MAP_FUNCTIONS = """
def row(entry):
    truth = {"ground_truth": str(entry["answer"])}
    return {"prompt": entry["question"], "data_source": "trivia", "reward_model": truth}

def nothing(entry):
    return None if entry["answer"] == "2" else row(entry)

def raises(entry):
    return entry["wrong"]
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A folder with MAP_FUNCTIONS, and a table of two rows as CSV and Parquet."""
    folder = tmp_path_factory.mktemp("table")
    (folder / "my_map.py").write_text(MAP_FUNCTIONS)
    frame = pandas.DataFrame({"question": ["one?", 'two, "2"?\nor'], "answer": [1, 2]})
    frame.to_csv(folder / "t.csv", index=False)
    frame.to_parquet(folder / "t.parquet")
    return folder


def test_a_table_becomes_rows_by_a_function(table, monkeypatch, capsys):
    monkeypatch.chdir(table)
    for name in ("t.csv", "t.parquet"):
        arguments = ["from", "--data", name, "--map", "my_map.py:row", "--out", "out"]
        result = run_in_process(monkeypatch, capsys, *arguments)
        assert result == (0, "out/t.jsonl: 2 rows\n"), name
        rows = [converted for _, converted in read_rows("out/t.jsonl")]
        prompts = [converted["responses_create_params"]["input"] for converted in rows]
        assert prompts == ["one?", 'two, "2"?\nor']
        assert [converted["reward_model"]["ground_truth"] for converted in rows] == ["1", "2"]


@pytest.mark.parametrize(
    ("data", "function", "message"),
    [
        ("t.csv", "raises", r"t\.csv:1: --map=my_map\.py:raises failed at .*KeyError: 'wrong'"),
        ("t.csv", "nothing", r"t\.csv:2: --map=my_map\.py:nothing returned None\. Return a row"),
        ("none.csv", "row", "none.csv: no such file"),
        ("torn.parquet", "row", "torn.parquet: cannot be read "),
    ],
)
def test_an_error_of_a_map_or_a_table_is_one_line(
    table, monkeypatch, capsys, data, function, message
):
    monkeypatch.chdir(table)
    (table / "torn.parquet").write_bytes((table / "t.parquet").read_bytes()[:200])
    arguments = ["from", "--data", data, "--map", f"my_map.py:{function}", "--out", "nowhere"]
    status, error = run_in_process(monkeypatch, capsys, *arguments)
    assert status == 1 and re.fullmatch(f"error: {message}[^\n]*", error), error
    assert not (table / "nowhere").exists() or not list((table / "nowhere").iterdir())
