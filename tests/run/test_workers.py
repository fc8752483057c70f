"""Tests of a recipe's worker processes: pools, roles and settings. Doubles replace Ray."""

from __future__ import annotations

from typing import Any

import pytest
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import value_loss

from kit.engine.verl_patches import TIMEOUT_VARIABLE
from kit.recipe.recipe import Recipe
from kit.run import workers as worker_module
from kit.run.workers import make_value_model_config, optional_roles, start_workers
from tests.helpers.recipes import changed, load
from training import Workers

TEACHER = "distillation.teacher_models.teacher_model.model_path"
KL = "algorithm.use_kl_in_reward=true"
GAE = "algorithm.adv_estimator=gae"


class RoleGroup:
    """A group of worker processes with one role."""

    def __init__(self, part: Any):
        self.part = part
        self.calls: list[str] = []

    def reset(self):
        self.calls.append("reset")

    def init_model(self):
        self.calls.append("init_model")

    def set_loss_fn(self, loss):
        self.calls.append("set_loss_fn")
        self.loss = loss


class ProcessGroup(RoleGroup):
    """A double of RayWorkerGroup. `started` has all of them, with their arguments."""

    started: list[ProcessGroup]

    def __init__(self, **arguments):
        super().__init__(arguments["ray_cls_with_init"])
        self.arguments = arguments
        ProcessGroup.started.append(self)

    def spawn(self, parts):
        assert self.part == {"colocated": parts}
        self.children = {name: RoleGroup(part) for name, part in parts.items()}
        return self.children


@pytest.fixture
def groups(monkeypatch) -> list[ProcessGroup]:
    """Return the groups that were started."""

    def colocate(parts):
        print("the base class")
        return {"colocated": parts}

    def make_pool(processes, max_colocate_count):
        return processes, max_colocate_count

    ProcessGroup.started = []
    monkeypatch.setattr(worker_module, "RayWorkerGroup", ProcessGroup)
    monkeypatch.setattr(worker_module, "RayResourcePool", make_pool)
    monkeypatch.setattr(worker_module, "create_colocated_worker_cls", colocate)
    monkeypatch.setattr(worker_module.ray, "remote", lambda worker: worker)
    return ProcessGroup.started


@pytest.fixture(scope="module")
def recipe(workspace) -> Recipe:
    """Return the tiny recipe on two nodes of three GPUs."""
    recipe = load(workspace)[0]
    sizes = [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=3",
        "trainer.ray_wait_register_center_timeout=77",
    ]
    return changed(recipe, *sizes)


@pytest.fixture
def reward_model_settings(workspace) -> list[str]:
    """Return the settings of a reward model."""
    return [
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={workspace / 'scored'}",
    ]


# --- processes -----------------------------------------------------------------------------------


def test_grpo_starts_one_group_with_only_the_actor(recipe, groups):
    workers = start_workers(recipe)
    [group] = groups
    assert workers == Workers(group, None, None, None) and group.calls == []
    assert group.part.cls is ActorRolloutRefWorker
    config = recipe.for_verl("actor_rollout_ref")
    assert group.part.kwargs == {"config": config, "role": "actor_rollout"}
    assert group.arguments["resource_pool"] == ([3, 3], 1)
    assert group.arguments["device_name"] == "cpu"
    assert group.arguments["ray_wait_register_center_timeout"] == 77


def test_a_critic_on_separate_gpus_is_a_separate_group(recipe, groups):
    changes = ["trainer.resource_pools.critic=2", "actor_rollout_ref.nccl_timeout=5400"]
    workers = start_workers(changed(recipe, GAE, *changes))
    actor, critic = groups
    assert workers == Workers(actor, critic, None, None)
    assert critic.arguments["resource_pool"] == ([2, 2], 1) and critic.part.cls is TrainingWorker
    assert critic.calls == ["reset", "set_loss_fn"] and actor.calls == []
    variables = [group.arguments["worker_env"] for group in groups]
    assert variables == [{TIMEOUT_VARIABLE: "5400"}] * 2


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        ([], "actor_rollout"),
        ([KL], "actor_rollout_ref"),
        # the reference is the model below the adapter
        ([KL, "actor_rollout_ref.model.lora_rank=8"], "actor_rollout"),
        ([KL, "trainer.resource_pools.ref=1"], "actor_rollout"),
        ([KL, "distillation.enabled=true", f"{TEACHER}=teacher"], "actor_rollout"),
    ],
)
def test_the_actors_processes_hold_the_reference_unless_it_is_a_separate_model(
    recipe, groups, changes, role
):
    start_workers(changed(recipe, *changes))
    parts = groups[0].part
    actor = parts["colocated"]["actor"] if isinstance(parts, dict) else parts
    assert actor.kwargs["role"] == role


