"""Tests that the navigation of the documentation site has each page exactly once.

tests/test_site.py builds the site and opens it in a browser.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import yaml

from tests.helpers.recipes import ROOT


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml. Its Python objects, which only MkDocs needs, become None."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
SETTINGS = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def read_root_pages() -> dict[str, str]:
    """{file in the root: page of the site} of docs/site_hooks.py, which needs MkDocs."""
    tree = ast.parse((ROOT / "docs" / "site_hooks.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROOT_PAGES":
            return ast.literal_eval(node.value)
    raise AssertionError("docs/site_hooks.py has no ROOT_PAGES")


def list_navigation(entries: list[Any]) -> Iterator[str]:
    """The pages of the navigation, in its order."""
    for entry in entries:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from list_navigation(value)


def test_the_navigation_has_each_page_exactly_once():
    root_pages = read_root_pages()
    assert [name for name in root_pages if not (ROOT / name).is_file()] == []
    docs = ROOT / "docs"
    paths = [path.relative_to(docs) for path in docs.rglob("*.md")]
    pages = [str(path) for path in paths if path.parts[0] != "examples"]  # excluded in mkdocs.yml
    assert sorted(list_navigation(SETTINGS["nav"])) == sorted([*pages, *root_pages.values()])


def test_only_pages_are_published():
    """Python files of docs/ are excluded, and fonts are not loaded from another host."""
    excluded = SETTINGS["exclude_docs"].split()
    scripts = [f"/{path.name}" for path in (ROOT / "docs").glob("*.py")]
    assert set(scripts) <= set(excluded)
    assert SETTINGS["theme"]["font"] is False
