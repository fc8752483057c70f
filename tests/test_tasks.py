"""The small tasks of configs/tasks: what earns a reward, and that no prompt is in two files."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys

import pandas as pd
import pytest
from verl.utils.reward_score import default_compute_score

from configs.tasks import judged, rows
from configs.tasks.game import Guess
from tests.helpers.recipes import ROOT

SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the files of configs/tasks/rows.py."""
    folder = tmp_path_factory.mktemp("tasks")
    command = [sys.executable, "configs/tasks/rows.py", *rows.TASKS, "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def read(folder, name: str) -> list[dict]:
    path = folder / f"{name}.jsonl"
    if path.is_file():
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pd.read_parquet(path.with_suffix(".parquet")).to_dict("records")


@pytest.mark.parametrize("name", ["people", "instructions", "apples", "increment"])
def test_no_prompt_is_in_two_files(folder, name):
    prompts = []
    for split in SPLITS:
        for row in read(folder, f"{name}_{split}"):
            chat = row["prompt"] if name == "apples" else row["responses_create_params"]["input"]
            prompts.append(chat[-1]["content"])
    for row in read(folder, f"{name}_warm"):
        prompts.append(row["messages"][-2]["content"] if "messages" in row else row["prompt"])
    assert len(set(prompts)) == len(prompts) > 450


def test_a_sentence_earns_a_reward_if_it_follows_the_rule(folder):
    for row in read(folder, "instructions_train"):
        prompt = row["responses_create_params"]["input"][0]["content"]
        [rule] = [rule for text, rule in rows.RULES.items() if text in prompt]
        word, topic = re.match(r"Write one sentence about (\w+) (\w+)\.", prompt).groups()
        [pattern] = row["verifier"]["verify_regex"]
        sentence = f"I like {word} {topic}."
        assert not re.search(pattern, sentence)
        assert re.search(pattern, rule.apply(sentence)), prompt


def test_verls_function_scores_the_answers_of_apples(folder):
    for row, chat in rows.apples():
        truth = row["reward_model"]["ground_truth"]
        arguments = (row["data_source"], chat["response"], truth)
        assert default_compute_score(*arguments) == 1
        assert default_compute_score(row["data_source"], truth, truth) == 0  # without ####


def test_a_game_answers_guesses_and_ends_after_three():
    game = Guess()
    game.reset({"number": 5})
    assert game.step("I guess 5") == ("Answer only with a number.", 0.0, False)
    assert game.step("9") == ("My number is smaller.", 0.0, False)
    assert game.step("4.") == (None, 0.0, True)  # the third guess
    game.reset({"number": 5})
    assert game.step("4") == ("My number is larger.", 0.0, False)
    assert game.step(" 5\n") == (None, 1.0, True)


def test_the_warm_up_of_increment_shows_the_right_call(folder):
    assert [rows.spell(n) for n in (100, 419)] == ["one hundred", "four hundred nineteen"]
    for row in read(folder, "increment_warm"):
        *_, question, answer = row["messages"]
        call = answer["tool_calls"][0]["function"]
        words = rows.spell(call["arguments"]["count"])
        assert question["content"] == f"Add {words} to the counter."
        assert call["name"] == row["tools"][0]["function"]["name"]


def test_the_verdicts_of_the_judge_are_right():
    rng = random.Random(0)
    verdicts = []
    for _ in range(300):
        a = rng.choice(judged.NUMBERS)
        b = rng.choice(judged.NUMBERS)
        chat = judged.make_judge_row("{question}|{expected_answer}|{generated_answer}", a, b, rng)
        answer = chat["prompt"].split("|")[-1]
        numbers, verdict = chat["response"].split(": ")
        total, said = numbers.split(", ")
        assert total == str(a + b)
        assert verdict == ("CORRECT" if said == total else "INCORRECT")
        if said == "none":
            assert judged.score("", answer, total, {}) == 0, answer
        else:
            assert judged.score("", answer, said, {}) == 1, answer
        verdicts.append(verdict)
    assert 100 < verdicts.count("CORRECT") < 200
