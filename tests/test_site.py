"""Tests the documentation site of `make site`. `make docs` runs this file.

MkDocs checks links, anchors and the navigation when it builds the site.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.helpers.recipes import ROOT

pytestmark = pytest.mark.docs
# {token of markdown-it: HTML tag}. A page must have equal numbers of both.
BLOCKS = {"table_open": "<table", "list_item_open": "<li", "tr_open": "<tr"}


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the site, and return its folder."""
    done = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return ROOT / "site"


def list_pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_lists_and_tables_are_the_same_as_on_github(site):
    """Python-Markdown needs an empty line before a list, so docs/site_hooks.py adds it."""
    parser = MarkdownIt("commonmark").enable("table")
    different = []
    for path in list_pages(site):
        name = path.parent.relative_to(site).as_posix()
        source = ROOT / "docs" / f"{name}.md"
        if not source.is_file() or name == "api":  # made from docstrings
            continue
        expected = Counter(token.type for token in parser.parse(source.read_text()))
        html = path.read_text()
        article = html[html.index("<article") : html.index("</article")]
        for token, tag in BLOCKS.items():
            count = len(re.findall(rf"{tag}\b", article))
            if count != expected[token]:
                different.append(f"{name}: {expected[token]} {token}, {count} {tag}>")
    assert different == []


def test_llms_txt_lists_all_pages(site):
    index = (site / "llms.txt").read_text()
    full = (site / "llms-full.txt").read_text()
    pages = re.findall(r"^- \[.+?\]\((.+?)\)", index, re.MULTILINE)
    assert len(pages) == len(list_pages(site))
    assert [page for page in pages if not (site / page).is_file()] == []
    assert [page for page in pages if f"<!-- {page} -->" not in full] == []
    assert "`compute_advantages(" in full  # the API page has the docstrings
