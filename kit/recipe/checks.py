"""Checks that the parts of a recipe fit together: sizes, sampling, the algorithm, models, tools.

The docstring of a check states the rule that it checks. A check yields a message for each problem,
so that the user sees all of them together. The checks of the first section take no time. Those of
the second section need verl, which takes 7 s to import.
"""

from __future__ import annotations

import importlib.util
import itertools
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from env import Task
from kit.errors import ConfigError
from kit.recipe import parallel_sizes, resources
from kit.recipe.keys import SAMPLING_COMMANDS
from kit.recipe.load import ACTOR, MODEL, ROLLOUT
from kit.recipe.recipe import Recipe
from kit.recipe.user_functions import ADVANTAGE, LOSS_MODE, TEACHER, is_user_function

# Resources servers of nemo-gym 0.7 whose app.py runs code that the policy wrote. It runs in
# a child process, or with a filter on its imports.
CODE_EXECUTING_SERVERS = {"bigcodebench", "code_fim", "code_gen", "evalplus", "math_with_code"}
CODE_EXECUTING_SERVERS |= {"newton_bench", "ns_tools", "nvarc", "openenv", "scicode"}
CODE_EXECUTING_SERVERS |= {"scicodepile", "vibench"}
CORRECTION = "algorithm.rollout_correction"
PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
# verl's suffix "+" selects straight-through gradients
KL_TYPES = (*PENALTIES, *[f"{penalty}+" for penalty in PENALTIES])
PRECISIONS = (None, "fp32", "float32", "32", "bf16", "bfloat16", "fp16", "float16", "16")
CHOICES: dict[str, Sequence[object]] = {  # a test compares them with verl's
    f"{ACTOR}.kl_loss_type": KL_TYPES,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.kl_penalty": KL_TYPES,
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    f"{CORRECTION}.loss_type": ("reinforce", "ppo_clip"),
    f"{CORRECTION}.rollout_is": (None, "token", "sequence"),
    **{f"{section}.model_dtype": PRECISIONS for section in parallel_sizes.FSDP_SECTIONS.values()},
}
# Up to these values, sampling takes the most likely token: vLLM raises temperatures to 0.01, and
# that token has a probability of at least 0.01 in practice. A top_k of -1 is off.
GREEDY_UP_TO = {"temperature": 0.01, "top_p": 0.01, "top_k": 1}
TRACKER_PACKAGES = {"wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio"}
TOOL_EXAMPLE = (
    '{"type": "function", "name": ..., "description": ..., "parameters": {...}, "strict": true}'
)


# --- checks that take no time --------------------------------------------------------------------


def check_choices(
    config: DictConfig, choices: Mapping[str, Sequence[object]] = CHOICES
) -> Iterator[str]:
    """A key with a fixed set of values has one of these values."""
    for key, allowed in choices.items():
        value = OmegaConf.select(config, key)
        if value not in allowed:
            options = ["null" if option is None else str(option) for option in allowed]
            yield f"{key}={value} is not supported. Use one of: {', '.join(options)}."


def check_run(config: DictConfig) -> Iterator[str]:
    """The run's folder is in runs/, and the packages of its trackers are installed."""
    name = config.trainer.experiment_name
    if name.startswith("/") or ".." in name.split("/"):
        yield f"trainer.experiment_name={name} is outside of runs/. Remove the first / and each .."
    for tracker in set(config.trainer.logger) & TRACKER_PACKAGES:
        if not importlib.util.find_spec(tracker):
            yield f"trainer.logger={tracker} needs the package {tracker}. Install it."


def check_sizes(config: DictConfig, command: str, split: int) -> Iterator[str]:
    """The sizes of batches and groups and the GPU counts fit together.

    split: GPUs that work on the same rows.
    """
    yield from parallel_sizes.check_rollout_gpus(config)
    if command not in SAMPLING_COMMANDS:
        yield from parallel_sizes.check_training_gpus(config, split)
        yield from check_contents(config)
        yield from check_warmup(config)
        yield from check_batch_sizes(config)


def check_contents(config: DictConfig) -> Iterator[str]:
    """Checkpoints have the weights, and a resumed run loads them."""
    for section, name in itertools.product((ACTOR, "critic"), ("save_contents", "load_contents")):
        key = f"{section}.checkpoint.{name}"
        contents = OmegaConf.select(config, key)
        if contents is not None and "model" not in contents:
            yield (
                f"{key}={list(contents)} has no `model`: a resumed run would continue with the "
                "weights of the base model. Add it, as in [model,optimizer,extra]."
            )


