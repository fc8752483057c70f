"""Rows for the server beside this file: what a thing costs, which only its tool can tell. The recipe names them:

    env: {train_files: [{function: templates/verifier/rows.py:rows, server: shop}]}

All of a row goes to /seed_session and /verify; `responses_create_params` is what the policy is asked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

ITEMS = [
    "apple",
    "book",
    "brush",
    "candle",
    "chair",
    "clock",
    "cup",
    "drum",
    "fork",
    "glove",
    "hat",
    "jar",
]
HELD_OUT = ["kettle", "lamp", "mug", "pen"]
SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOL = {
    "type": "function",
    "name": "price",
    "description": "What a thing costs.",
    "parameters": SCHEMA,
    "strict": True,
}
SHOWN = [  # before the question: a small model copies what it sees
    {"role": "user", "content": "What does a bell cost?"},
    {
        "type": "function_call",
        "call_id": "call_0",
        "name": "price",
        "arguments": '{"item": "bell"}',
    },
    {"type": "function_call_output", "call_id": "call_0", "output": '{"price":52}'},
    {"role": "assistant", "content": "It costs 52."},
]


def rows(
    batch: int,
    size: int,
    seed: int,
    pass_rates: Mapping[int, Mapping[int, float]],
    held_out: bool = False,
) -> list[dict[str, Any]]:
    """`size` rows of a batch, of its arguments alone (kit/data/verl_rows.py)."""
    draw = random.Random(f"{seed} {batch}")
    return [
        row(draw.choice(HELD_OUT if held_out else ITEMS), draw.randint(10, 99)) for _ in range(size)
    ]


def row(item: str, price: int) -> dict[str, Any]:
    asked = [*SHOWN, {"role": "user", "content": f"What does a {item} cost?"}]
    return {
        "responses_create_params": {"input": asked, "tools": [TOOL]},
        "prices": {item: price},
        "answer": price,
    }
