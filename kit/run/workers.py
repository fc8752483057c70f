"""Start verl's worker processes, one per GPU: actor, reference, critic, reward model.

Each role is a worker class of verl. Roles without separate GPUs (trainer.resource_pools) share a
process, by verl's create_colocated_worker_cls.

Convenience: a recipe chooses the models and their processes, without code.
"""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any, NamedTuple

import ray
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss

from kit.engine.verl_patches import TIMEOUT_VARIABLE
from kit.recipe.recipe import Recipe
from training import WorkerGroup, Workers


class Role(NamedTuple):
    """A worker class of verl, and the arguments to make a worker of it."""

    worker_class: type
    arguments: dict[str, Any]


def start_workers(recipe: Recipe) -> Workers:
    """Start the workers of a command: without episodes, only the actor.

    The models of a process share one memory allocator. It can return its cached memory before vLLM
    wakes. The actor's models are loaded later, by `init_model()`. The other models are loaded here.
    """
    config = recipe.for_verl()
    arguments = {"config": config.actor_rollout_ref, "role": choose_actor_role(recipe)}
    roles = {"actor": Role(ActorRolloutRefWorker, arguments)}
    roles |= optional_roles(recipe)
    return start_roles(recipe, roles)


def choose_actor_role(recipe: Recipe) -> str:
    """Return verl's name for the models in the actor's worker.

    If a KL term or the advantage needs the frozen reference, the worker also holds it. Exceptions:
    the reference is the base model of a LoRA adapter, a teacher, or on separate GPUs.
    """
    if not recipe.has_episodes:
        return "actor"
    is_elsewhere = recipe.model.lora_rank or recipe.teacher or recipe.trainer.resource_pools.ref
    if recipe.has_reference and not is_elsewhere:
        return "actor_rollout_ref"
    return "actor_rollout"


def optional_roles(recipe: Recipe) -> dict[str, Role]:
    """Return the critic, the reward model and a separate reference, if the recipe needs them."""
    roles: dict[str, Role] = {}
    if recipe.has_critic:  # GAE
        critic = make_value_model_config(recipe)
        roles["critic"] = Role(TrainingWorker, {"config": critic})
    if recipe.has_reward_model:
        reward_model = make_value_model_config(recipe, recipe.reward.reward_model.model_path or "")
        # forward_only: verl loads the model in bf16, and keeps it in host memory while it is idle
        reward_model.engine_config.forward_only = True
        roles["reward_model"] = Role(TrainingWorker, {"config": reward_model})
    teacher = recipe.teacher
    if teacher or (recipe.trainer.resource_pools.ref and recipe.has_reference):
        # The actor's worker cannot hold a teacher: verl 0.9.1 loads the policy's path there.
        ref = recipe.for_verl().actor_rollout_ref
        ref.model.path = teacher or ref.model.path
        ref.model.lora_rank = 0
        roles["ref"] = Role(ActorRolloutRefWorker, {"config": ref, "role": "ref"})
    return roles


def make_value_model_config(recipe: Recipe, path: str = "") -> TrainingWorkerConfig:
    """Convert verl's section `critic` to the configuration of its engine worker.

    path: of another model than the critic's. Source: verl 0.9.1, RayPPOTrainer.init_workers.
    """
    settings = recipe.for_verl("critic")
    if path:
        settings.model.path = path
        settings.model.tokenizer_path = path
    critic = omega_conf_to_dataclass(settings)
    critic.engine.infer_max_token_len_per_gpu = critic.forward_max_token_len_per_gpu
    critic.engine.max_token_len_per_gpu = critic.ppo_max_token_len_per_gpu
    return TrainingWorkerConfig(
        model_type="value_model",
        model_config=critic.model,
        engine_config=critic.engine,
        optimizer_config=critic.optim,
        checkpoint_config=critic.checkpoint,
    )


def start_roles(recipe: Recipe, roles: dict[str, Role]) -> Workers:
    """Start the processes of some roles, and load all models except the actor's.

    roles: the keys are the field names of Workers.
    """
    separate = [name for name in roles if name in recipe.trainer.resource_pools.sizes()]
    colocated = [name for name in roles if name not in separate]
    groups: dict[str, WorkerGroup] = {}
    if colocated:
        groups |= start_group(recipe, {name: roles[name] for name in colocated})
    for name in separate:
        groups |= start_group(recipe, {name: roles[name]})
    workers = Workers(
        actor=groups.get("actor"),  # type: ignore[arg-type]  # None only in tests of the others
        critic=groups.get("critic"),
        reward_model=groups.get("reward_model"),
        ref=groups.get("ref"),
    )
    if workers.critic:
        loss_config = omega_conf_to_dataclass(recipe.for_verl("critic"))
        workers.critic.reset()
        workers.critic.set_loss_fn(functools.partial(value_loss, config=loss_config))
    if workers.reward_model:
        workers.reward_model.reset()
    if workers.ref:
        workers.ref.init_model()
    return workers


def start_group(recipe: Recipe, roles: dict[str, Role]) -> dict[str, WorkerGroup]:
    """Start one process per GPU with all `roles` in it, and return the group of each role."""
    first = next(iter(roles))
    classes = {}
    for name, role in roles.items():
        classes[name] = RayClassWithInitArgs(ray.remote(role.worker_class), **role.arguments)
    is_shared = len(roles) > 1
    worker_class = classes[first]
    if is_shared:
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints the base class
            worker_class = create_colocated_worker_cls(classes)
    processes = [recipe.gpus_per_node(first)] * recipe.trainer.nnodes  # on each node
    group: Any = RayWorkerGroup(  # verl adds the methods of a WorkerGroup at run time
        resource_pool=RayResourcePool(processes, max_colocate_count=1),
        ray_cls_with_init=worker_class,
        device_name=recipe.trainer.device,
        ray_wait_register_center_timeout=recipe.trainer.ray_wait_register_center_timeout,
        worker_env={TIMEOUT_VARIABLE: str(recipe.actor_rollout_ref.nccl_timeout)},
    )
    return group.spawn(classes) if is_shared else {first: group}
