"""Start the processes of a run in their order: Gym servers and Ray, workers, the rollout engine.

The run's ExitStack stops them in reverse order. Importing verl and vLLM takes 10 s, so functions
import them late, while Ray starts. Optional features take part (features.py).

Protects: the machine and other runs: everything that starts is stopped, in reverse order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ray

from env import Json
from gym_client import RUNS_EPISODES
from kit.engine.endpoint.sessions import Sessions
from kit.engine.inputs import RunInputs
from kit.engine.interfaces import EventLoop
from kit.engine.sampling import make_rollout_context
from kit.errors import RunError
from kit.recipe import user_functions
from kit.recipe.keys import MODEL
from kit.recipe.model_files import download_models
from kit.recipe.recipe import Recipe
from kit.run import isolation
from kit.run.console import say
from kit.run.event_loops import make_runner
from kit.run.run import Run
from kit.verify import network
from kit.verify.python_verifiers.pool import make_pools
from kit.verify.server_process import ProcessSpec
from kit.verify.servers import GymServers
from kit.verify.verifiers import make_verifiers

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerManager

    from inference import Servers
    from kit.engine.sampling import RolloutContext
    from training import Workers

Result = TypeVar("Result")
JOIN_S = 120.0  # seconds to wait for nodes of a cluster that join after the run starts
# Timeout of one response, or of an agent's episode: the larger of these two
MIN_RESPONSE_S = 1800.0
TOKEN_S = 0.25  # for each token of the longest response


class Started(NamedTuple):
    """The started parts of a run."""

    workers: Workers | None  # None if the command trains nothing
    servers: Servers | None  # None if nothing is sampled


class PolicyEndpoint(NamedTuple):
    """The address at which agents and judges reach the policy (OpenAI-compatible)."""

    host: str
    port: int
    api_key: str

    def as_server(self) -> dict[str, str]:
        """Return the endpoint in the form of Gym's configuration."""
        base_url = f"http://{self.host}:{self.port}/v1"
        return {"base_url": base_url, "api_key": self.api_key, "model": "policy"}


@dataclasses.dataclass
class Launch:
    """A run while it starts, for optional features."""

    run: Run
    inputs: RunInputs
    stack: contextlib.ExitStack
    policy: dict[str, str] | None  # the policy endpoint; None if nothing is sampled
    # further processes to start with the Gym servers, and their names for the console
    gym_processes: list[ProcessSpec] = dataclasses.field(default_factory=list)
    gym_process_names: list[str] = dataclasses.field(default_factory=list)
    serves_policy: bool = False  # whether a feature calls the policy endpoint
    sessions: Sessions = dataclasses.field(default_factory=Sessions)  # of the policy endpoint
    python: str = sys.executable  # the interpreter of Ray's workers
    worker_variables: dict[str, str] = dataclasses.field(default_factory=dict)  # environment
    gym_servers: GymServers | None = None  # those that the run starts
    # to call when Ray runs, with the raylet's process id; None if this machine did not start Ray
    on_ray: list[Callable[[int | None], None]] = dataclasses.field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        """Return the recipe of the run."""
        return self.run.recipe

    @property
    def logs(self) -> Path:
        """Return the folder for logs."""
        return self.run.folder / "logs"


def start(
    run: Run, inputs: RunInputs, stack: contextlib.ExitStack, samples: bool = True
) -> Started:
    """Start the Gym servers, Ray, the rollout engine and the training workers that a command needs.

    samples: False to train without sampling. Then no Gym server and no rollout engine starts.
    `stack` stops all processes.
    """
    recipe = run.recipe
    endpoint = make_policy_endpoint(recipe)
    launch = Launch(run, inputs, stack, endpoint.as_server() if samples else None)
    with run.stage("start"):
        isolation.check_limits()
        launch.worker_variables |= download_models(recipe, say)
        urls = start_servers_and_ray(launch)
        other_loop = first_not_none(part.make_loop() for part in run.features.parts)
        loop: EventLoop = other_loop or make_runner()
        stack.enter_context(loop)
        run.stages.loop = loop
        stack.callback(run.stages.begin_shutdown)  # runs before the loop is closed
        engine_note = " and the rollout engine (about 1 min)" if samples else ""
        say(f"Starting training workers{engine_note}")
        user_functions.register_in_verl(
            recipe.algorithm.adv_estimator, recipe.actor.policy_loss.loss_mode
        )
        workers: Workers | None = None
        if recipe.trains:  # their models are loaded while the rollout engine starts
            from kit.run.workers import start_workers

            workers = start_workers(recipe)
        if workers and not samples:
            workers.actor.init_model()
            finish_workers(launch, workers)
            for part in run.features.parts:
                part.after_start(launch, [])
            return Started(workers, None)
        servers = start_sampling(launch, workers, loop, urls, endpoint)
        return Started(workers, servers)