def check_warmup(config: DictConfig) -> Iterator[str]:
    """lr_warmup_steps=0 does not meet a ratio, which verl would use instead."""
    for section in (ACTOR, "critic"):
        optimizer = OmegaConf.select(config, f"{section}.optim")
        if optimizer.lr_warmup_steps == 0 and optimizer.lr_warmup_steps_ratio:
            yield (
                f"{section}.optim.lr_warmup_steps=0: verl then uses lr_warmup_steps_ratio="
                f"{optimizer.lr_warmup_steps_ratio}. Set that to 0, or lr_warmup_steps to -1."
            )


def check_batch_sizes(config: DictConfig) -> Iterator[str]:
    """The batch divides into equal mini-batches, and each mini-batch equally among the GPUs."""
    actor = config.actor_rollout_ref.actor
    prompts = config.data.train_batch_size
    n = config.actor_rollout_ref.rollout.n
    for role, section in (("actor", ACTOR), ("critic", "critic")):
        mini_batch = OmegaConf.select(config, section).ppo_mini_batch_size
        if role == "critic" and mini_batch == actor.ppo_mini_batch_size:
            continue  # as for the actor
        if prompts % mini_batch:
            yield (
                f"data.train_batch_size={prompts} must be a multiple of "
                f"{section}.ppo_mini_batch_size={mini_batch}. Change one of them."
            )
        world = resources.gpus_per_node(config, role) * config.trainer.nnodes
        if mini_batch * n % world:
            yield (
                f"{section}.ppo_mini_batch_size * rollout.n = {mini_batch} * {n} episodes must be "
                f"a multiple of {world} GPUs. Change one of these."
            )
    needed = [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    ]
    missing = [key for key in needed if not OmegaConf.select(config, key)]
    if not actor.use_dynamic_bsz and missing:
        yield f"{ACTOR}.use_dynamic_bsz=false needs {' and '.join(needed)}. Set them."


def check_sampling(config: DictConfig, command: str) -> Iterator[str]:
    """Responses that must differ are sampled, not decoded greedily."""
    rollout = config.actor_rollout_ref.rollout
    if command == "train" or (command == "rollout" and rollout.n > 1):
        yield from check_greedy(ROLLOUT, rollout)
    val = rollout.val_kwargs
    evaluates = command == "evaluate" or (command == "train" and config.env.val_files)
    asks_to_sample = val.n > 1 or val.do_sample or val.temperature > 0
    if evaluates and asks_to_sample:
        yield from check_greedy(f"{ROLLOUT}.val_kwargs", val)


def check_greedy(section: str, sampling: DictConfig) -> Iterator[str]:
    """Sampling does not always take the most likely token."""
    cut = [key for key, limit in GREEDY_UP_TO.items() if 0 <= sampling[key] <= limit]
    if cut or not sampling.do_sample:
        settings = "".join(f", {key}={sampling[key]}" for key in cut)
        yield (
            f"{section}: do_sample={sampling.do_sample}{settings} decode greedily, so all "
            f"responses to a prompt are equal. Set {section}.do_sample=true and {section}."
            "temperature=0.8, and remove top_k and top_p."
        )


def check_algorithm(config: DictConfig) -> Iterator[str]:
    """The advantage, the loss, the group filter and LoRA have the settings that they need."""
    yield from check_correction(config)
    loss = config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "dro" and not loss.dro_beta:
        yield f"{LOSS_MODE}=dro needs {ACTOR}.policy_loss.dro_beta. Set it."
    settings = config.algorithm
    keys = settings.get("gdpo_reward_keys") or []
    if settings.adv_estimator == "gdpo" and not keys:
        yield "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys. Set it."
    if len(settings.get("gdpo_reward_weights") or keys) != len(keys):
        yield f"algorithm.gdpo_reward_weights: give {len(keys)}, one for each reward key."
    refill = settings.filter_groups
    if refill.enable and refill.max_num_gen_batches < 1:
        yield "algorithm.filter_groups.enable needs max_num_gen_batches of at least 1. Set it."
    model = config.actor_rollout_ref.model
    sends_adapter = model.lora_rank and not model.lora.merge
    load_format = config.actor_rollout_ref.rollout.load_format
    if sends_adapter and load_format == "dummy" and config.trainer.device == "cpu":
        yield f"A LoRA adapter on a CPU needs {ROLLOUT}.load_format=auto. Set it."


