"""Tests that the examples of the guides do what their text says.

tests/test_docs.py runs the code blocks of all pages.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import gym_client
from kit.gym import network
from tests.helpers.http import StubJudge
from tests.helpers.pages import (
    EXAMPLES,
    GUIDES,
    dry_run,
    list_commands,
    make_clone,
)
from tests.helpers.recipes import row, run

VALID_MESSAGE = "dry run: model, files, sizes and servers are valid"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone with the demo's rows and the server of a guide."""
    folder = tmp_path_factory.mktemp("clone")
    make_clone(folder)
    (folder / "two_routes.py").write_text((EXAMPLES / "two_routes.py").read_text())
    done = run([sys.executable, "env.py", "arithmetic"], folder)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return folder


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