def start_sampling(
    launch: Launch,
    workers: Workers | None,
    loop: EventLoop,
    urls: Mapping[str, str],
    endpoint: PolicyEndpoint,
) -> Servers:
    """Start the verifiers' clients and the rollout engine."""
    import inference
    from kit.engine.endpoint import server as endpoint_server

    run = launch.run
    recipe = launch.recipe
    parts = run.features.parts
    specs = dict(launch.inputs.verifiers.specs)
    for part in parts:
        specs |= part.verifiers()
    pools = make_pools(recipe, specs, launch.logs)
    verifiers, limits = make_verifiers(recipe, urls, pools)
    enter(verifiers, loop, launch.stack)
    actor = workers.actor if workers else None
    if actor:
        manager = loop.run(inference.start_servers(recipe, actor))
    else:
        manager = loop.run(inference.start_standalone_servers(with_merged_adapter(launch)))
    context = connect_to_engine(launch, manager)
    if serves_agents(launch):
        address = (endpoint.host, endpoint.port, endpoint.api_key)
        server = endpoint_server.serve(context, *address, launch.sessions)
        enter(server, loop, launch.stack)
    if workers:
        finish_workers(launch, workers)
    launch.stack.callback(run.stages.begin_shutdown)  # runs before all of the above is closed
    episode_workers = first_not_none(
        part.start_episode_workers(launch, context, urls) for part in parts
    )
    assert launch.gym_servers
    if episode_workers:
        launch.gym_servers.on_restart = episode_workers.mark_restarted
        run.log.gauges.append(episode_workers.metrics)
    else:
        launch.gym_servers.on_restart = verifiers.gym.mark_restarted
        run.log.gauges.append(limits.metrics)
    for part in parts:
        part.after_start(launch, manager.server_addresses)
    other_class = first_not_none(part.servers_class() for part in parts)
    servers_class = other_class or inference.Servers
    gym: Any = verifiers  # it has the methods of gym_client.Gym
    return servers_class(recipe, manager, actor, context, gym, loop, episode_workers)


def with_merged_adapter(launch: Launch) -> Recipe:
    """Return the recipe for a rollout engine without a trainer, which reads the model's folder.

    With model.lora_adapter_path, that is a merged copy of the model, which is deleted with the run.
    """
    recipe = launch.recipe
    if not recipe.model.lora_adapter_path:
        return recipe
    from kit.run.export import write_merged

    target = launch.run.folder / "merged_model"
    launch.stack.callback(shutil.rmtree, target, ignore_errors=True)
    say(f"Merging {recipe.model.lora_adapter_path} into a copy of the model, {target}")
    model = recipe.model
    adapter = model.lora_adapter_path or ""
    write_merged(model.path, adapter, recipe.rollout.dtype, target, model.trust_remote_code)
    return recipe.change(
        f"{MODEL}.path={target.absolute()}",
        f"{MODEL}.lora_adapter_path=null",
        f"{MODEL}.lora_rank=0",
    )


def make_policy_endpoint(recipe: Recipe) -> PolicyEndpoint:
    """Return the address and key of the policy endpoint: by default a free port and a new key."""
    settings = recipe.gym.policy_endpoint
    port = settings.port or network.find_free_port(settings.host)
    key = os.environ.get("POLICY_API_KEY") or secrets.token_hex(16)
    return PolicyEndpoint(settings.host, port, key)


