"""One-step off-policy training (trainer.one_step_off: 1): sample the next batch during an update.

    step k: collect batch k, started a step ago | start batch k+1 | update | update_weights | ...

The servers stay awake. `update_weights` interrupts the responses in progress. vLLM aborts their
requests and loads the new weights. Then kit/engine/client.py requests the rest of each response:
the tokens sampled so far become the end of its prompt. So the weights that sample a token are at
most one step older than the weights that it updates. `Episode.policy_versions` records the former,
and `rollout/staleness/*` counts the steps. configs/ahead.yaml corrects for staleness with
importance weights of tokens.

An evaluation waits for the batch in progress. Checkpoints do not contain that batch: a resumed run
samples its prompts again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kit.recipe.keys import ROLLOUT
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck, RunPart

if TYPE_CHECKING:
    from extras.one_step_off.servers import BackgroundLoop, Servers


class OneStepOff(RecipeCheck, RunPart):
    """Sampling one step ahead."""

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Check that trainer.one_step_off fits the rollout engine."""
        rollout = settings.rollout
        if rollout.free_cache_engine and not rollout.nnodes:
            yield (
                "trainer.one_step_off=1 samples during the update, but "
                f"{ROLLOUT}.free_cache_engine=true makes the rollout engine sleep. Set one of them "
                "to false."
            )
        elif rollout.full_determinism:
            yield (
                "trainer.one_step_off=1 cannot repeat at which token new weights arrive, which "
                f"{ROLLOUT}.full_determinism=true requires. Set one of them to false."
            )

    def make_loop(self) -> BackgroundLoop:
        """Return an event loop that also runs while the driver waits for an update."""
        from extras.one_step_off.servers import BackgroundLoop

        return BackgroundLoop()

    def servers_class(self) -> type[Servers]:
        """Return the class that samples ahead."""
        from extras.one_step_off.servers import Servers

        return Servers
