"""What a run starts, in which order, and how it all ends: Gym servers beside Ray, workers, vLLM, what agents ask.

Each thing is closed by the run's ExitStack, the last one first.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig

from kit import later
from kit.config import checks, user_functions
from kit.config.load import all_gpus, sampling_gpus, to_plain
from kit.cpu import fork_server
from kit.errors import RunError
from kit.extras import images
from kit.extras.judges import judge_proxy
from kit.extras.supervisor import node_monitor, process_monitor
from kit.gym import servers as gym_servers
from kit.runs import private
from kit.runs.preparation import Data
from kit.runs.run_dir import Run

inference, training = later("inference"), later("training")
openai_server, ahead, players = (
    later("kit.rollout.openai_server"),
    later("kit.extras.one_step_off"),
    later("kit.extras.rollout_workers"),
)
monitor = later("kit.extras.monitor")

JOIN_S = 120.0  # that nodes of a cluster may come later than the run
ANSWER_S, TOKEN_S = (
    1800.0,
    0.25,
)  # an answer, or what Gym's agent plays, has so long, and so long a token at least


class Started(NamedTuple):
    """What a run works with: workers (training.Workers) where something is trained, servers (inference.Servers) where
    something is sampled, else None."""

    workers: Any
    servers: Any


def start(run: Run, data: Data, stack: contextlib.ExitStack, sample: bool = True) -> Started:
    """Start what the command needs of Gym servers, Ray, vLLM and training workers; `stack` stops it all.

    sample: False for training without sampling: neither Gym servers nor vLLM.
    """
    config, door = run.config, run.config.gym.policy_endpoint
    port = door.port or gym_servers.free_port(door.host)
    key = os.environ.get("POLICY_API_KEY") or secrets.token_hex(16)
    address = {"base_url": f"http://{door.host}:{port}/v1", "api_key": key, "model": "policy"}
    asked = any((spec.get("start") or {}).get("agent") for spec in config.gym.servers.values())
    asked = asked or "policy" in config.gym.judges.values()  # as a judge
    with run.stage("start"):
        urls, judges = start_outside(run, stack, address if sample else None)
        is_ahead = run.command == "train" and config.trainer.one_step_off == 1
        loop = run.guard.loop = stack.enter_context(ahead.Loop() if is_ahead else asyncio.Runner())
        stack.callback(run.guard.end)  # before the loop is closed
        run.say("starting the workers" + ", and vLLM beside them: about a minute" * sample)
        user_functions.register(
            [config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode]
        )
        workers: Any = None
        if run.trains:  # the actor's models are loaded beside vLLM
            workers = training.start_workers(config, sft=run.command == "sft")
        if not sample:
            workers.actor.init_model()
            training.set_policy_loss(workers.actor, config)
            images.ban(workers, data.tokenizer)
            watch_servers(run, [], stack)
            return Started(workers, None)
        verifiers, measured = players.client_of_gym(
            config, urls, data.tokenizer, run.folder / "logs"
        )
        enter(verifiers, loop, stack)
        run.on_restart, run.gauges = (
            verifiers.gym.restarted,
            lambda: measured.metrics() | judges.metrics(),
        )
        start_vllm = (
            inference.start_servers(config, workers.actor)
            if workers
            else inference.start_sampler(config)
        )
        vllm = loop.run(start_vllm)
        deadline = max(ANSWER_S, TOKEN_S * config.data.max_response_length)
        addresses = dict(zip(vllm.server_addresses, vllm.server_handles, strict=True))
        client = players.Client(config, addresses, is_ahead)
        policy = inference.make_policy(config, client, data, deadline)
        if asked or door.port:
            enter(openai_server.serve(policy, door.host, port, key), loop, stack)
        if workers:
            training.set_policy_loss(workers.actor, config)
            images.ban(workers, data.tokenizer)
        stack.callback(run.guard.end)  # and before all that was opened since
        others = None
        if config.actor_rollout_ref.rollout.agent.num_workers:
            others = players.Players(config, policy, urls, data, run.folder / "logs")
            run.on_restart = others.restarted
            run.gauges = lambda: others.metrics() | judges.metrics()
        watch_servers(run, vllm.server_addresses, stack)
        actor, kind = workers.actor if workers else None, ahead if is_ahead else inference
        return Started(workers, kind.Servers(config, vllm, actor, policy, verifiers, loop, others))


def watch_servers(run: Run, addresses: list[str], stack: contextlib.ExitStack) -> None:
    """What is read of the servers' own pages, and where the run's are read."""
    rollout = run.config.actor_rollout_ref.rollout
    if addresses and checks.drafts_of(run.config):
        others, accepted = run.gauges, monitor.acceptance(addresses)
        run.gauges = lambda: others() | accepted()
    if rollout.prometheus.enable:
        pages = addresses if rollout.name == "vllm" else []
        monitor.serve(run, ray.util.get_node_ip_address(), pages, stack)


def start_outside(
    run: Run, stack: contextlib.ExitStack, policy: dict[str, str] | None
) -> tuple[dict[str, str], judge_proxy.Proxy]:
    """Ray and, beside it, the Gym servers and judges: ({name: url}, what asks the judges).

    policy: what their agents ask; None: no servers.
    """
    logs, config = run.folder / "logs", run.config
    servers, specs = (
        (to_plain(config.gym.servers), to_plain(config.gym.judges)) if policy else ({}, {})
    )
    cpu_dtype = config.actor_rollout_ref.rollout.dtype if config.trainer.device == "cpu" else ""
    judges = stack.enter_context(
        judge_proxy.Proxy(judge_proxy.judges(specs, config.gym.timeout_s, policy, cpu_dtype))
    )
    stack.enter_context(judge_proxy.gpus_taken(specs))
    checkpoints = Path(config.trainer.default_local_dir)
    look = run.guard.watch = stack.enter_context(
        process_monitor.Watch(logs, checkpoints, run.guard.lose)
    )
    modules, fork_from = to_preload(config), None
    if modules:
        fork_from = stack.enter_context(fork_server.serving(modules, logs / "fork.log"))
        look.tell_keeper(folder=os.path.dirname(fork_from[0]))
    if not config.ray_kwargs.ray_init.get("address"):
        stack.enter_context(private.ray_token())
    stack.callback(ray.shutdown)
    stack.callback(run.guard.end)
    named = [*servers, *(f"{name} (a judge)" for name in judges.judges)]
    run.say("starting Ray" + (f", and the Gym servers {', '.join(named)}" if servers else ""))
    restarted = lambda name: run.on_restart(name)  # noqa: E731  (asked when it happens: Gym's client is made later)
    blocks, trust = judges.blocks(), to_plain(config.gym.unchecked_judges)
    started = gym_servers.running_servers(
        servers,
        logs,
        lambda: start_ray(run, fork_from, bool(policy)),
        policy,
        restarted,
        blocks,
        trust,
        run.guard.lose,
    )
    return stack.enter_context(started), judges


def to_preload(config: DictConfig) -> str:
    """What a process is to import that the workers fork from (kit/cpu/fork_server.py); "": they are no forks."""
    elsewhere = config.ray_kwargs.ray_init.get("address")
    return "" if elsewhere else os.environ.get("PRELOAD_MODULES", "")


def begin_imports(config: DictConfig) -> None:
    """Have that process begin, while the recipe is checked."""
    private.check_temporary_folder()
    if modules := to_preload(config):
        fork_server.begin(modules)


def start_ray(run: Run, fork_from: Any, sample: bool) -> None:
    """Ray, and beside its 6 seconds the 10 that importing verl and, to sample, vLLM takes. Raises RunError where it has
    less than is asked for.

    fork_from: what kit/cpu/fork_server.py gives, for workers that fork; None: they import what they need.
    """
    imports = threading.Thread(
        target=_import_all, args=[run.config.actor_rollout_ref.rollout.name if sample else None]
    )
    imports.start()
    assert run.guard.watch
    asked = to_plain(run.config.ray_kwargs.ray_init)
    if asked.get("address"):
        asked = {
            key: value for key, value in asked.items() if key not in ("num_cpus", "num_gpus")
        }  # `ray start` said
    else:
        # a folder that outlasts the run, for the logs; without "local" Ray joins whatever cluster runs here
        asked |= {"_temp_dir": private.make_ray_folder(asked.get("_temp_dir")), "address": "local"}
        python = fork_from[0] if fork_from else sys.executable
        python = shlex.quote(python)  # Ray starts its workers by a shell
        asked["runtime_env"] = {**asked["runtime_env"], "py_executable": python}
    session = ray.init(**asked).address_info["session_dir"]  # type: ignore[attr-defined]
    own = ray._private.worker._global_node.all_processes  # type: ignore[attr-defined]
    if started := own.get("raylet"):  # here, and by this one
        raylet = started[0].process.pid
        run.guard.watch.tell_keeper(name="Ray's raylet", pid=raylet)
        if fork_from:
            job = ray.get_runtime_context().get_job_id()
            secret = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
            fork_from[1](RAY_JOB_ID=job, RAY_RAYLET_PID=str(raylet), **secret)
    else:
        run.guard.watch.elsewhere = node_monitor.Lookouts().look
    run.guard.listen()
    link = run.folder / "logs" / "ray"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(session) / "logs")
    imports.join()
    patience = JOIN_S if run.guard.watch.elsewhere else 0.0
    while (lack := lacking(run.config, ray.cluster_resources(), run.command)) and patience > 0:
        patience -= 1.0
        time.sleep(1.0)
    if lack:
        raise RunError(lack)


def lacking(config: DictConfig, found: Mapping[str, float], command: str) -> str:
    """What Ray has less of than the workers ask for, so that the run would wait for ever; empty if nothing. found: what
    it has of each kind."""
    gpus, cpus, wanted = found.get("GPU", 0), found.get("CPU", 0), all_gpus(config, command)
    alone = config.actor_rollout_ref.rollout.nnodes or command in ("rollout", "evaluate")
    shares = wanted + sampling_gpus(config) * bool(alone and command != "sft")
    if gpus < wanted:
        own = " with trainer.resource_pools and rollout.nnodes"
        own *= wanted > config.trainer.n_gpus_per_node * config.trainer.nnodes
        return (
            f"Ray has {gpus:g} GPUs, trainer.n_gpus_per_node * nnodes{own} = {wanted}: set these, join the other nodes "
            "(`ray start`, ray_kwargs.ray_init.address=auto), or without a GPU add --config configs/machines/cpu.yaml"
        )
    if cpus < shares:
        why = f"one goes to the process on each of {wanted} GPUs" + ", two where vLLM is alone" * (
            shares > wanted
        )
        way_out = f"let them share by ray_kwargs.ray_init.num_cpus={shares}, or join other nodes"
        return f"Ray has {cpus:g} CPUs, and {why}: {way_out}"
    return ""


def _import_all(engine: str | None) -> None:
    """What the run asks for next. engine: rollout.name, or None where nothing is sampled."""
    from verl.workers.rollout.replica import get_rollout_replica_class

    assert training.Workers
    if engine == "hf":
        importlib.import_module("kit.extras.hf_rollout")  # which registers it
    if engine:
        assert inference.rollout
        get_rollout_replica_class(engine)


def enter(context: Any, loop: asyncio.Runner, stack: contextlib.ExitStack) -> None:
    """Open an asynchronous context now, and close it with the run."""
    loop.run(context.__aenter__())
    stack.callback(lambda: loop.run(context.__aexit__(None, None, None)))
