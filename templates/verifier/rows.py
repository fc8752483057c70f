"""Rows for the server in this folder: the price of a thing, which only the server's tool knows.

    env: {train_files: [{function: "templates/verifier/rows.py:rows", server: shop}]}

/seed_session and /verify get the whole row. The policy gets only `responses_create_params`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

THINGS = ["apple", "book", "brush", "candle", "chair", "clock"]
THINGS += ["cup", "drum", "fork", "glove", "hat", "jar"]
HELD_OUT_THINGS = ["kettle", "lamp", "mug", "pen"]
TOOL = {
    "type": "function",
    "name": "price",
    "description": "The price of a thing.",
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
    },
    "strict": True,
}
EXAMPLE = [  # before the question: a small model copies what it sees
    {"role": "user", "content": "How much does a bell cost?"},
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
    """Generate `size` rows. They depend on the arguments alone (kit/data/generated_rows.py)."""
    rng = random.Random(f"{seed} {batch}")
    things = HELD_OUT_THINGS if held_out else THINGS
    return [make_row(rng.choice(things), rng.randint(10, 99)) for _ in range(size)]


def make_row(item: str, price: int) -> dict[str, Any]:
    """Make the row of one thing and its price."""
    question = {"role": "user", "content": f"How much does a {item} cost?"}
    return {
        "responses_create_params": {"input": [*EXAMPLE, question], "tools": [TOOL]},
        "prices": {item: price},
        "answer": price,
    }
