"""A new task in one file: a function that generates rows, and a game to play. It needs no server.

    env: {train_files: [{function: "templates/task.py:rows"}], verifier: "templates/task.py:Guess"}

To use your own: copy this file, change it, and name your copy in the recipe. `rows` is called for
each batch (kit/data/generated_rows.py). A `Guess` is made for each episode
(kit/verify/python_verifiers/__init__.py). Seed all randomness with the arguments of `rows`, or with
the row. Then a resumed run is the same run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any


def rows(
    batch: int,
    size: int,
    seed: int,
    pass_rates: Mapping[int, Mapping[int, float]],
    highest: int = 99,
) -> list[dict[str, Any]]:
    """Generate `size` rows. The range of numbers grows as the policy gets better.

    The first range is 1 to 3. Each earlier batch with a pass rate over one half adds 2 to its end,
    up to `highest`.
    """
    solved_batches = 0
    for rates in pass_rates.values():
        if sum(rates.values()) > len(rates) / 2:
            solved_batches += 1
    top = min(3 + 2 * solved_batches, highest)
    rng = random.Random(f"{seed} {batch}")
    return [make_row(rng.randint(1, top), top) for _ in range(size)]


def make_row(number: int, top: int) -> dict[str, Any]:
    """Make a row without a prompt: the game writes it."""
    return {"responses_create_params": {"input": []}, "number": number, "top": top}


class Guess:
    """Guess a number from 1 to `top`, in as many turns as bisection needs. The reward is 0 or 1."""

    def reset(self, row: dict[str, Any]) -> str:
        """Start an episode, and return the prompt. Quintet adds it to the row's `input`."""
        self.number = int(row["number"])  # raises if there is none: the row is at fault
        self.turns_left = int(row["top"]).bit_length()
        return f"Guess a number from 1 to {row['top']}."

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Play a turn with any text of the policy. Returns (observation, reward, done)."""
        self.turns_left -= 1
        is_done = self.turns_left == 0
        match = re.search("[0-9]{1,9}", text)
        if match is None:
            return "Say a number.", 0.0, is_done
        guess = int(match[0])
        if guess == self.number:
            return None, 1.0, True
        observation = "Higher." if guess < self.number else "Lower."
        return observation, 0.0, is_done
