"""The examples of the guides: docs/examples/ has each one as a file, and its page shows that file.

A page stays readable without a site because it contains the text. This test keeps both equal.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, row
from test_readme import PAGES, blocks

import gym_client
from kit.gym import network

EXAMPLES = ROOT / "docs" / "examples"
FILES = sorted(path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".yaml"))
FILE_NAME = re.compile(r"# ((?:\w+/)*\w+\.(?:py|yaml))\n")  # the first line of a block
GUIDES = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def shown_files(page: Path) -> list[tuple[str, str]]:
    """(name, text) of each block that is a file, in the order of the page."""
    named = [(FILE_NAME.match(block.text), block.text) for block in blocks(page)]
    return [(match[1], text) for match, text in named if match]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_a_page_shows_the_file(path):
    """At least one page shows it, and each page that shows it shows the same text."""
    name = str(path.relative_to(EXAMPLES))
    texts = [text for page in PAGES for shown, text in shown_files(page) if shown == name]
    assert texts, f"no page shows docs/examples/{name}"
    expected = path.read_text()
    assert all(text == expected for text in texts), (
        f"copy docs/examples/{name} into the block that begins with `# {name}`"
    )


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_each_file_of_a_guide_is_an_example(page):
    missing = [name for name, _ in shown_files(page) if not (EXAMPLES / name).is_file()]
    assert not missing, f"write {missing} to docs/examples/"


async def verify(url: str, text: str) -> float | None:
    """The reward that the server gives a response to one row."""
    async with (
        gym_client.Gym({"mine": url}) as gym,
        gym.session("mine", row(answer="3 + 4 = 7")) as session,
    ):
        return (await session.verify(gym_client.message_response(text))).reward


def test_a_server_needs_two_routes_only(tmp_path):
    """docs/examples/two_routes.py, started as its page says, on a free port."""
    port = str(network.find_free_port())
    url = f"http://127.0.0.1:{port}"
    log_path = tmp_path / "uvicorn.log"
    command = [sys.executable, "-m", "uvicorn", "two_routes:app", "--port", port]
    with log_path.open("w") as log:
        server = subprocess.Popen(command, cwd=EXAMPLES, stdout=log, stderr=log)
    try:
        network.wait_ready("mine", url, server, log_path)
        rewards = [asyncio.run(verify(url, text)) for text in ("It is 7", "It is 8", "")]
        assert rewards == [1.0, 0.0, 0.0]
    finally:
        server.kill()
        server.wait()
