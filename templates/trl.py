"""A verifier that calls the reward functions of TRL's GRPOTrainer, unchanged.

    env: {verifier: {function: templates/trl.py:compute_score, reward_funcs: [my_trl.py:brief]}}

`reward_funcs` are FILE:NAME, and `reward_weights` are a number for each of them, 1 by default. Rows
have TRL's column `prompt`. docs/guides/from_trl.md has an example. If you copy this file, do not
name the copy trl.py: it would hide TRL from the files next to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kit.config.python_files import import_file


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    reward_funcs: Sequence[str],
    reward_weights: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return the weighted sum of the rewards as `score`, and each reward under its function's name.

    Each function gets a batch of one completion. As in TRL 1.16 (`_calculate_rewards`), a
    completion is text if the prompt is text, and a list with a message if the prompt has messages.
    All columns of the row except the prompt are further arguments. A reward of None ("does not
    apply") is left out of the sum.

    Raises ValueError if all rewards are None. Then the episode fails, and it is not trained on, as
    in TRL.
    """
    columns = dict(extra_info["row"])
    prompt = columns.pop("responses_create_params")["input"]
    message = {"role": "assistant", "content": solution_str}
    completion = solution_str if isinstance(prompt, str) else [message]
    batch = {"prompts": [prompt], "completions": [completion]}
    batch |= {name: [value] for name, value in columns.items()}

    rewards: dict[str, float] = {}
    score = 0.0
    weights = [1.0] * len(reward_funcs) if reward_weights is None else reward_weights
    if len(weights) != len(reward_funcs):
        raise ValueError(
            f"reward_weights has {len(weights)} numbers for {len(reward_funcs)} reward_funcs. "
            "Give each function one weight."
        )
    for reference, weight in zip(reward_funcs, weights, strict=True):
        function = import_function(reference)
        reward = await call_function(function, reference, batch)
        if reward is not None:
            rewards[function.__name__] = reward
            score += weight * reward
    if not rewards:
        raise ValueError(f"{', '.join(reward_funcs)} returned None: the row has no reward")
    return {**rewards, "score": score}


def import_function(reference: str) -> Callable[..., Any]:
    """Import a function by FILE:NAME. Raises AttributeError, OSError, and what the file raises."""
    path, _, name = reference.rpartition(":")
    function: Callable[..., Any] = getattr(import_file(Path(path).resolve()), name)
    return function


async def call_function(
    function: Callable[..., Any], reference: str, batch: dict[str, list[Any]]
) -> float | None:
    """Call a function or an async function, and return its only reward. Raises ValueError."""
    rewards = function(**batch)
    if inspect.isawaitable(rewards):
        rewards = await rewards
    if len(rewards) != 1:
        raise ValueError(f"{reference} returned {len(rewards)} rewards for one completion")
    return None if rewards[0] is None else float(rewards[0])