def test_sft_starts_only_the_actor(recipe, groups, reward_model_settings):
    recipe = changed(recipe, GAE, KL, *reward_model_settings)
    workers = start_workers(recipe.model_copy(update={"command": "sft"}))
    [group] = groups
    assert workers == Workers(group, None, None, None)
    config = recipe.for_verl("actor_rollout_ref")
    assert group.part.kwargs == {"config": config, "role": "actor"}


def test_roles_without_separate_gpus_share_a_process_on_each_gpu(
    recipe, groups, reward_model_settings, capsys
):
    changes = ["trainer.resource_pools.ref=1", "critic.cliprange_value=0.3"]
    workers = start_workers(changed(recipe, GAE, KL, *reward_model_settings, *changes))
    shared, separate = groups
    assert shared.arguments["resource_pool"] == ([3, 3], 1)
    assert separate.arguments["resource_pool"] == ([1, 1], 1)
    assert list(shared.children) == ["actor", "critic", "reward_model"]
    children = shared.children.values()
    assert workers == Workers(*children, separate)
    assert [child.calls for child in children] == [[], ["reset", "set_loss_fn"], ["reset"]]
    assert separate.calls == ["init_model"]
    assert capsys.readouterr().out == ""  # verl's line about the base class is not printed
    loss = workers.critic.loss
    assert loss.func is value_loss and loss.keywords["config"].cliprange_value == 0.3


# --- optional roles ------------------------------------------------------------------------------


def test_without_a_kl_term_no_reference_is_needed(recipe):
    assert optional_roles(changed(recipe, "trainer.resource_pools.ref=1")) == {}


def test_the_reward_model_is_a_value_model_that_is_not_trained(
    recipe, workspace, reward_model_settings
):
    recipe = changed(recipe, GAE, *reward_model_settings)
    roles = optional_roles(recipe)
    assert list(roles) == ["critic", "reward_model"]
    assert roles["critic"].worker_class is roles["reward_model"].worker_class is TrainingWorker
    critic = roles["critic"].arguments["config"]
    reward_model = roles["reward_model"].arguments["config"]
    assert critic.engine_config.forward_only is False
    assert reward_model.engine_config.forward_only is True
    assert critic.model_config.path == str(workspace / "tied")
    assert reward_model.model_config.path == str(workspace / "scored")
    assert reward_model.model_config.tokenizer_path == str(workspace / "scored")
    assert recipe.critic.model.path == str(workspace / "tied")  # the recipe is unchanged


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ([KL, "trainer.resource_pools.ref=1"], "tied"),
        (["distillation.enabled=true", f"{TEACHER}=untied"], "untied"),
    ],
)
def test_a_separate_reference_is_the_teacher_or_the_policys_first_model(
    recipe, workspace, changes, path
):
    """It does not have the policy's LoRA adapter."""
    changes = [change.replace("=untied", f"={workspace / 'untied'}") for change in changes]
    recipe = changed(recipe, *changes, "actor_rollout_ref.model.lora_rank=8")
    [(name, role)] = optional_roles(recipe).items()
    assert name == "ref" and role.worker_class is ActorRolloutRefWorker
    assert role.arguments["role"] == "ref"
    model = role.arguments["config"].model
    assert (model.path, model.lora_rank) == (str(workspace / path), 0)
    assert recipe.model.path == str(workspace / "tied")
    assert recipe.model.lora_rank == 8


def test_a_value_model_has_the_critics_settings(recipe):
    changes = ["critic.forward_max_token_len_per_gpu=3000", "critic.ppo_max_token_len_per_gpu=2000"]
    changes += ["critic.optim.lr=0.125", "critic.checkpoint.save_contents=[model]"]
    settings = make_value_model_config(changed(recipe, *changes))
    engine = settings.engine_config
    assert settings.model_type == "value_model"
    assert (engine.infer_max_token_len_per_gpu, engine.max_token_len_per_gpu) == (3000, 2000)
    assert settings.optimizer_config.lr == 0.125
    assert list(settings.checkpoint_config.save_contents) == ["model"]
    assert settings.model_config.path == recipe.critic.model.path
