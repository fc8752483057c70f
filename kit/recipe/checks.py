"""Checks that the parts of a recipe fit together: sizes, sampling, the algorithm, models, tools.

The docstring of a check states the rule that it checks. A check yields a message for each problem,
so that the user sees all of them together. The checks of the first section take no time. Those of
the second section need verl, which takes 7 s to import.

Protects: a run that cannot work ends before a worker starts.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Iterable, Iterator, Mapping

from env import Task
from kit.errors import ConfigError
from kit.recipe.keys import ACTOR, MODEL, ROLLOUT, TEACHER
from kit.recipe.recipe import Recipe
from kit.recipe.schema import Sampling
from kit.recipe.settings import Settings
from kit.recipe.user_functions import ADVANTAGE, LOSS_MODE, is_user_function

# Resources servers of nemo-gym 0.7 whose app.py runs code that the policy wrote. It runs in
# a child process, or with a filter on its imports.
CODE_EXECUTING_SERVERS = {"bigcodebench", "code_fim", "code_gen", "evalplus", "math_with_code"}
CODE_EXECUTING_SERVERS |= {"newton_bench", "ns_tools", "nvarc", "openenv", "scicode"}
CODE_EXECUTING_SERVERS |= {"scicodepile", "vibench"}
CORRECTION = "algorithm.rollout_correction"
# Up to these values, sampling takes the most likely token: vLLM raises temperatures to 0.01, and
# that token has a probability of at least 0.01 in practice. A top_k of -1 is off.
GREEDY_UP_TO = {"temperature": 0.01, "top_p": 0.01, "top_k": 1}
TRACKER_PACKAGES = {"wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio"}
TOOL_EXAMPLE = (
    '{"type": "function", "name": ..., "description": ..., "parameters": {...}, "strict": true}'
)


# --- checks that take no time --------------------------------------------------------------------


def check_run(settings: Settings) -> Iterator[str]:
    """Check that the run's folder is in runs/, and the packages of its trackers are installed."""
    name = settings.trainer.experiment_name
    if name.startswith("/") or ".." in name.split("/"):
        yield f"trainer.experiment_name={name} is outside of runs/. Remove the first / and each .."
    for tracker in sorted(set(settings.trainer.logger) & TRACKER_PACKAGES):
        if not importlib.util.find_spec(tracker):
            yield f"trainer.logger={tracker} needs the package {tracker}. Install it."


def check_training(settings: Settings) -> Iterator[str]:
    """Check checkpoints, warm-ups, batch sizes and the strategy of a command that trains."""
    yield from check_contents(settings)
    yield from check_warmup(settings)
    yield from check_batch_sizes(settings)
    if not settings.engine.is_fsdp:
        return
    for section in (ACTOR, "critic"):
        strategy = settings.get(section).strategy
        if strategy not in ("fsdp", "fsdp2"):
            yield f"{section}.strategy={strategy} is not supported. Use one of: fsdp, fsdp2."


def check_contents(settings: Settings) -> Iterator[str]:
    """Checkpoints have the weights, and a resumed run loads them."""
    for section in (ACTOR, "critic"):
        for name, contents in settings.get(f"{section}.checkpoint"):
            if name.endswith("_contents") and contents is not None and "model" not in contents:
                yield (
                    f"{section}.checkpoint.{name}={contents} has no `model`: a resumed run would "
                    "continue with the weights of the base model. Add it, as in "
                    "[model,optimizer,extra]."
                )


def check_warmup(settings: Settings) -> Iterator[str]:
    """lr_warmup_steps=0 does not meet a ratio, which verl would use instead."""
    for section, optimizer in ((ACTOR, settings.actor.optim), ("critic", settings.critic.optim)):
        if optimizer.lr_warmup_steps == 0 and optimizer.lr_warmup_steps_ratio:
            yield (
                f"{section}.optim.lr_warmup_steps=0: verl then uses lr_warmup_steps_ratio="
                f"{optimizer.lr_warmup_steps_ratio}. Set that to 0, or lr_warmup_steps to -1."
            )


