"""Reads the code blocks of the Markdown pages, and prepares a folder to run their commands in."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from kit.run import cli
from tests.helpers.models import make_model
from tests.helpers.recipes import ROOT

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = ROOT / "docs" / "guides"
EXAMPLES = ROOT / "docs" / "examples"
# The files and folders that the commands of the pages need.
CLONED_FILES = (
    ".venv-gym",
    ".venv-agents",
    "kit",
    "extras",
    "lab",
    "templates",
    "configs",
    "gym_client.py",
    "algorithm.py",
    "inference.py",
    "training.py",
)
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^>]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FILE_NAME = re.compile(r"# (\w[\w/]*\.(?:py|yaml))(, continued)?(?:\n|$)")


class Block(NamedTuple):
    mark: str
    language: str
    text: str


def read_blocks(page: Path = README) -> list[Block]:
    """Return the fenced code blocks of a page, in order."""
    text = page.read_text()
    matches = BLOCK.finditer(text)
    blocks = [Block(match["mark"] or "", match["language"], match["text"]) for match in matches]
    assert text.count("```") == 2 * len(blocks), (
        f"{page.name}: a fence is not closed, or does not begin its line"
    )
    return blocks


def find_python_block(page: Path, phrase: str) -> str:
    """Return the text of the only Python block of a page that contains a phrase."""
    texts = [block.text for block in read_blocks(page) if block.language == "python"]
    matching = [text for text in texts if phrase in text]
    assert len(matching) == 1, f"{len(matching)} Python blocks of {page.name} contain {phrase!r}"
    return matching[0]


def read_shown_files(page: Path) -> dict[str, str]:
    """Read {name: text} of each file that a page shows. A block's first line names its file."""
    files: dict[str, str] = {}
    for block in read_blocks(page):
        name = FILE_NAME.match(block.text)
        if name and block.language in ("python", "yaml"):
            files[name[1]] = files.get(name[1], "") + block.text
    return files


def list_commands(page: Path, *marks: str) -> list[list[str]]:
    """Return the commands of a page's bash blocks, each split into words.

    marks: only blocks with one of these marks count. The empty mark stands for unmarked blocks.
    """
    text = ""
    for block in read_blocks(page):
        if block.language == "bash" and block.mark in marks:
            text += block.text
    lines = text.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [words for words in commands if words]


def make_clone(folder: Path) -> Path:
    """Turn a folder into a clone of the repository without tests and docs, with a tiny model.

    Returns the folder of the model, which has the name of SmolLM2.
    """
    for name in CLONED_FILES:
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "env.py", folder)
    model = make_model(folder / "models" / "SmolLM2-135M-Instruct", tied=True)
    # each character is one token, so prompts are long
    settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2**20}
    (model / "config.json").write_text(json.dumps(settings))
    return model


def write_gsm8k(folder: Path) -> None:
    """Write rows in the format of GSM8K, because the tests cannot download it."""
    for split in ("train", "test"):
        lines = [
            json.dumps({"question": f"{i} + 1?", "answer": f"So #### {i + 1}"}) for i in range(1100)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


def insert_above_main(path: Path, block: str) -> None:
    """Insert a block into env.py where its tasks are."""
    path.write_text(path.read_text().replace("\ndef main()", f"\n{block}\n\ndef main()"))


def call_command(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `python algorithm.py` with these arguments in this process. It must start nothing."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["algorithm.py", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli, "silence_libraries", lambda: None)
    with mock.patch.dict(os.environ):  # restores variables that the recipe sets
        with cli.exit_on_errors():
            assert cli.read_plan() is None, "a dry run must not start anything"


def dry_run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `algorithm.py` with these arguments and --dry-run, in this process.

    It uses the tiny model, unless the arguments name a model.
    """
    words = [*words, "data.max_prompt_length=30000"]
    if "--dry-run" not in words:
        words.append("--dry-run")
    if not any(word.startswith("actor_rollout_ref.model.path=") for word in words):
        words.append("actor_rollout_ref.model.path=models/SmolLM2-135M-Instruct")
    call_command(words, folder, monkeypatch)
