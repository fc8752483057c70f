"""Start the verifiers of a recipe as a run does, without Ray, workers or a rollout engine."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from env import Json
from kit.errors import ConfigError
from kit.features import EventLoop
from kit.gym.python_verifiers.pool import make_pools
from kit.gym.servers import GymServers
from kit.gym.verifiers import VerifierRouter, make_verifiers
from kit.rollout.sampling import RolloutContext, make_rollout_context
from kit.runs import isolation
from kit.runs.console import say
from kit.runs.event_loops import make_runner

if TYPE_CHECKING:
    from kit.config.recipe import Recipe
    from kit.rollout.inputs import RunInputs

AGENT_KEYS = ("agent", "agent_config", "environment")


class Started(NamedTuple):
    """Started verifiers, and what sends responses to them."""

    router: VerifierRouter
    context: RolloutContext
    loop: EventLoop


@contextlib.contextmanager
def running_verifiers(recipe: Recipe, inputs: RunInputs) -> Iterator[Started]:
    """Start the Gym servers, judges and processes of a recipe, and stop them at exit.

    Raises ConfigError if the policy is a judge, and GymStartError.
    """
    from kit.runs.launch import Launch, enter  # imports Ray
    from kit.runs.run import Run

    run = Run(recipe)  # never entered: it only names things
    run.folder = run.folder / "probe"
    policy = {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "model": "policy"}
    with contextlib.ExitStack() as stack:
        launch = Launch(run, inputs, stack, policy)
        launch.logs.mkdir(parents=True, exist_ok=True)
        stack.enter_context(isolation.use_own_tmpdir())
        for feature in recipe.features:
            feature.before_gym(launch)
        if launch.serves_policy:
            raise ConfigError(
                "gym.judges has the policy as a judge, and the probe runs no policy. Set base_url "
                "or start for this judge."
            )
        servers = remove_agents(recipe.get("gym.servers"))
        if servers:
            say(f"Starting the Gym servers {', '.join([*servers, *launch.gym_process_names])}")
        group = GymServers(servers, launch.logs, policy, launch.gym_processes)
        stack.callback(group.close)
        group.start()
        urls = group.wait_ready()
        loop = stack.enter_context(make_runner())
        pools = make_pools(recipe, inputs.verifiers.specs, launch.logs)
        router, _ = make_verifiers(recipe, urls, pools)
        for name, server in recipe.gym.servers.items():
            if server.start and server.start.agent:
                router.gym.kinds[name] = "verify"
        enter(router, loop, stack)
        client: Any = None  # nothing is sampled
        yield Started(router, make_rollout_context(recipe, client, inputs, 60.0), loop)


def remove_agents(servers: Json) -> Json:
    """Return the settings of Gym servers without their agents: /verify needs none."""
    servers = copy.deepcopy(dict(servers))
    for server in servers.values():
        for key in AGENT_KEYS:
            (server.get("start") or {}).pop(key, None)
        server.pop("kind", None)
    return servers