def check_batch_sizes(settings: Settings) -> Iterator[str]:
    """Check that mini-batches divide the batch, and that the GPUs divide a mini-batch."""
    prompts = settings.data.train_batch_size
    n = settings.rollout.n
    for role, section in (("actor", ACTOR), ("critic", "critic")):
        mini_batch = settings.get(section).ppo_mini_batch_size
        if role == "critic" and mini_batch == settings.actor.ppo_mini_batch_size:
            continue  # as for the actor
        if prompts % mini_batch:
            yield (
                f"data.train_batch_size={prompts}: a batch of {prompts} prompts cannot be divided "
                f"into optimizer steps of {mini_batch}. For one step per batch, set "
                f"{section}.ppo_mini_batch_size={prompts}."
            )
        world = settings.world_size(role)
        if mini_batch * n % world:
            yield (
                f"{section}.ppo_mini_batch_size * rollout.n = {mini_batch} * {n} episodes must be "
                f"a multiple of {world} GPUs. Change one of these."
            )
    needed = [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    ]
    missing = [key for key in needed if not settings.get(key)]
    if not settings.actor.use_dynamic_bsz and missing:
        yield f"{ACTOR}.use_dynamic_bsz=false needs {' and '.join(needed)}. Set them."


def check_sampling(settings: Settings) -> Iterator[str]:
    """Responses that must differ are sampled, not decoded greedily."""
    command = settings.command
    rollout = settings.rollout
    if command == "train" or (command == "rollout" and rollout.n > 1):
        yield from check_greedy(ROLLOUT, rollout)
    val = rollout.val_kwargs
    evaluates = command == "evaluate" or (command == "train" and settings.env.val_files)
    asks_to_sample = val.n > 1 or val.do_sample or val.temperature > 0
    if evaluates and asks_to_sample:
        yield from check_greedy(f"{ROLLOUT}.val_kwargs", val)


def check_greedy(section: str, sampling: Sampling) -> Iterator[str]:
    """Sampling does not always take the most likely token."""
    cut = [key for key, limit in GREEDY_UP_TO.items() if 0 <= getattr(sampling, key) <= limit]
    if cut or not sampling.do_sample:
        values = "".join(f", {key}={getattr(sampling, key)}" for key in cut)
        yield (
            f"{section}: do_sample={sampling.do_sample}{values} decode greedily, so all "
            f"responses to a prompt are equal. Set {section}.do_sample=true and {section}."
            "temperature=0.8, and remove top_k and top_p."
        )


def check_algorithm(settings: Settings) -> Iterator[str]:
    """Check the settings of the advantage, the loss, the group filter and LoRA."""
    yield from check_correction(settings)
    loss = settings.actor.policy_loss
    if loss.loss_mode == "dro" and not loss.dro_beta:
        yield f"{LOSS_MODE}=dro needs {ACTOR}.policy_loss.dro_beta. Set it."
    algorithm = settings.algorithm
    keys = algorithm.gdpo_reward_keys or []
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys. Set it."
    if len(algorithm.gdpo_reward_weights or keys) != len(keys):
        yield f"algorithm.gdpo_reward_weights: give {len(keys)}, one for each reward key."
    refill = algorithm.filter_groups
    if refill.enable and refill.max_num_gen_batches < 1:
        yield "algorithm.filter_groups.enable needs max_num_gen_batches of at least 1. Set it."
    sends_adapter = settings.model.lora_rank and not settings.model.lora.merge
    is_dummy = settings.rollout.load_format == "dummy"
    if sends_adapter and is_dummy and settings.trainer.device == "cpu":
        yield f"A LoRA adapter on a CPU needs {ROLLOUT}.load_format=auto. Set it."
    teacher = settings.distillation.teacher_models.teacher_model.model_path
    if teacher and not settings.distillation.enabled:
        yield f"{TEACHER} needs distillation.enabled=true. Set that too, or remove it."


def check_correction(settings: Settings) -> Iterator[str]:
    """algorithm.rollout_correction fits the loss and the advantage."""
    correction = settings.algorithm.rollout_correction
    loss_mode = settings.actor.policy_loss.loss_mode
    if correction.bypass_mode and loss_mode not in ("vanilla", "bypass_mode"):
        yield f"{CORRECTION}.bypass_mode has its own loss. Remove loss_mode={loss_mode}."
    if correction.bypass_mode and "with_answer" in str(settings.env.filters):
        yield (
            "env.filters: with_answer adds responses that the rollout engine did not sample, so it "
            f"has no log-probs of them, which {CORRECTION}.bypass_mode needs. Remove one of them."
        )


def check_weight_sync(settings: Settings) -> Iterator[str]:
    """Check that the weights can reach the rollout engine's GPUs."""
    rollout = settings.rollout
    key = f"{ROLLOUT}.checkpoint_engine.backend"
    backend = rollout.checkpoint_engine.backend
    if not rollout.nnodes:
        if backend != "naive":
            yield (
                f"{key}={backend} is for rollout engines on separate GPUs. Set {ROLLOUT}.nnodes, "
                "or remove it."
            )
        return
    supported = ["gloo"] if settings.trainer.device == "cpu" else ["nccl", "gloo"]
    if backend not in supported:
        yield (
            f"{ROLLOUT}.nnodes={rollout.nnodes} needs {key} to be {' or '.join(supported)}, not "
            f"{backend}. Change it."
        )
    if settings.model.lora_rank and not settings.model.lora.merge:
        yield (
            f"{ROLLOUT}.nnodes={rollout.nnodes}: verl sends no adapter to separate GPUs. Set "
            f"{MODEL}.lora.merge=true."
        )


