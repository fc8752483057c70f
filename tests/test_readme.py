"""Tests README's commands and reward, and the links and names of all pages."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from kit.config.load import read_yaml
from kit.config.python_files import import_file
from kit.data.ground_truths import find_ground_truth
from tests.helpers.pages import (
    EXAMPLES,
    PAGES,
    README,
    dry_run,
    list_commands,
    make_clone,
    read_blocks,
    read_shown_files,
)
from tests.helpers.recipes import ROOT, SOURCES, run

LANGUAGES = {"bash", "python", "text"}  # of code blocks: commands, files, output
ACTIVATE = ["source", ".venv/bin/activate"]
# {stem of a page: the files that its commands create}
CREATED_FILES = {"tools": ("box.yaml",)}
# Files that every run writes.
RUN_FILES = {
    "config.yaml",
    "rollout.yaml",
    "evaluate.yaml",
    "step.txt",
    "latest_checkpointed_iteration.txt",
}
# Words that pages write after --config and that stand for any recipe.
PLACEHOLDERS = {"X", "RECIPE", "files", "more.yaml", ""}


def is_training_command(words: list[str]) -> bool:
    return words[:2] == ["python", "algorithm.py"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A clone with the rows of `make demo`, but not its run, and the file of README's reward."""
    folder = tmp_path_factory.mktemp("clone")
    make_clone(folder)
    for name, text in read_shown_files(README).items():
        (folder / name).write_text(text)
    done = run([sys.executable, "env.py", "arithmetic"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# --- README --------------------------------------------------------------------------------------


def test_every_block_is_of_a_tested_kind():
    blocks = read_blocks()
    assert {block.language for block in blocks} == LANGUAGES
    unmarked = [words for words in list_commands(README, "") if words != ACTIVATE]
    assert unmarked and all(is_training_command(words) for words in unmarked), (
        "mark the blocks that this file does not run"
    )
    python_blocks = [block.text for block in blocks if block.language == "python"]
    assert [text.partition("\n")[0] for text in python_blocks] == ["# my_reward.py"]


@pytest.mark.parametrize(
    "words", [c[2:] for c in list_commands(README, "") if is_training_command(c)], ids=" ".join
)
def test_every_command_passes_its_dry_run(words, clone, monkeypatch, capsys):
    """It runs in this process. A new process would take 12 s (runs/test_cli.py starts one)."""
    dry_run(words, clone, monkeypatch)
    printed = capsys.readouterr().out
    assert "dry run: model, files, sizes and servers are valid; nothing was started" in printed
    assert "tried on row data/arithmetic_train.jsonl:1: reward" in printed
    assert not os.path.exists("runs")


def test_readmes_reward_pays_for_the_rows_answer_as_the_page_says(clone):
    """Also for a longer number that begins with it, which the page warns about."""
    compute_score = import_file(EXAMPLES / "my_reward.py").compute_score
    row = json.loads((clone / "data" / "arithmetic_train.jsonl").read_text().splitlines()[0])
    answer = find_ground_truth(row)
    assert answer == "4 + 15 = 19"
    responses = [answer, f"The sum: {answer}.", f"{answer}0", "So the answer is 7.", "4 + 15 = 1"]
    scores = [compute_score("", response, answer, {}) for response in responses]
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0]


# --- links and names on all pages ----------------------------------------------------------------


def test_every_make_target_on_a_page_exists():
    targets = set()
    for page in PAGES:
        for line in re.findall(r"(?:`|^)make ([a-z -]+)", page.read_text(), re.MULTILINE):
            targets |= set(line.split())
    assert {"demo", "test", "lint", "soak", "model", "data"} <= targets
    done = run(["make", "-n", *sorted(targets)], ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_files_and_recipes_on_a_page_exist(page, monkeypatch):
    """Files are those in backticks, recipes those after --config."""
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    folders = "kit|templates|configs|tests|docs|benchmarks"
    names = re.findall(rf"[`/ ]((?:{folders})/[\w./]*\w)", text)
    names += re.findall(r"`(\w+\.(?:py|yaml|txt|toml))[`:]", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in names if not is_in_repository(name)]
    # files that the page's blocks, its commands or a run write
    written = set(re.findall(r"^# (\w+\.(?:py|yaml))(?:, continued)?$", text, re.MULTILINE))
    written |= RUN_FILES | set(CREATED_FILES.get(page.stem, ()))
    assert not [name for name in missing if name not in {*written, "pieces.py"}]
    for name in find_recipe_names(text) - written:
        read_yaml(name)


def is_in_repository(name: str) -> bool:
    """Whether a file exists in the root, in docs/, or in any folder of the root."""
    candidates = (ROOT / name, ROOT / "docs" / name, *ROOT.glob(f"*/{name}"))
    return any(path.exists() for path in candidates)


def test_the_headings_that_pages_link_to_exist():
    missing = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            other = page.parent / target if target else page
            headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
            if anchor not in {make_anchor(heading) for heading in headings}:
                missing.append(f"{page.name}: {target}#{anchor}")
    assert missing == []


def make_anchor(heading: str) -> str:
    """The anchor that GitHub and MkDocs give to a heading."""
    kept = re.sub(r"[^\w\s-]", "", heading.lower().replace("`", ""))
    return kept.strip().replace(" ", "-")


def find_recipe_names(text: str) -> set[str]:
    """The recipes after --config in a text, without placeholders."""
    names = {name.rstrip(".") for name in re.findall(r"--config ([\w./]+)", text)}
    return names - PLACEHOLDERS


def test_the_recipes_of_commands_in_source_files_exist(monkeypatch):
    monkeypatch.chdir(ROOT)  # the shared session changes the working directory
    for path in [*SOURCES, *ROOT.glob("configs/**/*.yaml")]:
        for name in find_recipe_names(path.read_text()):
            read_yaml(name)
