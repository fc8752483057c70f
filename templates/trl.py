"""A verifier that calls the reward functions of TRL's GRPOTrainer, unchanged.

    env: {verifier: {function: templates/trl.py:compute_score, reward_funcs: [my_trl.py:brief]}}

`reward_funcs` is FILE:NAME or a list of these, and `reward_weights` are a number for each of them,
1 by default. Rows have TRL's column `prompt`. docs/guides/from_trl.md has an example. If you copy
this file, do not name the copy trl.py: it would hide TRL from the files next to it.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Sequence
from typing import Any

from kit.errors import UserFunctionError
from kit.recipe.python_files import import_callable


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    reward_funcs: str | Sequence[str],
    reward_weights: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return the weighted sum of the rewards as `score`, and each reward under its function's name.

    Each function gets a batch of one completion. As in TRL 1.16 (`_calculate_rewards`), a
    completion is text if the prompt is text, and a list with a message if the prompt has messages.
    All columns of the row except the prompt are further arguments. A reward of None ("does not
    apply") is left out of the sum.

    Raises what a function raises, and UserFunctionError if it cannot be used, or if all rewards are
    None. Then the episode fails, and it is not trained on, as in TRL.
    """
    references = [reward_funcs] if isinstance(reward_funcs, str) else reward_funcs
    columns = dict(extra_info["row"])
    prompt = columns.pop("responses_create_params")["input"]
    message = {"role": "assistant", "content": solution_str}
    completion = solution_str if isinstance(prompt, str) else [message]
    batch = {"prompts": [prompt], "completions": [completion]}
    batch |= {name: [value] for name, value in columns.items()}

    rewards: dict[str, float] = {}
    score = 0.0
    weights = [1.0] * len(references) if reward_weights is None else reward_weights
    if len(weights) != len(references):
        raise UserFunctionError(
            f"reward_weights has {len(weights)} numbers for {len(references)} reward_funcs. "
            "Give each function one weight."
        )
    for reference, weight in zip(references, weights, strict=True):
        reward = await call_function(reference, batch)
        if reward is not None:
            rewards[reference.rpartition(":")[2]] = reward
            score += weight * reward
    if not rewards:
        names = ", ".join(references)
        raise UserFunctionError(
            f"{names} returned None: the row has no reward. Let one of them return a number."
        )
    return {**rewards, "score": score}


async def call_function(reference: str, batch: dict[str, list[Any]]) -> float | None:
    """Call a function or an async function, and return its only reward.

    reference: FILE:NAME. Raises UserFunctionError, and what the function raises.
    """
    function = import_callable(reference)
    try:
        inspect.signature(function).bind(**batch)
    except TypeError as error:
        raise UserFunctionError(
            f"{reference} cannot be called with the columns {', '.join(batch)}: {error}. Add the "
            "column to the rows, or **kwargs to the function."
        ) from None
    rewards = function(**batch)
    if inspect.isawaitable(rewards):
        rewards = await rewards
    try:
        (reward,) = rewards
        return None if reward is None else float(reward)
    except (TypeError, ValueError):
        raise UserFunctionError(
            f"{reference} returned {reprlib.repr(rewards)} for one completion. Return a list with "
            "one number or None."
        ) from None
