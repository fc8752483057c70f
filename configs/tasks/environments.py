"""Rows for the recipes openenv, mcp and trl_class, and the reward of mcp."""

from __future__ import annotations

import random
import re

ZONES = {"Tokyo": "Asia/Tokyo", "Nairobi": "Africa/Nairobi", "Dubai": "Asia/Dubai"}
HOURS_AHEAD = {"Tokyo": 9, "Nairobi": 3, "Dubai": 4}  # of UTC; none has summer time


def games(batch: int, size: int, seed: int, pass_rates: object) -> list[dict[str, object]]:
    """Rows without a prompt: `reset` of the OpenEnv server writes it, with the seed of the row."""
    rng = random.Random(f"{seed} {batch}")
    rows: list[dict[str, object]] = []
    for _ in range(size):
        rows.append(
            {"responses_create_params": {"input": []}, "reset": {"seed": rng.randint(0, 999)}}
        )
    return rows


def clocks(batch: int, size: int, seed: int, pass_rates: object) -> list[dict[str, object]]:
    """Questions that mcp-server-time answers."""
    rng = random.Random(f"{seed} {batch}")
    rows: list[dict[str, object]] = []
    for _ in range(size):
        city = rng.choice(sorted(ZONES))
        hour = rng.randint(0, 23)
        question = f"It is {hour:02}:00 in UTC. What time is it in {city} ({ZONES[city]})?"
        answer = f"{(hour + HOURS_AHEAD[city]) % 24:02}:00"
        rows.append({"responses_create_params": {"input": question}, "answer": answer})
    return rows


def score_clock(solution_str: str, ground_truth: str, **_: object) -> float:
    """Pay 1 if the last time in the answer is the right one."""
    times = re.findall(r"\d\d:\d\d", solution_str)
    return float(times[-1:] == [ground_truth])


def accounts(batch: int, size: int, seed: int, pass_rates: object) -> list[dict[str, object]]:
    """Rows for templates/trl_environment.py:Accounts."""
    rng = random.Random(f"{seed} {batch}")
    rows: list[dict[str, object]] = []
    for _ in range(size):
        right = rng.randint(0, 9)
        left = right + 2 * rng.randint(1, 9)
        question = f"The left account has {left}, the right one {right}. Make them equal."
        rows.append({"responses_create_params": {"input": question}, "left": left, "right": right})
    return rows
