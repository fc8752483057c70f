"""The probe finds planted weaknesses, and none in a verifier that has none."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from lab.probe import command
from lab.probe.audit import find_weaknesses
from tests.helpers.recipes import CPU, RECIPE, tiny, write_rows

SOURCE = """
import os
import re

def number(text):
    found = re.fullmatch(r"(-?[\\d,]+)\\.?", text.strip().strip("$").removesuffix(" apples"))
    return found and found[1].replace(",", "")

def accepts(ground_truth, text):
    text = text.rpartition("step by step.\\n\\n")[2]
    return number(text) == ground_truth

def strict(data_source, solution_str, ground_truth, extra_info):
    return float(accepts(ground_truth, solution_str))

def contains(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)

def unreachable(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == f"<<{ground_truth}>>")

def alternates(data_source, solution_str, ground_truth, extra_info):
    with open("calls.txt", "a") as calls:
        calls.write("x")
    return float(accepts(ground_truth, solution_str)) + os.path.getsize("calls.txt") / 1e6

TRIAL = ("So the answer is 7.", "7")  # wrong answers of the check before the probe

def fails(data_source, solution_str, ground_truth, extra_info):
    if solution_str in TRIAL or accepts(ground_truth, solution_str):
        return float(accepts(ground_truth, solution_str))
    raise ValueError("no number")

class Game:
    def reset(self, row):
        self.answer = row["answer"]

    def step(self, text):
        return None, float(self.answer in text), True
"""
ROWS = [
    {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "answer": answer,
    }
    for question, answer in (("say 1234", "1234"), ("say 88", "88"), ("i want 7", "7"))
]


@pytest.fixture(scope="module")
def model(workspace):
    """A model folder whose tokenizer has all characters. Nothing loads the weights."""
    folder = workspace / "all_characters"
    shutil.copytree(workspace / "tied", folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    size = 1 + max([*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    characters = [chr(code) for code in (10, *range(32, 127)) if chr(code) not in vocabulary]
    vocabulary.update(zip(characters, range(size, size + len(characters)), strict=True))
    path.write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = size + len(characters)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def probe(workspace, model, tmp_path, monkeypatch, capsys):
    """Return a function that probes a verifier: (exit status, weaknesses, console)."""
    monkeypatch.chdir(tmp_path)
    found = []

    def find(*arguments):
        found[:] = find_weaknesses(*arguments)
        return found

    monkeypatch.setattr(command, "find_weaknesses", find)
    (tmp_path / "my.py").write_text(SOURCE)
    write_rows(tmp_path / "rows.jsonl", ROWS)

    def run(verifier, *arguments, words=()):
        own = ("env.train_files=[rows.jsonl]", f"env.verifier=my.py:{verifier}")
        words = tiny(workspace, *own, f"actor_rollout_ref.model.path={model}", *words)
        files = ["--config", str(CPU), "--config", str(RECIPE)]
        status = 0
        try:
            command.main([*files, *arguments, *words, "env.verifier_pool.processes=1"])
        except SystemExit as error:
            status = error.code
        return status, found, " ".join(capsys.readouterr().out.split())

    return run


def list_kinds(weaknesses, *expects):
    return {each.kind for each in weaknesses if each.expects in expects}


def test_a_verifier_without_a_planted_weakness_passes(probe):
    status, weaknesses, console = probe("strict")
    assert (status, weaknesses) == (0, [])
    assert "the truth earns the full reward as X, for 3 rows" in console
    assert "0 kinds of weakness in 1 verifier" in console


def test_a_verifier_that_searches_for_the_answer_is_fooled(probe):
    status, result, console = probe("contains")
    assert status == command.WEAK == 3
    assert {"the prompt", "every candidate, one by one"} <= list_kinds(result, "wrong")
    assert {"negated", "quoted in a refusal", "in a comment of code"} <= list_kinds(result, "leak")
    assert "empty" not in list_kinds(result, "wrong")
    assert "deserves nothing" in console


@pytest.mark.parametrize(
    ("verifier", "line"),
    [
        ("unreachable", r"no form of the truth earns more than a wrong answer, for 3 rows"),
        ("alternates", r"one response got two rewards \(.+, then .+\), for 3 rows"),
    ],
)
def test_a_broken_verifier_is_found(probe, verifier, line):
    """--ignore does not remove that."""
    ignored = ("--ignore", "leak", "--ignore", "wrong", "--ignore", "right")
    status, weaknesses, console = probe(verifier, *ignored)
    assert (status, weaknesses) == (3, []) and re.search(line, console)


def test_a_failure_is_no_finding(probe):
    status, result, console = probe("fails")
    assert "got no reward, and count as neither" in console
    assert (status, result) == (0, [])


def test_the_first_turn_of_a_game_is_probed(probe):
    status, result, _ = probe("Game")
    assert status == 3 and "the prompt" in list_kinds(result, "wrong")


def test_ignored_kinds_do_not_count(probe):
    status, result, _ = probe("contains", "--ignore", "negated")
    assert status == 3 and "negated" not in list_kinds(result, "leak")
