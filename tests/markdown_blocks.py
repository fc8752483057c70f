"""The fenced blocks of the project's Markdown pages, and a folder in which their commands run."""

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
from conftest import ROOT
from tiny_models import make_model

from kit.runs import cli

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = ROOT / "docs" / "guides"
EXAMPLES = ROOT / "docs" / "examples"
CLONE = (  # what a folder needs to be a clone of the kit
    ".venv-gym",
    "kit",
    "templates",
    "configs",
    "gym_client.py",
    "gym_messages.py",
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


def blocks(page: Path = README) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = [Block(m["mark"] or "", m["language"], m["text"]) for m in BLOCK.finditer(text)]
    assert text.count("```") == 2 * len(found), (
        f"{page.name}: a fence that is not closed, or not at the start of a line"
    )
    return found


def python_block(page: Path, words: str) -> str:
    """The one Python block of a page that has these words in it."""
    found = [b.text for b in blocks(page) if b.language == "python" and words in b.text]
    assert len(found) == 1, f"{len(found)} Python blocks of {page.name} have {words!r}"
    return found[0]


def files_shown(page: Path) -> dict[str, str]:
    """The text of each file that a page shows, by the name in the block's first line."""
    files: dict[str, str] = {}
    for block in blocks(page):
        name = FILE_NAME.match(block.text)
        if name and block.language in ("python", "yaml"):
            files[name[1]] = files.get(name[1], "") + block.text
    return files


def all_commands(page: Path, *marks: str) -> list[list[str]]:
    """The commands of a page's bash blocks with one of these marks, as words, without comments."""
    texts = [
        block.text for block in blocks(page) if block.language == "bash" and block.mark in marks
    ]
    lines = "".join(texts).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def furnish(folder: Path) -> Path:
    """Make a folder a clone of the kit without tests and docs, with a tiny model.

    Returns the model's folder, which has SmolLM2's name.
    """
    for name in CLONE:
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "env.py", folder)
    model = make_model(folder / "models" / "SmolLM2-135M-Instruct", tied=True)
    # a character is a token, so prompts are long
    settings = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 2**20}
    (model / "config.json").write_text(json.dumps(settings))
    return model


def write_gsm8k(folder: Path) -> None:
    """Write rows in GSM8K's own form, since no hub can be reached."""
    for split in ("train", "test"):
        lines = [
            json.dumps({"question": f"{i} + 1?", "answer": f"So #### {i + 1}"}) for i in range(1100)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


def above_main(path: Path, block: str) -> None:
    """Put a block where env.py has its tasks."""
    path.write_text(path.read_text().replace("\ndef main()", f"\n{block}\n\ndef main()"))


def dry_run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `algorithm.py` with these words and --dry-run, in this process, with the tiny model."""
    words = [*words, "data.max_prompt_length=30000", *["--dry-run"] * ("--dry-run" not in words)]
    if not any(word.startswith("actor_rollout_ref.model.path=") for word in words):
        words.append("actor_rollout_ref.model.path=models/SmolLM2-135M-Instruct")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["algorithm.py", *words])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(cli, "silence_libraries", lambda: None)
    with mock.patch.dict(os.environ):  # which a recipe sets
        cli.main(lambda planned: pytest.fail("a dry run starts nothing"))
