"""Follow docs/tutorial.md as a newcomer does: a clone in an empty folder, each bash block in its
order, for real.

    python benchmarks/walk.py DIR [--page docs/tutorial.md]

DIR is made, and must be new. Blocks that need a GPU, a cluster, a hub or a second terminal are
skipped, by their mark. Writes the output of each command to DIR/walk.log, and prints the table of
minutes of the tutorial. Exit status 1 at the first command that fails.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = r"(?:^<!-- (?P<mark>[^>]+) -->\n)?^```bash\n(?P<text>.*?)^```$"
SECTION = re.compile(rf"^## (?P<title>[^\n]*)$|{BLOCK}", re.M | re.S)
DONE = ("", "takes minutes")  # marks of what can be run here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", default="docs/tutorial.md")
    args = parser.parse_args()
    subprocess.run(["git", "clone", "-q", ROOT, args.folder], check=True)
    taken: dict[str, float] = {}
    title, failed = "", ""
    with (args.folder / "walk.log").open("w") as log:
        page = (ROOT / args.page).read_text()
        for name, text in files(page):
            path = args.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for found in SECTION.finditer(page):
            title = found["title"] or title
            if found["text"] is None or (found["mark"] or "") not in DONE:
                continue
            begun = time.monotonic()
            script = (
                "set -eo pipefail\n[ ! -e .venv/bin/activate ] || source .venv/bin/activate\n"
                + found["text"]
            )
            print(f"$ {found['text']}", end="", file=log, flush=True)
            done = subprocess.run(
                ["bash", "-c", script], cwd=args.folder, stdout=log, stderr=subprocess.STDOUT
            )
            taken[title] = taken.get(title, 0.0) + time.monotonic() - begun
            if done.returncode:
                log = f"{args.folder}/walk.log"
                failed = f"{title}: status {done.returncode}; see {log}\n{found['text']}"
                break
    print("| step | minutes |\n| --- | ---: |")
    for title, seconds in taken.items():
        print(f"| {title} | {seconds / 60:.1f} |")
    print(f"| all | {sum(taken.values()) / 60:.1f} |")
    sys.exit(failed or 0)


def files(page: str) -> list[tuple[str, str]]:
    """(name, text) of the blocks whose first line is a file's name."""
    blocks = re.findall(r"^```(?:python|yaml)\n(.*?)^```$", page, re.M | re.S)
    name_line = re.compile(r"# ((?:\w+/)*\w+\.(?:py|yaml))\n")
    return [(name[1], text) for text in blocks if (name := name_line.match(text))]


if __name__ == "__main__":
    main()