def serves_agents(launch: Launch) -> bool:
    """Return whether an agent, a feature or the user's client calls the policy endpoint."""
    settings = launch.recipe.gym
    has_agent = any(server.kind in RUNS_EPISODES for server in settings.servers.values())
    return bool(has_agent or launch.serves_policy or settings.policy_endpoint.port)


def connect_to_engine(launch: Launch, manager: LLMServerManager) -> RolloutContext:
    """Return the client of the rollout engine, with its timeouts."""
    from kit.engine.client import Client

    recipe = launch.recipe
    addresses = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
    is_one_step_off = recipe.command == "train" and recipe.trainer.one_step_off == 1
    client = Client(recipe, addresses, is_one_step_off)
    timeout_s = max(MIN_RESPONSE_S, TOKEN_S * recipe.data.max_response_length)
    parts = launch.run.features.parts
    after_episode = [part.after_episode for part in parts]
    context = make_rollout_context(recipe, client, launch.inputs, timeout_s, after_episode)
    context.agent = first_not_none(part.make_agent(launch, context) for part in parts)
    return context


def finish_workers(launch: Launch, workers: Workers) -> None:
    """Send the loss to the workers and mask image placeholders. Their models must be loaded."""
    import training
    from kit.run.finite_check import ask_engines, read_packing_note

    for note in ask_engines(workers, read_packing_note, workers._fields):
        say(f"NOTE        {note}")

    training.set_policy_loss(workers.actor, launch.recipe)
    launch.inputs.processor.mask_placeholders(workers)


# --- Gym servers and Ray -------------------------------------------------------------------------


def start_servers_and_ray(launch: Launch) -> Mapping[str, str]:
    """Start the Gym servers, and Ray while they import their packages. Return {server: url}."""
    run = launch.run
    recipe = launch.recipe
    servers = recipe.gym.servers if launch.policy else {}
    tmpdir = launch.stack.enter_context(isolation.use_own_tmpdir())
    for part in run.features.parts:
        part.before_ray(launch)
    for part in run.features.parts:
        part.before_gym(launch)
    if run.stages.monitor:
        run.stages.monitor.register_folder(tmpdir)
    if not recipe.ray_kwargs.ray_init.get("address"):
        launch.stack.enter_context(isolation.set_ray_token())
    launch.stack.callback(ray.shutdown)
    launch.stack.callback(run.stages.begin_shutdown)
    names = ", ".join([*servers, *launch.gym_process_names])
    say(f"Starting Ray and the Gym servers {names}" if servers else "Starting Ray")
    group = GymServers(servers, launch.logs, launch.policy, launch.gym_processes)
    launch.gym_servers = group
    launch.stack.callback(group.close)
    group.start()
    start_ray(launch)
    return group.wait_ready()


def start_ray(launch: Launch) -> None:
    """Start Ray, or connect to a cluster, and import verl and the rollout engine while it starts.

    Ray takes 6 s, the imports 10 s. Raises RunError if Ray has less than the run needs.
    """
    run = launch.run
    recipe = launch.recipe
    # If Ray does not start, this also waits for the imports: at Python's exit they would fail.
    with ThreadPoolExecutor(1) as imports:
        importing = imports.submit(import_engine, launch)
        settings = ray_settings(launch)
        with isolation.show_logical_gpus(launch.recipe.trainer.device):
            session = init_ray(settings)
        processes = ray._private.worker._global_node.all_processes  # type: ignore[attr-defined]
        raylets = processes.get("raylet")  # of a Ray that this process started
        raylet_pid = raylets[0].process.pid if raylets else None
        for call in launch.on_ray:
            call(raylet_pid)
        run.stages.install_handlers()  # Ray replaced them
        link = launch.logs / "ray"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(session) / "logs")
        importing.result()
    wait_for_resources(recipe, 0.0 if raylets else JOIN_S)


