"""A game of Gymnasium as an environment: the five values of its step become three.

    env: {verifier: "templates/gymnasium_game.py:Blackjack"}

For another game, change its name, the text of a state and the actions. Rows have a `seed`, so that
all episodes of a group get the same game. Install gymnasium next to Quintet.
"""

from __future__ import annotations

from typing import Any

import gymnasium

ACTIONS = {"stick": 0, "hit": 1}


class Blackjack:
    """A game against the dealer. The reward is 1, 0 or -1."""

    def reset(self, row: dict[str, Any]) -> str:
        self.game = gymnasium.make("Blackjack-v1")
        state, _ = self.game.reset(seed=row["seed"])
        return self.describe(state)

    def describe(self, state: tuple[int, int, int]) -> str:
        return f"You have {state[0]}, the dealer shows {state[1]}. Write hit or stick."

    def step(self, text: str) -> tuple[str, float, bool]:
        action = ACTIONS.get(text.strip().lower())
        if action is None:
            return "Write hit or stick.", 0.0, False
        state, reward, terminated, truncated, _ = self.game.step(action)
        return self.describe(state), float(reward), terminated or truncated
