"""Tests that the examples of the guides do what their text says.

tests/test_docs.py runs the code blocks of all pages.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

import env
import gym_client
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import to_record, write_record
from kit.data.verl_rows import read_rows
from kit.gym import network
from tests.helpers.http import StubJudge
from tests.helpers.pages import (
    EXAMPLES,
    GUIDES,
    dry_run,
    find_python_block,
    list_commands,
    make_clone,
    read_shown_files,
)
from tests.helpers.recipes import GYM_PYTHON, row, run

VALID_MESSAGE = "dry run: model, files, sizes and servers are valid"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone with the demo's rows, the server of a guide, and the rows of a guide's task."""
    folder = tmp_path_factory.mktemp("clone")
    make_clone(folder)
    for name in ("two_routes.py", "make_plus.py"):
        (folder / name).write_text((EXAMPLES / name).read_text())
    for words in (["env.py", "arithmetic"], ["make_plus.py"]):
        done = run([sys.executable, *words], folder)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return folder


def test_the_guides_task_shares_no_number_between_training_and_validation(clone):
    train = [r for _, r in read_rows(clone / "data" / "plus_train.jsonl")]
    validation = [r for _, r in read_rows(clone / "data" / "plus_validation.jsonl")]
    assert (len(train), len(validation)) == (112, 64)
    for example in (*train, *validation):
        number, added, total = find_numbers(example["answer"])
        assert added in (1, 10) and total == number + added
        messages, _ = env.render_row(example, "x:1")
        assert messages[-1] == {"role": "user", "content": example["question"]}
    trained = {find_numbers(example["question"])[0] for example in train}
    assert not trained & {find_numbers(example["question"])[0] for example in validation}


def find_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_the_server_of_the_verifier_guide_works(clone, monkeypatch, capsys):
    """The guide's command starts it on a free port. It verifies responses, and a run accepts it."""
    serve, train = list_commands(GUIDES / "verifier.md", "needs a server")
    port = str(network.find_free_port())
    command = [word.replace("8001", port) for word in serve]
    assert command[0] == "uvicorn" and port in command
    with (clone / "uvicorn.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=clone, stdout=log, stderr=log
        )
    urls = {"mine": f"http://127.0.0.1:{port}"}

    async def verify(text):
        async with (
            gym_client.Gym(urls) as gym,
            gym.session("mine", row(answer="3 + 4 = 7")) as session,
        ):
            return (await session.verify(gym_client.message_response(text))).reward

    try:
        network.wait_ready("mine", urls["mine"], server, clone / "uvicorn.log")
        rewards = [asyncio.run(verify(text)) for text in ("It is 7", "It is 8", "")]
        assert rewards == [1.0, 0.0, 0.0]
        dry_run([word.replace("8001", port) for word in train[2:]], clone, monkeypatch)
        assert VALID_MESSAGE in capsys.readouterr().out
    finally:
        server.kill()
        server.wait()


def test_the_commands_of_the_judge_guide_work(clone, monkeypatch, capsys):
    """The dry run asks the judge for its model. A stub replaces Ollama."""
    judge = StubJudge()
    rows, _, train = list_commands(GUIDES / "judges.md", "needs a judge")
    assert run([sys.executable, "env.py", *rows[2:]], clone).returncode == 0
    words = [
        word.replace("http://127.0.0.1:11434/v1", judge.url).replace("qwen3:4b", "stub")
        for word in train[2:]
    ]
    assert f"gym.judges.judge_model.base_url={judge.url}" in words
    dry_run(words, clone, monkeypatch)
    assert VALID_MESSAGE in capsys.readouterr().out


def test_the_commands_of_the_guide_use_all_custom_functions():
    page = GUIDES / "functions.md"
    functions = re.findall(r"^def (\w+)\(", read_shown_files(page)["my_functions.py"], re.MULTILINE)
    used = set()
    for words in list_commands(page, ""):
        used.update(re.findall(r"my_functions\.py:(\w+)", " ".join(words)))
    assert len(functions) == 4 and set(functions) == used


def write_records(path: Path) -> Path:
    """Write episodes as a run does: two of one row, and three of another, of which one failed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        for task in range(2):
            question = row(f"say {task}", agent_ref={"name": "reasoning_gym_simple_agent"})
            for k in range(2 + task):
                episode = Episode(
                    f"rows.jsonl:{task + 1}", f"1/{task}", "reasoning_gym", [5, 6], row=question
                )
                episode.output.append(gym_client.message(f"the answer is {k}"))
                append_tokens(episode, [7, 8], [-0.5, -0.25])
                episode.reward = float(k)
                episode.ended = "stop"
                episode.timings = {"verify": 0.1}
                if k == 2:
                    episode.status = "timeout"
                    episode.reward = None
                    episode.error = "no answer within 1 s"
                write_record(out, to_record(episode, task, k))
    return path


def test_pandas_and_gym_can_read_the_records_of_a_run(clone, monkeypatch, capsys):
    """The guide reads them with pandas. Gym's RewardProfiler reads them as inputs and results."""
    block = find_python_block(GUIDES / "inspect_and_evaluate.md", "import pandas")
    path = write_records(clone / re.findall(r'"(runs/\S+\.jsonl)"', block)[0])
    monkeypatch.chdir(clone)
    exec(compile(block, "inspect_and_evaluate.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "say 1" in shown and "the answer is 1" in shown and "timeout" in shown
    code = (
        "import json, sys; from nemo_gym.reward_profile import RewardProfiler\n"
        "rows = [json.loads(line) for line in open(sys.argv[1])]\n"
        "groups, agents, *_ = RewardProfiler().profile_from_data(rows, rows)\n"
        "print(len(groups), agents[0]['mean/reward'], agents[0]['agent_ref']['name'])"
    )
    done = run([str(GYM_PYTHON), "-c", code, str(path)], clone)
    assert done.stdout.split() == ["2", "0.5", "reasoning_gym_simple_agent"], done.stderr
