"""An environment class as for TRL's GRPOTrainer (environment_factory). It needs no TRL.

    env: {environment: {trl_class: "templates/trl_environment.py:Accounts"}}

Each public method besides `reset` and `get_reward` is a tool. Its type hints and its docstring
become the description that the model reads.
"""

from __future__ import annotations


class Accounts:
    """Move money until the right account has the goal, or as much as the left one."""

    def reset(self, left: int, right: int, goal: int | None = None, **_: object) -> None:
        self.left = left
        self.right = right
        self.goal = goal

    def move(self, amount: int) -> str:
        """Move money from the left account to the right one.

        Args:
            amount: how much to move, negative for the other direction
        """
        if amount > self.left or -amount > self.right:
            raise ValueError("there is not so much money")  # the model reads it
        self.left -= amount
        self.right += amount
        return f"left {self.left}, right {self.right}"

    def get_reward(self) -> float:
        return float(self.right == (self.left if self.goal is None else self.goal))
