"""A task from nothing but an idea: a function that makes rows, and a game that plays them, without any server:

    env: {train_files: [{function: templates/task.py:rows, highest: 50}], verifier: templates/task.py:Guess}

Copy it into a file of your own, change it, name that. rows is called for each batch (verl_rows.py), a Guess is made for
each episode (verifier_pool.py); what both must not do is draw from more than they are given.
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
    """`size` rows, whose range grows by 2 with each earlier batch of which more than half was solved."""
    solved = sum(sum(rates.values()) > len(rates) / 2 for rates in pass_rates.values())
    draw, top = random.Random(f"{seed} {batch}"), min(3 + 2 * solved, highest)
    return [
        {"responses_create_params": {"input": []}, "number": draw.randint(1, top), "top": top}
        for _ in range(size)
    ]


class Guess:
    """A number from 1 to `top` in as many turns as halving takes; pays 1, in the turn in which it is found."""

    def reset(self, row: dict[str, Any]) -> str:
        """What is asked; joins the row's `input`, which is empty here."""
        self.number, self.left = row["number"], int(row["top"]).bit_length()
        return f"Guess a number from 1 to {row['top']}."

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """What the policy wrote in this turn, whatever that is -> (observation, reward, done)."""
        self.left -= 1
        said = re.search("[0-9]{1,9}", text)
        if said and int(said[0]) == self.number:
            return None, 1.0, True
        observation = (
            "Say a number." if not said else "Higher." if int(said[0]) < self.number else "Lower."
        )
        return observation, 0.0, self.left == 0
