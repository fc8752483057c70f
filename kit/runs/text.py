"""Text that others wrote, made safe for a terminal."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1: a terminal takes them for commands (ECMA-48).
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Remove the control characters of a text; newlines and tabs stay.

    >>> printable("red: \\x1b[31m, bell: \\x07")
    'red: [31m, bell: '
    """
    return CONTROL.sub("", text)
