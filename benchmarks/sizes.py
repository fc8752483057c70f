"""Count the lines of the files and packages in README's table.

    python benchmarks/sizes.py            print each row's paths and lines
    python benchmarks/sizes.py --write    also write the lines into README.md

A row of the table begins with its paths in backticks. Python, YAML, HTML and shell files are
counted. The numbers in README.md are rounded to multiples of ten.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SUFFIXES = (".py", ".yaml", ".html", ".sh")
ROW = re.compile(r"^(?P<paths>\| `[^|]+) \| (?P<lines>[\d,]+) \|", re.MULTILINE)


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, or of all code files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    code = [file for file in files if file.is_file() and file.suffix in SUFFIXES]
    if not code:
        raise SystemExit(f"error: {path} has no code files. Correct the table in README.md.")
    return sum(len(file.read_text().splitlines()) for file in code)


def count_row(paths: str) -> int:
    """Return the number of lines of all paths of a row together."""
    return sum(count_lines(ROOT / name) for name in re.findall(r"`([^`]+)`", paths))


def rewrite(text: str) -> str:
    """Return the text of README.md with the current number of lines in each row."""

    def replace(row: re.Match[str]) -> str:
        return f"{row['paths']} | {round(count_row(row['paths']), -1):,} |"

    return ROW.sub(replace, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the lines into README.md")
    args = parser.parse_args()
    text = README.read_text()
    for row in ROW.finditer(text):
        print(row["paths"].removeprefix("| "), count_row(row["paths"]))
    if args.write:
        README.write_text(rewrite(text))


if __name__ == "__main__":
    main()