def init_ray(settings: Json) -> str:
    """Start or join Ray, and return the folder of its session. Raises RunError."""
    try:
        context: Any = ray.init(**settings)  # its type depends on the address
    except Exception as error:  # Ray raises this class if, for example, the start times out
        reason = " ".join(str(error).split()) or repr(error)
        problem = "Ray did not start"
        if settings["address"] != "local":
            problem = f"Ray at ray_kwargs.ray_init.address={settings['address']} cannot be joined"
        raise RunError(
            f"{problem}: {reason:.300} Check `ray status`, or the logs in session_latest/logs of "
            f'{isolation.FOLDER_KEY}. See docs/troubleshooting.md, "Ray".'
        ) from error
    return str(context.address_info["session_dir"])


def ray_settings(launch: Launch) -> Json:
    """Return the arguments of ray.init."""
    settings = dict(launch.recipe.ray_kwargs.ray_init)
    if settings.get("address"):
        # `ray start` has set these
        return {name: settings[name] for name in settings if name not in ("num_cpus", "num_gpus")}
    settings["_temp_dir"] = isolation.make_ray_folder(settings.get("_temp_dir"))
    settings["address"] = "local"  # otherwise Ray joins any cluster that runs on this machine
    python = shlex.quote(launch.python)  # Ray starts its workers through a shell
    environment = settings["runtime_env"]
    variables = environment["env_vars"] | launch.worker_variables
    settings["runtime_env"] = {**environment, "env_vars": variables, "py_executable": python}
    return settings


def import_engine(launch: Launch) -> None:
    """Import the modules that the run needs next, which takes 10 s."""
    from verl.workers.rollout.replica import get_rollout_replica_class

    import training  # noqa: F401

    if launch.policy:
        import inference  # noqa: F401

        get_rollout_replica_class(launch.recipe.rollout.name)


def wait_for_resources(recipe: Recipe, patience_s: float) -> None:
    """Wait until Ray has the GPUs and CPUs that the workers need. Raises RunError."""
    deadline = time.monotonic() + patience_s
    while True:
        problem = find_missing_resources(recipe, ray.cluster_resources())
        if not problem:
            return
        if time.monotonic() >= deadline:
            raise RunError(problem)
        time.sleep(1.0)


def find_missing_resources(recipe: Recipe, resources: Mapping[str, float]) -> str:
    """Describe the resources that Ray lacks. Empty if it lacks none.

    The workers would wait for them forever. resources: {"GPU": count, "CPU": count} of the cluster.
    """
    gpus = resources.get("GPU", 0)
    needed = recipe.all_gpus
    plural = "" if needed == 1 else "s"
    if not gpus and needed:
        return (
            f"The recipe needs {needed} GPU{plural}, and Ray found none. To train on a CPU, add "
            "--config cpu."
        )
    if gpus < needed:
        return (
            f"The recipe needs {needed} GPU{plural} (trainer.n_gpus_per_node * trainer.nnodes, and "
            f"separate pools), and Ray has {gpus:g}. Lower trainer.n_gpus_per_node, list more in "
            "CUDA_VISIBLE_DEVICES, or join more nodes (ray_kwargs.ray_init.address=auto)."
        )
    processes = needed
    if not recipe.trains or (recipe.rollout.nnodes and recipe.has_episodes):
        processes += recipe.rollout_gpus  # where the rollout engine is alone, it takes two
    cpus = resources.get("CPU", 0)
    if cpus < processes:
        return (
            f"Ray has {cpus:g} CPUs, and the process of each of {needed} GPUs takes one. Set "
            f"ray_kwargs.ray_init.num_cpus={processes} to share them, or join more nodes."
        )
    return ""


def first_not_none(results: Iterable[Result | None]) -> Result | None:
    """Return the first result that is not None, if there is one."""
    return next((result for result in results if result is not None), None)


def enter(
    context: AbstractAsyncContextManager[object], loop: EventLoop, stack: contextlib.ExitStack
) -> None:
    """Open an asynchronous context now, and close it with the run."""
    loop.run(context.__aenter__())

    def leave() -> None:
        loop.run(context.__aexit__(None, None, None))

    stack.callback(leave)
