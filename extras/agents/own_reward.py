"""The reward of an agent that is an environment: its function returns a dict with `reward`.

env.verifier=extras/agents/own_reward.py:agent_reward. The dict may have an `answer`, too.
"""

from __future__ import annotations

from typing import Any


def agent_reward(extra_info: dict[str, Any], **_: object) -> dict[str, object]:
    """Return the reward of the agent, and the other numbers of its dict as components.

    Without a reward, as at a limit of the episode, the episode fails.
    """
    result = dict(extra_info.get("agent") or {})
    if not result:
        return {"score": 0.0, "failure_kind": "the agent returned no reward"}
    return {"score": result.pop("reward"), **result}
