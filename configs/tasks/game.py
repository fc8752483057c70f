"""The game of guess.yaml: find a number from 1 to 7 in three guesses, with hints.

Each hint can rule out half of the numbers, so three guesses are enough for all of them.
"""

from __future__ import annotations

import re
from typing import Any

NUMBERS = range(1, 8)


class Guess:
    """A game. The reward of the last turn is 1 if the number was found, else 0."""

    def reset(self, row: dict[str, Any]) -> None:
        self.number = row["number"]
        self.guesses_left = 3

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return the hint, the reward, and whether the game ends."""
        self.guesses_left -= 1
        match = re.fullmatch(r"\s*(\d+)\.?\s*", text)
        guess = int(match[1]) if match else None
        if guess == self.number:
            return None, 1.0, True
        if self.guesses_left == 0:
            return None, 0.0, True
        if guess is None:
            return "Answer only with a number.", 0.0, False
        return f"My number is {'larger' if guess < self.number else 'smaller'}.", 0.0, False
