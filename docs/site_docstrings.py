"""A Griffe extension for the API page: docstrings are plain text, and the site expects Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> ).+\n?)*)+", re.MULTILINE)
TABLE = re.compile(r":\n(?P<table>(?: {4,}\S.*\n?)+)", re.MULTILINE)
CODE_OR_BRACKET = re.compile(r"(`[^`]*`|^```.*?^```$)|\[", re.MULTILINE | re.DOTALL)


class PlainDocstrings(griffe.Extension):
    """Write doctests as code, and brackets as text: `rows[0][1]` is no link."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = DOCTEST.sub(write_code, obj.docstring.value)
            text = TABLE.sub(r":\n\n\g<table>\n", text)  # aligned columns, as code
            obj.docstring.value = CODE_OR_BRACKET.sub(escape_bracket, text)


def write_code(doctest: re.Match) -> str:
    return f"```pycon\n{doctest[0].rstrip()}\n```\n"


def escape_bracket(match: re.Match) -> str:
    return match[1] or r"\["
