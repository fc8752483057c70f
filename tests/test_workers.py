"""The processes that training.py asks verl for: pools, roles and their settings, by recorders in the place of Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import load
from omegaconf import DictConfig
from test_updates import changed
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

import training

TEACHER = "distillation.teacher_models.teacher_model.model_path"


class Child:
    """A group of worker processes with one role."""

    def __init__(self, part: Any):
        self.part, self.calls = part, []

    def reset(self):
        self.calls.append("reset")

    def init_model(self):
        self.calls.append("init_model")

    def set_loss_fn(self, loss):
        self.calls.append("set_loss_fn")
        self.loss = loss


class Group(Child):
    """Stands in for RayWorkerGroup. It is kept with its arguments."""

    made: list[Group]

    def __init__(self, **arguments):
        super().__init__(arguments["ray_cls_with_init"])
        self.arguments = arguments
        Group.made.append(self)

    def spawn(self, parts):
        assert self.part == {"colocated": parts}
        self.children = {name: Child(part) for name, part in parts.items()}
        return self.children


@pytest.fixture
def groups(monkeypatch) -> list[Group]:
    """The groups that were made."""

    def colocated(parts):
        print("the base class")
        return {"colocated": parts}

    def pool(processes, max_colocate_count):
        return processes, max_colocate_count

    Group.made = []
    monkeypatch.setattr(training, "RayWorkerGroup", Group)
    monkeypatch.setattr(training, "RayResourcePool", pool)
    monkeypatch.setattr(training, "create_colocated_worker_cls", colocated)
    monkeypatch.setattr(training.ray, "remote", lambda worker: worker)
    return Group.made


@pytest.fixture(scope="module")
def recipe(workspace) -> DictConfig:
    """The tiny recipe on two nodes of three GPUs."""
    config = load(workspace)[0]
    sizes = [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=3",
        "trainer.ray_wait_register_center_timeout=77",
    ]
    return changed(config, *sizes)


@pytest.fixture
def scored(workspace) -> list[str]:
    return [
        "reward.reward_model.enable=true",
        f"reward.reward_model.model_path={workspace / 'scored'}",
    ]


KL = "algorithm.use_kl_in_reward=true"
GAE = "algorithm.adv_estimator=gae"


def test_grpo_is_one_group_with_the_actor_alone(recipe, groups):
    workers = training.start_workers(recipe)
    [group] = groups
    assert workers == training.Workers(group, None, None, None) and group.calls == []
    assert group.part.cls is ActorRolloutRefWorker
    assert group.part.kwargs == {"config": recipe.actor_rollout_ref, "role": "actor_rollout"}
    assert group.arguments["resource_pool"] == ([3, 3], 1)
    assert group.arguments["device_name"] == "cpu"
    assert group.arguments["ray_wait_register_center_timeout"] == 77


@pytest.mark.parametrize(
    ("changes", "role"),
    [
        ([], "actor_rollout"),
        ([KL], "actor_rollout_ref"),
        (["actor_rollout_ref.actor.use_kl_loss=true"], "actor_rollout_ref"),
        (
            [KL, "actor_rollout_ref.model.lora_rank=8"],
            "actor_rollout",
        ),  # the model below the adapter
        ([KL, "trainer.resource_pools.ref=1"], "actor_rollout"),
        ([KL, "distillation.enabled=true", f"{TEACHER}=teacher"], "actor_rollout"),
        ([KL, "distillation.enabled=false", f"{TEACHER}=teacher"], "actor_rollout_ref"),
    ],
)
def test_the_actor_holds_the_reference_unless_that_is_another_model(recipe, groups, changes, role):
    training.start_workers(changed(recipe, *changes))
    parts = groups[0].part
    actor = parts["colocated"]["actor"] if isinstance(parts, dict) else parts
    assert actor.kwargs["role"] == role


def test_fine_tuning_starts_the_actor_alone(recipe, groups, scored):
    config = changed(recipe, GAE, KL, *scored)
    workers = training.start_workers(config, sft=True)
    [group] = groups
    assert workers == training.Workers(group, None, None, None)
    assert group.part.kwargs == {"config": config.actor_rollout_ref, "role": "actor"}


def test_a_process_of_each_gpu_holds_all_that_has_no_gpus_of_its_own(
    recipe, groups, scored, capsys
):
    config = changed(
        recipe, GAE, *scored, "trainer.resource_pools.ref=1", "critic.cliprange_value=0.3", KL
    )
    workers = training.start_workers(config)
    shared, own = groups
    assert shared.arguments["resource_pool"] == ([3, 3], 1) and own.arguments["resource_pool"] == (
        [1, 1],
        1,
    )
    assert list(shared.children) == ["actor", "critic", "reward_model"]
    children = shared.children.values()
    assert workers == training.Workers(*children, own)
    assert [child.calls for child in children] == [[], ["reset", "set_loss_fn"], ["reset"]]
    assert own.calls == ["init_model"]
    assert capsys.readouterr().out == ""  # verl's line about the base class
    loss = workers.critic.loss
    assert loss.func is training.value_loss and loss.keywords["config"].cliprange_value == 0.3


def test_an_actor_and_a_critic_share_a_process(recipe, groups):
    workers = training.start_workers(changed(recipe, GAE))
    [shared] = groups
    assert list(shared.children) == ["actor", "critic"]
    assert workers == training.Workers(*shared.children.values(), None)


def test_a_critic_on_gpus_of_its_own_is_a_group_by_itself(recipe, groups):
    workers = training.start_workers(changed(recipe, GAE, "trainer.resource_pools.critic=2"))
    actor, critic = groups
    assert workers == training.Workers(actor, critic, None, None)
    assert critic.arguments["resource_pool"] == ([2, 2], 1) and critic.part.cls is TrainingWorker
    assert critic.calls == ["reset", "set_loss_fn"] and actor.calls == []


def test_roles_may_all_have_gpus_of_their_own(recipe, groups):
    config = changed(recipe, GAE, "trainer.resource_pools.critic=2")
    workers = training.start_roles(config, training.beside_actor(config))
    [critic] = groups
    assert workers == training.Workers(None, critic, None, None)


# --- what stands beside the actor ----------------------------------------------------------------


def test_nothing_stands_beside_the_actor_of_grpo(recipe):
    assert training.beside_actor(recipe) == {}
    assert (
        training.beside_actor(changed(recipe, "trainer.resource_pools.ref=1")) == {}
    )  # that nothing compares with


def test_the_reward_model_is_a_value_model_that_only_answers(recipe, workspace, scored):
    config = changed(recipe, GAE, *scored)
    roles = training.beside_actor(config)
    assert list(roles) == ["critic", "reward_model"]
    (critic_class, critic), (reward_class, reward) = roles["critic"], roles["reward_model"]
    assert critic_class is reward_class is TrainingWorker
    critic, reward = critic["config"], reward["config"]
    assert (critic.engine_config.forward_only, reward.engine_config.forward_only) == (False, True)
    assert critic.model_config.path == str(workspace / "tied")
    assert (
        reward.model_config.path == reward.model_config.tokenizer_path == str(workspace / "scored")
    )
    assert config.critic.model.path == str(workspace / "tied")  # the recipe stays as it is


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ([KL, "trainer.resource_pools.ref=1"], "tied"),
        (["distillation.enabled=true", f"{TEACHER}=untied"], "untied"),
        (
            [KL, "distillation.enabled=true", f"{TEACHER}=untied", "trainer.resource_pools.ref=1"],
            "untied",
        ),
    ],
)
def test_a_reference_of_its_own_is_the_teacher_or_the_policys_first_model(
    recipe, workspace, changes, path
):
    """Without the policy's adapter."""
    changes = [change.replace("=untied", f"={workspace / 'untied'}") for change in changes]
    config = changed(recipe, *changes, "actor_rollout_ref.model.lora_rank=8")
    [(name, (worker, arguments))] = training.beside_actor(config).items()
    assert (name, worker, arguments["role"]) == ("ref", ActorRolloutRefWorker, "ref")
    model = arguments["config"].model
    assert (model.path, model.lora_rank) == (str(workspace / path), 0)
    assert config.actor_rollout_ref.model.path == str(workspace / "tied")
    assert config.actor_rollout_ref.model.lora_rank == 8


def test_a_value_model_has_the_critics_settings(recipe):
    changes = ["critic.forward_max_token_len_per_gpu=3000", "critic.ppo_max_token_len_per_gpu=2000"]
    changes += ["critic.optim.lr=0.125", "critic.checkpoint.save_contents=[model]"]
    settings = training.value_model_config(changed(recipe, *changes).critic)
    engine = settings.engine_config
    assert settings.model_type == "value_model"
    assert (engine.infer_max_token_len_per_gpu, engine.max_token_len_per_gpu) == (3000, 2000)
    assert settings.optimizer_config.lr == 0.125
    assert list(settings.checkpoint_config.save_contents) == ["model"]
    assert settings.model_config.path == recipe.critic.model.path


def test_an_answer_is_waited_for_where_it_is_a_promise():
    output = training.TensorDict({}, batch_size=[])
    assert training._wait(output) is output
    assert training._wait(SimpleNamespace(get=lambda: output)) is output
