"""A Griffe extension for the API page: docstrings are plain text, and the site expects Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> ).+\n?)*)+", re.MULTILINE)
TABLE = re.compile(r"^(?P<line>\S.*:)\n(?P<table>(?: {4,}\S.*\n?)+)", re.MULTILINE)
CODE_OR_BRACKET = re.compile(r"(`[^`]*`|^```.*?^```$|^ {4}[^\n]*$)|\[", re.MULTILINE | re.DOTALL)


class PlainDocstrings(griffe.Extension):
    """Write doctests and aligned columns as code, and brackets as text: `rows[0][1]` is no link."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        adapt_docstring(obj)

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called for a file: `on_object` is not."""
        adapt_docstring(pkg)


def adapt_docstring(obj: griffe.Object) -> None:
    if obj.docstring:
        text = DOCTEST.sub(write_code, obj.docstring.value)
        text = TABLE.sub(r"\g<line>\n\n\g<table>\n", text)
        obj.docstring.value = CODE_OR_BRACKET.sub(escape_bracket, text)


def write_code(doctest: re.Match) -> str:
    return f"```pycon\n{doctest[0].rstrip()}\n```\n"


def escape_bracket(match: re.Match) -> str:
    return match[1] or r"\["
