"""The examples of guides do what the guides say. tests/test_docs.py runs all blocks in order."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GYM_PYTHON, ROOT, row, run
from judge_doubles import StubJudge
from markdown_blocks import (
    EXAMPLES,
    GUIDES,
    all_commands,
    dry_run,
    files_shown,
    furnish,
    python_block,
)

import env
import gym_client
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import open_records, to_record, write_record
from kit.data.verl_rows import read_rows
from kit.gym import network

VALID = "dry run: model, files, sizes and servers are valid"


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A clone with the demo's rows, the server of a guide, and the rows of a guide's task."""
    folder = tmp_path_factory.mktemp("desk")
    furnish(folder)
    for name in ("two_routes.py", "make_plus.py"):
        (folder / name).write_text((EXAMPLES / name).read_text())
    for words in (["env.py", "arithmetic"], ["make_plus.py"]):
        done = run([sys.executable, *words], folder)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return folder


def test_the_task_of_the_guide_has_rows_and_no_number_is_in_both_parts(desk):
    rows = [r for _, r in read_rows(desk / "data" / "plus_train.jsonl")]
    held_out = [r for _, r in read_rows(desk / "data" / "plus_validation.jsonl")]
    assert (len(rows), len(held_out)) == (112, 64)
    for one in (*rows, *held_out):
        number, added, total = numbers_of(one["answer"])
        assert added in (1, 10) and total == number + added
        messages, _ = env.render_row(one, "x:1")
        assert messages[-1] == {"role": "user", "content": one["question"]}
    trained = {numbers_of(one["question"])[0] for one in rows}
    assert not trained & {numbers_of(one["question"])[0] for one in held_out}


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def test_a_server_without_nemo_gym_is_two_routes(desk, monkeypatch, capsys):
    """Started by the guide's command, asked over HTTP, and taken by a run; on a port that is
    free.
    """
    serve, train = all_commands(GUIDES / "verifier.md", "needs a server")
    port = str(network.find_free_port())
    command = [word.replace("8001", port) for word in serve]
    assert command[0] == "uvicorn" and port in command
    with (desk / "uvicorn.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=desk, stdout=log, stderr=log
        )
    urls = {"mine": f"http://127.0.0.1:{port}"}

    async def ask(text):
        async with (
            gym_client.Gym(urls) as gym,
            gym.session("mine", row(answer="3 + 4 = 7")) as session,
        ):
            return (await session.verify(gym_client.message_response(text))).reward

    try:
        network.wait_ready("mine", urls["mine"], server, desk / "uvicorn.log")
        assert [asyncio.run(ask(text)) for text in ("It is 7", "It is 8", "")] == [1.0, 0.0, 0.0]
        dry_run([word.replace("8001", port) for word in train[2:]], desk, monkeypatch)
        assert VALID in capsys.readouterr().out
    finally:
        server.kill()
        server.wait()


def test_a_judge_by_its_address(desk, monkeypatch, capsys):
    """The page's rows, and its run up to the dry run, which asks the address for its model;
    Ollama's is the stub here.
    """
    judge = StubJudge()
    rows, _, train = all_commands(GUIDES / "judges.md", "needs a judge")
    assert run([sys.executable, "env.py", *rows[2:]], desk).returncode == 0
    words = [
        word.replace("http://127.0.0.1:11434/v1", judge.url).replace("qwen3:4b", "stub")
        for word in train[2:]
    ]
    assert f"gym.judges.judge_model.base_url={judge.url}" in words
    dry_run(words, desk, monkeypatch)
    assert VALID in capsys.readouterr().out


def test_custom_functions_are_all_named_by_a_command():
    page = GUIDES / "functions.md"
    functions = re.findall(r"^def (\w+)\(", files_shown(page)["my_functions.py"], re.MULTILINE)
    named = {
        name
        for words in all_commands(page, "")
        for word in words
        for name in re.findall(r"my_functions\.py:(\w+)", word)
    }
    assert len(functions) == 4 and set(functions) == named


def test_the_loop_from_python_is_short_and_compiles():
    """It is run over the real stack by another test; this one holds its length."""
    text = python_block(GUIDES / "python.md", "with train(plan(")
    assert len(text.splitlines()) <= 12
    compile(text, "python.md", "exec")


def write_records(path: Path) -> Path:
    """Two episodes of each of two rows, and a failed one, as a run writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_records(path, "w") as out:
        for task in range(2):
            asked = row(f"say {task}", agent_ref={"name": "reasoning_gym_simple_agent"})
            for k in range(2 + task):
                episode = Episode(
                    f"rows.jsonl:{task + 1}", f"1/{task}", "reasoning_gym", [5, 6], row=asked
                )
                episode.output.append(gym_client.message(f"the answer is {k}"))
                append_tokens(episode, [7, 8], [-0.5, -0.25])
                episode.reward, episode.ended, episode.timings = float(k), "stop", {"verify": 0.1}
                if k == 2:
                    episode.status, episode.reward, episode.error = (
                        "timeout",
                        None,
                        "no answer within 1 s",
                    )
                write_record(out, to_record(episode, task, k))
    return path


def test_records_are_read_as_the_guide_says(desk, monkeypatch, capsys):
    """By pandas, as in the block; and by Gym's profile of rewards, for which the file is its own
    inputs.
    """
    block = python_block(GUIDES / "inspect_and_evaluate.md", "import pandas")
    path = write_records(desk / re.findall(r'"(runs/\S+\.jsonl)"', block)[0])
    monkeypatch.chdir(desk)
    exec(compile(block, "inspect_and_evaluate.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "say 1" in shown and "the answer is 1" in shown and "timeout" in shown
    code = (
        "import json, sys; from nemo_gym.reward_profile import RewardProfiler\n"
        "rows = [json.loads(line) for line in open(sys.argv[1])]\n"
        "groups, agents, *_ = RewardProfiler().profile_from_data(rows, rows)\n"
        "print(len(groups), agents[0]['mean/reward'], agents[0]['agent_ref']['name'])"
    )
    done = run([str(GYM_PYTHON), "-c", code, str(path)], desk)
    assert done.stdout.split() == ["2", "0.5", "reasoning_gym_simple_agent"], done.stderr


LEARNED = [
    "$ python algorithm.py",
    "    val-core/box/acc/mean@1: 0.000 -> 0.312 (step 0 -> 10)",
    "    val-core/box/reward/mean@1: 0.354 -> 0.656 (step 0 -> 10)",
]


def test_make_docs_trains_what_the_guides_train(monkeypatch):
    """It runs the command of the dry run without that option, and its metrics must rise."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import walk

    for name in ("task", "verifier", "tools"):
        texts = [c.text for c in walk.list_commands((GUIDES / f"{name}.md").read_text())]
        [trained] = [text for text in texts if "--dry-run" not in text and "--config" in text]
        before = texts[texts.index(trained) - 1]
        assert "--dry-run" in before and before.replace(" --dry-run", "") == trained
    walk.check_gains("\n".join(LEARNED))
    for flat in (LEARNED[:1], [LEARNED[1].replace("0.312", "0.125")]):
        with pytest.raises(walk.PageError, match="No run raised a held-out metric"):
            walk.check_gains("\n".join(flat))