# --- checks that need verl -----------------------------------------------------------------------


def check_names(settings: Settings) -> Iterator[str]:
    """verl has the advantage, the loss and the rejection options that the recipe names."""
    from verl.trainer.ppo import core_algos

    advantages = core_algos.ADV_ESTIMATOR_REGISTRY
    yield from check_registered(ADVANTAGE, settings.algorithm.adv_estimator, advantages)
    losses = core_algos.POLICY_LOSS_REGISTRY
    yield from check_registered(LOSS_MODE, settings.actor.policy_loss.loss_mode, losses)
    yield from check_correction_values(settings)


def check_registered(key: str, name: str, registry: Mapping[str, object]) -> Iterator[str]:
    """Check that a key names an entry of verl's registry, or a custom function."""
    # once a custom function was used, it is in the registry, too
    names = [entry for entry in registry if not is_user_function(entry)]
    if is_user_function(name) or name in names:
        return
    yield (
        f"{key}={name} is not in verl, which has {', '.join(names)}. Choose one, or give a custom "
        "function as path.py:function."
    )


def check_roles(recipe: Settings) -> Iterator[str]:
    """Check the group size, and that the teacher and each separate model are used."""
    if recipe.command != "train":
        return
    n = recipe.rollout.n
    if recipe.compares_group and n < 2:
        yield f"{ROLLOUT}.n={n}: this advantage needs at least two responses a group. Raise n."
    if recipe.teacher and not recipe.has_reference:
        yield (
            f"{TEACHER}={recipe.teacher}: nothing uses this model's log-probs. Set "
            f"{ADVANTAGE}=templates/advantages.py:distill or {ACTOR}.use_kl_loss=true, or remove "
            "it."
        )
    is_used = {"critic": recipe.has_critic, "ref": recipe.has_reference}
    is_used["reward_model"] = recipe.has_reward_model
    for role, count in recipe.trainer.resource_pools.sizes().items():
        if not is_used[role]:
            yield f"trainer.resource_pools.{role}={count}: this recipe has no {role}. Remove it."


def check_correction_values(settings: Settings) -> Iterator[str]:
    """verl knows each option of rollout_correction, and can read the thresholds."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    correction = settings.algorithm.rollout_correction
    options = [name.strip() for name in str(correction.rollout_rs or "").split(",")]
    try:
        if correction.rollout_is:
            helper._parse_rollout_is_threshold(correction.rollout_is_threshold or 0.0)
        if correction.rollout_rs:
            helper._parse_rollout_rs_thresholds(options, correction.rollout_rs_threshold)
    except ValueError as error:
        yield f"{CORRECTION}: {str(error).rstrip('.')}. Change it."


def instantiate_verl_configs(recipe: Recipe) -> None:
    """Build verl's own configuration classes, which check their values. Raises ConfigError."""
    from verl.utils.config import omega_conf_to_dataclass

    sections = [ACTOR, ROLLOUT]
    if recipe.has_critic:
        sections.append("critic")
    for section in sections:
        try:
            omega_conf_to_dataclass(recipe.for_verl(section))
        except Exception as error:  # Hydra's, OmegaConf's, and anything that __post_init__ raises
            cause = error.__cause__ or error
            message = str(cause).strip().partition("\n")[0]
            failed_line = traceback.extract_tb(cause.__traceback__)[-1].line  # for a bare assert
            raise ConfigError(
                f"{section}: verl does not accept it: {message or failed_line}. Change it."
            ) from None


# --- tools of the rows ---------------------------------------------------------------------------


def check_tools(tasks: Iterable[Task]) -> None:
    """Check that Gym accepts the rows' tools (OpenAI's FunctionToolParam). Raises ConfigError."""
    for task in tasks:
        for tool in task.row["responses_create_params"].get("tools") or ():
            missing = [key for key in ("name", "parameters", "strict") if key not in tool]
            if missing:
                raise ConfigError(
                    f"{task.row_id}: a tool has no {', '.join(missing)}, so Gym's server would "
                    f"refuse each episode. Write it as {TOOL_EXAMPLE}."
                )
