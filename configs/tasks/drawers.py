"""The verifier of drawers.yaml."""

from __future__ import annotations

from typing import Any


def score(solution_str: str, extra_info: dict[str, Any], **_: Any) -> float:
    """Return 1 if the answer names what is in the drawer of the row."""
    return float(extra_info["row"]["thing"] in solution_str)
