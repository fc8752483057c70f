"""Tests that docs/troubleshooting.md shows messages of the code, and messages name its pages."""

from __future__ import annotations

import ast
import functools
import re

from lab.report.metric_docs import DOCS, STATUSES, find_metric
from tests.helpers.recipes import ROOT, SOURCES

PAGE = ROOT / "docs" / "troubleshooting.md"
# Code in headings that is a message of another program, or a setting.
FOREIGN_MESSAGES = (
    "operator torchvision::nms does not exist",
    "CUDA out of memory",
    "Watchdog caught collective operation timeout",
    "connectFullMesh failed",
    "corrupted compilation artifact",
    'Specified attn_implementation="cpu_packed" is not supported',
    "max_num_gen_batches",
)
PAGE_NAME = re.compile(r'See (docs/[\w/]+\.md)(?:, "([^"]+)")?\.$')  # the end of a message
# Filled in by the code: a value in capitals, a word with the name of a key or file, a stage.
FILLED_IN = re.compile(
    r"\S*\b(?:N|X|KEY|NAME|FILE|ROW|PART|REASON)\b\S*|\S*\w[.=/_]\w\S*|^(?:update|generate)\b"
)


@functools.cache
def list_texts() -> list[str]:
    """The strings of the source code, without docstrings."""
    texts = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node not in docstrings:
                texts += [node.value] if isinstance(node.value, str) else []
    return texts


def read_headings() -> list[str]:
    return re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)


def test_headings_show_messages_that_the_code_can_print():
    """Code in a heading is a message. A heading without code is a symptom without a message."""
    shown = re.findall(r"``? ?([^\n]+?) ?``?(?= |$)", "\n".join(read_headings()), re.MULTILINE)
    assert len(shown) > 40
    source = "\n".join(list_texts())
    unknown = []
    for text in shown:
        if text in STATUSES or find_metric(text) or text in FOREIGN_MESSAGES:
            continue
        for part in FILLED_IN.split(text):
            words = part.strip(" .,:()`")
            if words not in source:
                unknown.append((text, words))
    assert unknown == []
    assert [text for text in FOREIGN_MESSAGES if text not in shown] == []


def list_headings(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def test_pages_and_headings_that_messages_name_exist():
    """A message names its page at the end, always in the same form."""
    texts = [text for text in list_texts() if "docs/" in text]
    assert len(texts) > 30
    assert [text for text in texts if text.count("docs/") != 1 or not PAGE_NAME.search(text)] == []
    for page, heading in {PAGE_NAME.search(text).groups() for text in texts}:
        assert (ROOT / page).is_file(), page
        assert heading is None or heading in list_headings(page), f"{page} has no {heading!r}"


def test_no_two_symptoms_have_the_same_heading():
    assert len(set(read_headings())) == len(read_headings())


def test_statuses_and_exit_statuses_are_explained():
    """The reference has each status of an episode under its name in the code."""
    reference = (ROOT / "docs" / "reference.md").read_text()
    table = reference.partition("## How an episode fails")[2].partition("## ")[0]
    assert [name for name in STATUSES if f"| `{name}` |" not in table] == []
    source = "\n".join(path.read_text() for path in SOURCES)
    raised = set(re.findall(r'\b(?:GymError|ServerDownError)\(\s*"(\w+)"', source))
    raised |= set(re.findall(r'\.status(?:, \S+)* = "(\w+)"', source))
    assert len(raised) > 15
    assert raised - {"ok"} - STATUSES.keys() == set()
    completed = ("http_*", "environment_*")  # by the code
    assert [name for name in STATUSES if f'"{name}"' not in source and name not in completed] == []
    exit_section = reference.partition("## Exit status")[2]
    assert [code for code in DOCS["exits"] if f"| `{code}` |" not in exit_section] == []
    page = PAGE.read_text()
    assert "reference.md#how-an-episode-fails" in page and "reference.md#exit-status" in page
