"""Every block of CONTRIBUTING and docs/, in the order of its page, in a separate folder: files
are written, commands run.

`python algorithm.py ...` is tried in a dry run, and `make ...` by make -n; all else is executed.
What cannot be is marked by a comment on the line before the block, and counted: MARKS.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run
from markdown_blocks import PAGES, above_main, blocks, dry_run, furnish, write_gsm8k
from test_report_page import write_synthetic_run

from kit.config.load import load_config
from kit.extras.report import metric_docs
from kit.gym.process_specs import START_KEYS

MARKS = {
    "needs a GPU": 3,
    "needs a cluster": 4,
    "needs a judge": 1,
    "needs a server": 5,
    "needs the hub": 2,
    "needs a run": 3,
    "takes minutes": 9,
}
DOCS = PAGES[1:]


def test_what_cannot_be_run_here_is_marked_and_counted():
    found = [block.mark for page in DOCS for block in blocks(page) if block.mark]
    assert {mark: found.count(mark) for mark in {*MARKS, *found}} == MARKS


def test_the_reference_is_what_the_code_says():
    path = ROOT / "docs" / "reference.md"
    assert path.read_text() == metric_docs.render_reference(), (
        "python -m kit.extras.report.metric_docs > docs/reference.md"
    )


def test_the_tutorial_takes_the_minutes_of_its_table():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    stated = re.findall(r"took (\d+\.\d) minutes \(\[time", text)
    steps = re.findall(r"^\| \d+\. .* \| (\d+\.\d) \|$", text, re.MULTILINE)
    (total,) = re.findall(r"^\| all \| (\d+\.\d) \|$", text, re.MULTILINE)
    assert stated == [total]
    assert abs(sum(map(float, steps)) - float(total)) < 0.05 * len(steps)


def test_the_tutorial_has_every_key_of_gym_and_of_start():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    documented = re.findall(r"^\| `(gym\.[\w.]+)` \| `([^`]*)` \|", text, re.MULTILINE)
    keys = [key for key in metric_docs.list_kit_keys() if key.name.startswith("gym.")]
    assert dict(documented) == {key.name: key.default for key in keys}
    _, _, table = text.partition("| key of `start:` | meaning |\n")
    first_cells = re.findall(r"^\| (`[^|]*) \|", table.partition("\n\n")[0], re.MULTILINE)
    named = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(START_KEYS)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """What all pages begin with: the kit, a model, the demo's rows, the demo's run, and an export
    of `sft`.
    """
    folder = tmp_path_factory.mktemp("clone")
    model = furnish(folder)
    write_gsm8k(folder)
    for words in (["arithmetic"], ["gsm8k", "--source", "."]):
        done = run([sys.executable, "env.py", *words], folder)
        assert done.returncode == 0, done.stderr
    (write_synthetic_run(folder / "runs" / "math_cpu", 3, 64, model) / "export").symlink_to(model)
    (folder / "runs" / "sft").mkdir()
    (folder / "runs" / "sft" / "export").symlink_to(model)
    return folder


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_work_in_their_order(page, clone, tmp_path, monkeypatch, capsys):
    for name in os.listdir(clone):
        (tmp_path / name).symlink_to(clone / name)
    for name in ("env.py", "data", "runs"):  # which pages change
        (tmp_path / name).unlink()
        subprocess.run(["cp", "-r", clone / name, tmp_path / name], check=True)
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if not block.mark:
            KINDS[block.language](block.text, tmp_path, monkeypatch)
    capsys.readouterr()


def write_python(text: str, folder: Path, _) -> None:
    """A file by the name in its first line, its continuation, a part of env.py; or a few lines,
    which compile.
    """
    compile(text, "a block", "exec")
    first = text.partition("\n")[0]
    if "above main" in first:
        above_main(folder / "env.py", text)
    elif name := re.fullmatch(r"# (\w[\w/]*\.py)(, continued)?", first):
        path = folder / name[1]
        path.parent.mkdir(exist_ok=True)
        assert path.exists() == bool(name[2]), (
            f"{name[1]} is written once, and continued after that"
        )
        with path.open("a") as out:
            out.write(text)


def write_yaml(text: str, folder: Path, _) -> None:
    """A recipe by the name in its first line; or an overlay, whose keys there are."""
    name = re.match(r"# (\w[\w/]*\.yaml)\n", text)
    path = folder / (name[1] if name else "overlay.yaml")
    path.write_text(text)
    if not name:
        problems: list[Exception] = []
        load_config(["math_cpu", "cpu", str(path)], [], problems)
        assert not problems


def execute(text: str, folder: Path, monkeypatch) -> None:
    """Commands, a line each."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        program = words[0].removeprefix(".venv/bin/")
        if program == "make":
            done = subprocess.run(
                ["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True
            )
        elif program == "python" and words[1] == "algorithm.py" and words[2] != "show":
            dry_run(words[2:], folder, monkeypatch)
            continue
        else:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            line = line.replace(".venv/bin/", "")
            done = subprocess.run(
                ["bash", "-c", line],
                cwd=folder,
                env=os.environ | {"PATH": path},
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


KINDS = {
    "bash": execute,
    "python": write_python,
    "yaml": write_yaml,
    "text": lambda *_: None,
    "mermaid": lambda *_: None,
    "json": lambda *_: None,
}
