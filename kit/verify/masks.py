"""Fields by which single verifiers of Gym mark their reward as invalid.

Protects: rewards of a verifier whose judge, tool or sandbox failed count as failures.
"""

from __future__ import annotations

from collections.abc import Callable

import gym_client
from gym_client import Json, find_nested


def find_mask(body: Json) -> str:
    """Return the name of the field that marks the reward of an answer as invalid, or ""."""
    mask = gym_client.find_general_mask(body)
    if mask:
        return mask
    if "isr_counted" in body and body.get("n_error"):  # agentif: checks without a result
        return "n_error"
    return next((name for name, has_failed in FAILURES.items() if has_failed(body.get(name))), "")


def has_error(evaluation: object) -> bool:
    """Return whether the record of a judge's evaluation has an error."""
    return bool(find_nested(evaluation, "error"))


def lacks_verdict(verdicts: object) -> bool:
    """Return whether a verdict is null in {check: verdict}, or in [{"verdict": verdict}]."""
    if isinstance(verdicts, dict):
        return None in verdicts.values()
    games = verdicts if isinstance(verdicts, list) else []
    return any(isinstance(game, dict) and game.get("verdict", "") is None for game in games)


# Fields by which verifiers report that their judge, a tool or a sandbox failed, and whether a value
# does so.
FAILURES: dict[str, Callable[[object], bool]] = {
    "judge_error": bool,  # finance_agent_v2, longmemeval
    "invalid_judge_response": bool,  # gdpval
    "judge_evaluation": has_error,  # over_refusal_detection, jailbreak_detection
    "quality_judge_evaluation": has_error,  # jailbreak_detection
    "verifier_labels": lacks_verdict,  # jailbreak_detection
    "games": lacks_verdict,  # arena
    "proof_status": lambda value: bool(value == "error"),  # math_formal_lean
    "num_steps_total": lambda value: bool(value == 0),  # scicode
}
