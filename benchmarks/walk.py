"""Run the bash blocks of pages in their order, in a new clone of the repository.

    python benchmarks/walk.py DIR [--pages docs/tutorial.md docs/guides/task.md]

DIR is the folder of the clone. It must not exist. The first page must set up the clone, as the
tutorial does. For each page, the command first writes the files that the page shows. Blocks with a
mark such as `needs a GPU`, `needs a server` or `needs a cluster` are skipped. Where a page says to
run the same command without `--dry-run`, the last block runs again without it.

The output of the blocks is in DIR/walk.log. The command prints the minutes of each section, and the
metrics before and after each training run. Exit status 1 if a block fails, or if no run of a page
raises a held-out metric by 0.2 or more.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parent.parent
BLOCK = r"(?:^<!-- (?P<mark>[^>]+) -->\n)?^```bash\n(?P<text>.*?)^```$"
AGAIN = r"(?P<again>same command without `--dry-run`)"
PART = re.compile(rf"^## (?P<title>[^\n]*)$|{BLOCK}|{AGAIN}", re.M | re.S)
RUN_MARKS = ("", "takes minutes")  # the marks of the blocks that are run
OUTCOME = re.compile(r"^    (val-\S+): (\S+) -> (\S+) \(step \d+ -> \d+\)$", re.M)
MIN_GAIN = 0.2  # of the metric that rises most on a page


class PageError(Exception):
    """A block of a page failed, or the page's runs did not learn."""


class Commands(NamedTuple):
    """One bash block of a page, as it is run."""

    section: str
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder for the clone")
    parser.add_argument("--pages", nargs="+", default=["docs/tutorial.md"], help="pages to follow")
    args = parser.parse_args()
    subprocess.run(["git", "clone", "-q", ROOT, args.folder], check=True)
    problem = ""
    with (args.folder / "walk.log").open("w+") as log:
        for name in args.pages:
            print(f"\n{name}\n")
            try:
                follow_page((ROOT / name).read_text(), args.folder, log)
            except PageError as error:
                problem = f"{name}: {error}"
                break
    sys.exit(problem or 0)


def follow_page(page: str, folder: Path, log: TextIO) -> None:
    """Write the files of a page, run its blocks, and print the minutes and the gains.

    Raises PageError if a block fails or if the runs do not learn.
    """
    for name, text in find_files(page):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    begin = log.tell()
    section_s: dict[str, float] = {}  # by the section's title
    try:
        for block in list_commands(page):
            started = time.monotonic()
            run_block(block, folder, log)
            seconds = time.monotonic() - started
            section_s[block.section] = section_s.get(block.section, 0.0) + seconds
    finally:
        print("| step | minutes |\n| --- | ---: |")
        for title, seconds in section_s.items():
            print(f"| {title} | {seconds / 60:.1f} |")
        print(f"| all | {sum(section_s.values()) / 60:.1f} |", flush=True)
    log.seek(begin)
    check_gains(log.read())


def list_commands(page: str) -> list[Commands]:
    """Return the blocks to run, in order."""
    commands: list[Commands] = []
    title = ""
    for match in PART.finditer(page):
        title = match["title"] or title
        if match["again"]:
            commands.append(Commands(title, commands[-1].text.replace(" --dry-run", "")))
        elif match["text"] and (match["mark"] or "") in RUN_MARKS:
            commands.append(Commands(title, match["text"]))
    return commands


def run_block(block: Commands, folder: Path, log: TextIO) -> None:
    """Run one block in the clone's environment. Raises PageError if it fails."""
    activate = "[ ! -e .venv/bin/activate ] || source .venv/bin/activate"
    script = f"set -eo pipefail\n{activate}\n{block.text}"
    print(f"$ {block.text}", end="", file=log, flush=True)
    status = subprocess.run(
        ["bash", "-c", script], cwd=folder, stdout=log, stderr=subprocess.STDOUT
    ).returncode
    log.seek(0, 2)
    if status:
        raise PageError(
            f"{block.section}: a block ended with status {status}. See {log.name}.\n{block.text}"
        )


def check_gains(output: str) -> None:
    """Print each metric before and after training. Raises PageError if none rises enough."""
    gains = []
    for name, before, after in OUTCOME.findall(output):
        print(f"{name}: {before} -> {after}", flush=True)
        gains.append(float(after) - float(before))
    if not gains or max(gains) < MIN_GAIN:
        raise PageError(f"No run raised a held-out metric by {MIN_GAIN} or more.")


def find_files(page: str) -> list[tuple[str, str]]:
    """Return (name, text) of each Python or YAML block that begins with a comment `# name`."""
    name_line = re.compile(r"# ((?:\w+/)*\w+\.(?:py|yaml))\n")
    files = []
    for text in re.findall(r"^```(?:python|yaml)\n(.*?)^```$", page, re.M | re.S):
        name = name_line.match(text)
        if name:
            files.append((name[1], text))
    return files


if __name__ == "__main__":
    main()
