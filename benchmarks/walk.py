"""Run the bash blocks of docs/tutorial.md in their order, in a new clone of the repository.

    python benchmarks/walk.py DIR [--page docs/tutorial.md]

DIR is the folder of the clone. It must not exist. First, the command writes the files that the page
shows. Blocks with a mark such as `needs a GPU`, `needs a server` or `needs a cluster` are skipped.
The output of the blocks is in DIR/walk.log. The command prints the minutes of each section. If a
block fails, the command stops there, and its exit status is 1.
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
RUN_MARKS = ("", "takes minutes")  # the marks of the blocks that are run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder for the clone")
    parser.add_argument("--page", default="docs/tutorial.md", help="the page to follow")
    args = parser.parse_args()
    subprocess.run(["git", "clone", "-q", ROOT, args.folder], check=True)
    section_s: dict[str, float] = {}  # by the section's title
    title = ""
    problem = ""
    with (args.folder / "walk.log").open("w") as log:
        page = (ROOT / args.page).read_text()
        for name, text in find_files(page):
            path = args.folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for match in SECTION.finditer(page):
            title = match["title"] or title
            if match["text"] is None or (match["mark"] or "") not in RUN_MARKS:
                continue
            begin = time.monotonic()
            script = (
                "set -eo pipefail\n[ ! -e .venv/bin/activate ] || source .venv/bin/activate\n"
                + match["text"]
            )
            print(f"$ {match['text']}", end="", file=log, flush=True)
            status = subprocess.run(
                ["bash", "-c", script], cwd=args.folder, stdout=log, stderr=subprocess.STDOUT
            ).returncode
            section_s[title] = section_s.get(title, 0.0) + time.monotonic() - begin
            if status:
                problem = f"{title}: a block ended with status {status}. See {log.name}."
                problem += f"\n{match['text']}"
                break
    print("| step | minutes |\n| --- | ---: |")
    for title, seconds in section_s.items():
        print(f"| {title} | {seconds / 60:.1f} |")
    print(f"| all | {sum(section_s.values()) / 60:.1f} |")
    sys.exit(problem or 0)


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
