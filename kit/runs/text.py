"""Make text from models and servers safe to print on a terminal."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1: a terminal executes them as commands (ECMA-48)
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def remove_control_characters(text: str) -> str:
    """Return a text without control characters; newlines and tabs stay.

    >>> remove_control_characters("red: \\x1b[31m, bell: \\x07")
    'red: [31m, bell: '
    """
    return CONTROL_CHARACTERS.sub("", text)