def check_correction(config: DictConfig) -> Iterator[str]:
    """algorithm.rollout_correction fits the loss and the advantage."""
    correction = config.algorithm.rollout_correction
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.bypass_mode and loss_mode not in ("vanilla", "bypass_mode"):
        yield f"{CORRECTION}.bypass_mode has its own loss. Remove loss_mode={loss_mode}."
    if correction.bypass_mode and "with_answer" in str(config.env.filters):
        yield (
            "env.filters: with_answer adds responses that the rollout engine did not sample, so it "
            f"has no log-probs of them, which {CORRECTION}.bypass_mode needs. Remove one of them."
        )


def check_weight_sync(config: DictConfig) -> Iterator[str]:
    """The weights can reach the rollout engine's GPUs."""
    rollout = config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.checkpoint_engine.backend"
    backend = rollout.checkpoint_engine.backend
    if not rollout.nnodes:
        if backend != "naive":
            yield (
                f"{key}={backend} is for rollout engines on separate GPUs. Set {ROLLOUT}.nnodes, "
                "or remove it."
            )
        return
    supported = ["gloo"] if config.trainer.device == "cpu" else ["nccl", "gloo"]
    if backend not in supported:
        yield (
            f"{ROLLOUT}.nnodes={rollout.nnodes} needs {key} to be {' or '.join(supported)}, not "
            f"{backend}. Change it."
        )
    model = config.actor_rollout_ref.model
    if model.lora_rank and not model.lora.merge:
        yield (
            f"{ROLLOUT}.nnodes={rollout.nnodes}: verl sends no adapter to separate GPUs. Set "
            f"{MODEL}.lora.merge=true."
        )


# --- checks that need verl -----------------------------------------------------------------------


def check_names(config: DictConfig) -> Iterator[str]:
    """verl has the advantage, the loss and the rejection options that the recipe names."""
    from verl.trainer.ppo import core_algos

    yield from check_registered(config, ADVANTAGE, core_algos.ADV_ESTIMATOR_REGISTRY)
    yield from check_registered(config, LOSS_MODE, core_algos.POLICY_LOSS_REGISTRY)
    if OmegaConf.select(config, TEACHER) and not config.distillation.enabled:
        yield f"{TEACHER} needs distillation.enabled=true. Set that too, or remove it."
    yield from check_correction_values(config)


def check_registered(config: DictConfig, key: str, registry: Mapping[str, object]) -> Iterator[str]:
    """A key names an entry of verl's registry, or a custom function."""
    name = OmegaConf.select(config, key)
    # once a custom function was used, it is in the registry, too
    names = [entry for entry in registry if not is_user_function(entry)]
    if is_user_function(name) or name in names:
        return
    yield (
        f"{key}={name} is not in verl, which has {', '.join(names)}. Choose one, or give a custom "
        "function as path.py:function."
    )


def check_models(recipe: Recipe) -> Iterator[str]:
    """A group has the responses that are compared; the teacher and each separate model are used.

    For the command `train`.
    """
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
    for role, count in recipe.kit.resource_pools.sizes().items():
        if not is_used[role]:
            yield f"trainer.resource_pools.{role}={count}: this recipe has no {role}. Remove it."


def check_correction_values(config: DictConfig) -> Iterator[str]:
    """verl knows each option of rollout_correction, and can read the thresholds."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    correction = config.algorithm.rollout_correction
    options = [name.strip() for name in str(correction.rollout_rs or "").split(",")]
    try:
        if correction.rollout_is:
            helper._parse_rollout_is_threshold(correction.rollout_is_threshold)
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
            omega_conf_to_dataclass(OmegaConf.select(recipe.verl, section))
        except Exception as error:  # Hydra's, OmegaConf's, and anything that __post_init__ raises
            cause = error.__cause__ or error
            message = str(cause).strip().partition("\n")[0]
            failed_line = traceback.extract_tb(cause.__traceback__)[-1].line  # for a bare assert
            raise ConfigError(
                f"{section}: verl does not accept it: {message or failed_line}. Change it."
            ) from None


def check_strategies(recipe: Recipe) -> Iterator[str]:
    """With the FSDP engine, `strategy` is fsdp or fsdp2."""
    for section in (ACTOR, "critic") if recipe.has_critic else (ACTOR,):
        yield from check_choices(recipe.verl, {f"{section}.strategy": ["fsdp", "fsdp2"]})


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
