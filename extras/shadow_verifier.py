"""A second verifier that is never trained on (env.shadow_verifier), to see if the first is fooled.

Each verified episode gets a second reward, in `Episode.measures`. If the reward rises and the
shadow reward does not, the policy learns to please the first verifier and not to solve the task:
the report then has a finding. Rewards, advantages and filters do not see the shadow reward. If the
shadow verifier fails, the episode stays as it is, and `rollout/shadow_failed/mean` counts it.

A function gets the policy's last turn, as env.verifier does. A class is reset with the row and gets
all turns of the policy, and its rewards are added. The name of one of gym.servers is that server.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import gym_client
from gym_client import VerifyResult
from kit.errors import ConfigError, RunError, UserFunctionError
from kit.run.features import RecipeCheck, RunPart

if TYPE_CHECKING:
    from gym_client import Gym
    from kit.data.episode import Episode
    from kit.engine.inputs import RunInputs
    from kit.recipe.recipe import Recipe
    from kit.recipe.settings import Settings
    from kit.verify.python_verifiers.settings import VerifierSpec

KEY = "env.shadow_verifier"
POOL = "shadow_verifier"  # its name among the verifiers of the run
REWARD = "shadow_reward"
GAP = "shadow_gap"  # the reward minus the shadow reward
FAILED = "shadow_failed"  # 1 if the shadow verifier failed, otherwise 0
logger = logging.getLogger(__name__)


class ShadowVerifier(RecipeCheck, RunPart):
    """The second verifier of a run.

    spec: of the Python verifier, None if it is a Gym server. problem: of the key, or empty.
    """

    def __init__(self, settings: Settings):
        from kit.verify.python_verifiers.settings import read_spec

        value = settings.env.shadow_verifier
        self.name = POOL
        self.spec: VerifierSpec | None = None
        self.problem = ""
        if isinstance(value, str) and value in settings.gym.servers:
            self.name = value
            return
        try:
            self.spec = read_spec(value or "", KEY)
        except (UserFunctionError, ConfigError) as error:
            self.problem = str(error)

    def check_settings(self, settings: Settings) -> Iterable[str]:
        """Return the problem of the key, if there is one."""
        return [self.problem] if self.problem else []

    def verifiers(self) -> Mapping[str, VerifierSpec]:
        """Return the Python verifier."""
        return {POOL: self.spec} if self.spec else {}

    def check_inputs(self, recipe: Recipe, inputs: RunInputs) -> None:
        """Call the Python verifier for a row of each data source. Raises UserFunctionError."""
        if self.spec is None or not inputs.tasks:
            return
        from kit.run.verifier_trial import check_verifiers

        tasks = [dataclasses.replace(task, server=self.name) for task in inputs.tasks]
        check_verifiers({self.name: self.spec}, tasks, recipe)

    def summary_lines(self, recipe: Recipe, inputs: RunInputs) -> Iterable[str]:
        """Return the line of the summary."""
        return [f"shadow      {self.spec or self.name}: logged, never trained on"]

    async def after_episode(self, episode: Episode, gym: Gym) -> None:
        """Add the second reward to a verified episode, or count the failure."""
        try:
            reward = await score(self, episode, gym)
        except Exception as error:  # whatever it is, it must not change the episode
            episode.measures[FAILED] = 1.0
            logger.warning("%s=%s: %s", KEY, self.spec or self.name, error)
            return
        episode.measures[FAILED] = 0.0
        episode.measures[REWARD] = reward
        if episode.reward is not None:
            episode.measures[GAP] = episode.reward - reward


async def score(feature: ShadowVerifier, episode: Episode, gym: Gym) -> float:
    """Return the second reward of an episode. Raises GymError, RunError."""
    async with gym.session(feature.name, episode.row) as session:
        if session.kind == "verify":
            response = gym_client.make_response(episode.output)
            result: VerifyResult = await session.verify(response, episode.responses[-1])
            return result.reward
        if feature.spec is None:
            raise RunError(f"{feature.name} plays turns. Name a server that only verifies.")
        reward = 0.0
        for turn in episode.responses:
            step = await session.step({}, turn)
            reward += step.reward
            if step.terminated:
                break
        return reward
