"""Runs the code blocks of README, CONTRIBUTING.md and docs/ in the order of their page.

Each page has a separate folder. Files are written there, and commands run there. Two commands are
only checked: `python algorithm.py` runs with --dry-run, and `make` with -n.

If a block cannot run here, a comment on the line before it gives the reason.
`make test` runs README and the tutorial. `make docs` runs the other pages.
"""

from __future__ import annotations

import asyncio
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

import gym_client
from kit.data.ground_truths import find_ground_truth
from kit.recipe.keys import flatten
from kit.recipe.load import read_source, read_yaml
from kit.recipe.schema import ServerStart
from kit.verify import network
from tests.helpers.pages import (
    EXAMPLES,
    GUIDES,
    PAGES,
    README,
    call_command,
    dry_run,
    insert_above_main,
    list_commands,
    make_clone,
    read_blocks,
    read_shown_files,
    write_gsm8k,
)
from tests.helpers.recipes import ROOT, row, run
from tests.helpers.runs import write_synthetic_run

FIRST_PAGES = (README, ROOT / "docs" / "tutorial.md")
OTHER_PAGES = [page for page in PAGES if page not in FIRST_PAGES]
VALID_MESSAGE = "dry run: model, files, sizes and servers are valid"
# Words that pages write after --config and that stand for any recipe.
PLACEHOLDERS = {"X", "RECIPE", "files", "more.yaml"}


def test_the_reference_page_is_up_to_date():
    from lab.report import metric_docs

    path = ROOT / "docs" / "reference.md"
    assert path.read_text() == metric_docs.render_reference(), (
        "run python -m lab.report.metric_docs > docs/reference.md"
    )


def test_the_tutorial_documents_every_key_of_gym_and_start():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    documented = re.findall(r"^\| `(gym\.[\w.]+)` \| `([^`]*)` \|", text, re.MULTILINE)
    base = read_yaml("base")
    defaults = {name: value for name, value in flatten(base).items() if name.startswith("gym.")}
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in defaults.items()}
    assert dict(documented) == texts
    _, _, table = text.partition("| key of `start:` | meaning |\n")
    first_cells = re.findall(r"^\| (`[^|]*) \|", table.partition("\n\n")[0], re.MULTILINE)
    names = re.findall(r"`(\w+)`", "\n".join(first_cells))
    assert sorted(names) == sorted(ServerStart.model_fields)


@pytest.mark.docs
def test_pages_name_recipes_and_files_that_exist(monkeypatch):
    """Recipes are those after --config, files those in folders of the repository."""
    monkeypatch.chdir(ROOT)
    for page in PAGES:
        text = page.read_text()
        files = re.findall(r"[`/ ]((?:kit|extras|lab|templates|tests|benchmarks)/[\w./]*\w)", text)
        missing = [name for name in files if not (ROOT / name).exists()]
        assert [name for name in missing if not (ROOT / "tests" / name).exists()] == [], page
        written = set(re.findall(r"^# (\w+\.yaml)", text, re.MULTILINE)) | {"box.yaml"}
        names = {name.rstrip(".") for name in re.findall(r"--config (\w[\w./]*)", text)}
        for name in names - written - PLACEHOLDERS:
            read_yaml(name)


@pytest.mark.docs
def test_pages_show_the_example_files():
    """Other tests use the files of docs/examples/, readers the text of a page."""
    shown: dict[str, str] = {}
    for page in PAGES:
        shown |= read_shown_files(page)
    for path in EXAMPLES.rglob("*"):
        if path.suffix in (".py", ".yaml"):
            assert shown[str(path.relative_to(EXAMPLES))] == path.read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Return the folder that each page starts from.

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


@pytest.mark.parametrize(
    "page",
    [*FIRST_PAGES, *[pytest.param(page, marks=pytest.mark.docs) for page in OTHER_PAGES]],
    ids=lambda page: page.stem,
)
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
    printed = capsys.readouterr().out
    if page == README:
        assert VALID_MESSAGE in printed
        assert "tried       on row data/arithmetic_train.jsonl:1: reward" in printed


def test_readmes_reward_pays_for_the_rows_answer_as_the_page_says(clone):
    """Also for a longer number that begins with it, which the page warns about."""
    namespace: dict[str, Any] = {}
    exec(read_shown_files(README)["my_reward.py"], namespace)
    first_row = json.loads((clone / "data" / "arithmetic_train.jsonl").read_text().splitlines()[0])
    answer = find_ground_truth(first_row)
    assert answer == "4 + 15 = 19"
    responses = [answer, f"The sum: {answer}.", f"{answer}0", "So the answer is 7.", "4 + 15 = 1"]
    scores = [namespace["compute_score"]("", response, answer, {}) for response in responses]
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.docs
def test_the_server_of_the_verifier_guide_works(clone, monkeypatch, capsys):
    """The guide's command starts it on a free port. It verifies responses, and a run accepts it."""
    (clone / "two_routes.py").write_text((EXAMPLES / "two_routes.py").read_text())
    serve, train = list_commands(GUIDES / "verifier.md", "needs a server")
    port = str(network.find_free_port())
    command = [word.replace("8001", port) for word in serve]
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


# --- one block -----------------------------------------------------------------------------------


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
        read_source(["math_cpu", "cpu", str(path)], [])


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
            from lab.report import report_page

            report_page.main(words[3:])
        elif words[:4] == ["python", "-m", "pytest", "-q"]:
            run_tests(folder / words[4], folder, monkeypatch)
        elif words[:1] == ["python"] and words[1] != "env.py" and words[1].endswith(".py"):
            run_file(folder / words[1], "__main__", monkeypatch, words[2:])
        elif words and words[0] != "source":  # the tests run in .venv already
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
    """Run a Python file, which may import others of its folder, and return its globals."""
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
