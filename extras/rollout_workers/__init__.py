"""Run episodes in N Ray actors (rollout.agent.num_workers), for batches too large for one process.

Each worker has separate clients of vLLM and of the Gym servers, separate Python verifiers, and an
equal part of all limits of the recipe. A group of episodes goes to one worker. Requests have the
same ids as without workers, so with rollout.full_determinism the tokens are the same for any N. The
policy endpoint for agents stays in the driver. The workers run on the driver's node, since the Gym
servers listen on its loopback address only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kit.engine.interfaces import EpisodeWorkers
from kit.run.features import RunPart

if TYPE_CHECKING:
    from kit.engine.sampling import RolloutContext
    from kit.run.launch import Launch


class RolloutWorkers(RunPart):
    """Episodes in other processes."""

    def start_episode_workers(
        self, launch: Launch, context: RolloutContext, urls: Mapping[str, str]
    ) -> EpisodeWorkers:
        """Start the workers."""
        from extras.rollout_workers import workers

        return workers.RolloutWorkers(
            launch.recipe, context, urls, launch.inputs, launch.logs, launch.run.features.parts
        )
