"""Runs the code blocks of CONTRIBUTING.md and docs/ in the order of their page.

Each page has a separate folder. Files are written there, and commands run there. Two commands are
only checked: `python algorithm.py` runs with --dry-run, and `make` with -n.

If a block cannot run here, a comment on the line before it gives one of the reasons in MARKS.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from kit.config.keys import flatten
from kit.config.load import load_config, read_yaml
from kit.config.sections import ServerStart
from lab.report import metric_docs, report_page
from tests.helpers.pages import (
    PAGES,
    call_command,
    dry_run,
    insert_above_main,
    make_clone,
    read_blocks,
    write_gsm8k,
)
from tests.helpers.recipes import ROOT, run
from tests.helpers.runs import write_synthetic_run

MARKS = {
    "needs a GPU",
    "needs a cluster",
    "needs a judge",
    "needs a server",
    "needs the hub",
    "needs a run",
    "takes minutes",
}
DOCS = PAGES[1:]


def test_the_marks_of_blocks_that_cannot_run_here_are_known():
    marks = set()
    for page in DOCS:
        marks |= {block.mark for block in read_blocks(page) if block.mark}
    assert marks <= MARKS


def test_the_reference_page_is_up_to_date():
    path = ROOT / "docs" / "reference.md"
    assert path.read_text() == metric_docs.render_reference(), (
        "run python -m lab.report.metric_docs > docs/reference.md"
    )


def test_the_tutorial_documents_every_key_of_gym_and_start():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    documented = re.findall(r"^\| `(gym\.[\w.]+)` \| `([^`]*)` \|", text, re.MULTILINE)
    base = OmegaConf.to_container(read_yaml("base"), resolve=False)
    defaults = {name: value for name, value in flatten(base).items() if name.startswith("gym.")}
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in defaults.items()}
    assert dict(documented) == texts
    _, _, table = text.partition("| key of `start:` | meaning |\n")
    first_cells = re.findall(r"^\| (`[^|]*) \|", table.partition("\n\n")[0], re.MULTILINE)
    names = re.findall(r"`(\w+)`", "\n".join(first_cells))
    assert sorted(names) == sorted(ServerStart.model_fields)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The folder that each page starts from.

    It has the kit, a model, the rows and the run of the demo, and an exported model of `sft`.
    """
    folder = tmp_path_factory.mktemp("clone")
    model = make_clone(folder)
    write_gsm8k(folder)
    for words in (["arithmetic"], ["gsm8k", "--source", "."]):
        done = run([sys.executable, "env.py", *words], folder)
        assert done.returncode == 0, done.stderr
    demo = write_synthetic_run(folder / "runs" / "math_cpu", 3, 64, model)
    (demo / "export").symlink_to(model)
    (folder / "runs" / "sft").mkdir()
    (folder / "runs" / "sft" / "export").symlink_to(model)
    return folder


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_work_in_order(page, clone, tmp_path, monkeypatch, capsys):
    for name in os.listdir(clone):
        (tmp_path / name).symlink_to(clone / name)
    for name in ("env.py", "data", "runs"):  # pages change these, so they must be copies
        (tmp_path / name).unlink()
        subprocess.run(["cp", "-r", clone / name, tmp_path / name], check=True)
    monkeypatch.chdir(tmp_path)
    for block in read_blocks(page):
        if not block.mark:
            RUN_BLOCK[block.language](block.text, tmp_path, monkeypatch)
    capsys.readouterr()


def run_python_block(text: str, folder: Path, _) -> None:
    """Compile a Python block, and write it to the file that its first line names, if any.

    The first line may also say that the block continues a file, or belongs above main() in env.py.
    """
    compile(text, "a block", "exec")
    first_line = text.partition("\n")[0]
    if "above main" in first_line:
        insert_above_main(folder / "env.py", text)
    elif name := re.fullmatch(r"# (\w[\w/]*\.py)(, continued)?", first_line):
        path = folder / name[1]
        path.parent.mkdir(exist_ok=True)
        is_continued = bool(name[2])
        assert path.exists() == is_continued, (
            f"{name[1]}: only the first block of a file lacks `continued`"
        )
        with path.open("a") as out:
            out.write(text)


def run_yaml_block(text: str, folder: Path, _) -> None:
    """Write a recipe to the file that its first line names.

    Without a name, the block is an overlay, and all its keys must exist.
    """
    name = re.match(r"# (\w[\w/]*\.yaml)\n", text)
    path = folder / (name[1] if name else "overlay.yaml")
    path.write_text(text)
    if not name:
        problems: list[Exception] = []
        load_config(["math_cpu", "cpu", str(path)], [], problems)
        assert not problems


def run_bash_block(text: str, folder: Path, monkeypatch) -> None:
    """Run each command of a bash block. Those that import much run in this process."""
    text = re.sub(r"\.venv(-gpu)?/bin/", "", text)
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:3] == ["python", "algorithm.py", "show"]:
            call_command(words[2:], folder, monkeypatch)
        elif words[:2] == ["python", "algorithm.py"]:
            dry_run(words[2:], folder, monkeypatch)
        elif words[:3] == ["python", "-m", "lab.report.report_page"]:
            report_page.main(words[3:])
        elif words[:4] == ["python", "-m", "pytest", "-q"]:
            run_tests(folder / words[4], folder, monkeypatch)
        elif words[:1] == ["python"] and words[1] != "env.py" and words[1].endswith(".py"):
            run_file(folder / words[1], "__main__", monkeypatch, words[2:])
        elif words:
            run_in_shell(line, folder)


def run_in_shell(line: str, folder: Path) -> None:
    """Run a command in a new process. `make` only prints what it would do."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    is_make = line.startswith("make ")
    done = subprocess.run(
        ["bash", "-c", line.replace("make ", "make -n ", 1) if is_make else line],
        cwd=ROOT if is_make else folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def run_tests(path: Path, folder: Path, monkeypatch) -> None:
    """Call the test functions of a file or folder, as pytest would."""
    files = [path] if path.is_file() else sorted(path.glob("test_*.py"))
    assert files
    for file in files:
        for name, function in run_file(file, file.stem, monkeypatch).items():
            if name.startswith("test_"):
                needs_folder = "tmp_path" in inspect.signature(function).parameters
                function(*[folder / "logs"] if needs_folder else [])


def run_file(path: Path, name: str, monkeypatch, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run a Python file, which may import others of its folder -> its globals."""
    before = set(sys.modules)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        patch.setattr(sys, "argv", [str(path), *arguments])
        try:
            return runpy.run_path(str(path), run_name=name)
        finally:
            for module in set(sys.modules) - before:  # another page has files with these names
                file = getattr(sys.modules[module], "__file__", None) or ""
                if file.startswith(str(path.parent)):
                    del sys.modules[module]


def ignore_block(*_) -> None:
    """Do nothing: output, data and diagrams cannot run."""


RUN_BLOCK = {
    "bash": run_bash_block,
    "python": run_python_block,
    "yaml": run_yaml_block,
    "text": ignore_block,
    "mermaid": ignore_block,
    "json": ignore_block,
}
