"""What of a recipe goes together: sizes, the algorithm, a reward model, a format of tool calls. Before anything starts.

Without importing verl's trainer, which takes 10 s: its names are listed here, and a test compares them with verl.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import own


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key and the way out."""


# Servers of nemo-gym 0.4 whose app.py runs what the policy writes, in a process beside it or under a filter of imports
RUNS_CODE = (
    *("bigcodebench", "code_fim", "code_gen", "evalplus", "math_with_code", "newton_bench", "ns_tools", "nvarc"),
    *("openenv", "scicode"),
)
ALONE = ("gae", "reinforce_plus_plus", "remax")  # estimators that look at each answer by itself, not at its group
ESTIMATORS = (  # verl's names, known without the 10 s that importing them takes
    *(*ALONE, "grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
LOSSES = (
    *("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo"),
    "bypass_mode",
)
KL = [kind + plus for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+")]
VALUES = {
    "actor_rollout_ref.actor.loss_agg_mode": (
        *("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"),
    ),
    "actor_rollout_ref.actor.kl_loss_type": KL,
    "algorithm.kl_penalty": KL,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.rollout_is": (None, "token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
}
REJECTIONS = [f"{span}_{k}" for span in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")]
REJECTIONS.remove("seq_max_k1")


def check_algorithm(config: DictConfig) -> None:
    """The advantage, the loss and what they need exist and go together. Raises ConfigError."""
    actor, settings = config.actor_rollout_ref.actor, config.algorithm
    known = {"algorithm.adv_estimator": ESTIMATORS, "actor_rollout_ref.actor.policy_loss.loss_mode": LOSSES}
    for key, names in known.items():
        name = OmegaConf.select(config, key)
        if not isinstance(name, str):
            raise ConfigError(f"{key}={name}: wants a name of verl's, or path.py:function, without settings")
        if name not in names and not own.is_own(name) and not config.actor_rollout_ref.model.external_lib:
            close = ["gae"] if name == "ppo" else difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; one of your own is path.py:function"
            raise ConfigError(f"{key}={name}: verl has {', '.join(names)}{hint}")
    for key, allowed in VALUES.items():
        if (value := OmegaConf.select(config, key)) not in allowed:
            options = ["null" if option is None else option for option in allowed]
            raise ConfigError(f"{key}={value}: wants one of {', '.join(options)}")
    loss_mode, correction = actor.policy_loss.loss_mode, settings.rollout_correction
    if correction.bypass_mode and loss_mode not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"algorithm.rollout_correction.bypass_mode has a loss of its own, so leave out loss_mode={loss_mode}"
        )
    if loss_mode == "bypass_mode" and not correction.bypass_mode:
        raise ConfigError(
            "policy_loss.loss_mode=bypass_mode is set by algorithm.rollout_correction.bypass_mode=true; set that alone"
        )
    if loss_mode == "dro" and not actor.policy_loss.dro_beta:
        raise ConfigError("policy_loss.loss_mode=dro needs actor_rollout_ref.actor.policy_loss.dro_beta")
    if settings.adv_estimator == "gdpo" and not settings.get("gdpo_reward_keys"):
        raise ConfigError("algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the rewards by name")
    weights, keys = settings.get("gdpo_reward_weights"), settings.get("gdpo_reward_keys")
    if weights and len(weights) != len(keys or []):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights are {len(weights)}, algorithm.gdpo_reward_keys {len(keys or [])}; give one "
            "weight for each key"
        )
    n, refill = config.actor_rollout_ref.rollout.n, settings.filter_groups
    if refill.enable and refill.max_num_gen_batches < 1:
        raise ConfigError("algorithm.filter_groups.enable needs max_num_gen_batches, the most batches for one step")
    if n < 2 and (refill.enable or "drop_uniform" in str(config.env.filters)):
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={n}: drop_uniform would drop every group of one; raise it, or leave that out"
        )
    for option in str(correction.rollout_rs or "token_k1").split(","):
        if option.strip() not in REJECTIONS:
            raise ConfigError(f"algorithm.rollout_correction.rollout_rs={option}: wants one of {', '.join(REJECTIONS)}")
    if correction.rollout_rs and correction.rollout_rs_threshold is None:
        raise ConfigError("algorithm.rollout_correction.rollout_rs needs rollout_rs_threshold beside it")
    if correction.bypass_mode and settings.adv_estimator.endswith("optimal_token_baseline"):
        raise ConfigError(
            f"algorithm.adv_estimator={settings.adv_estimator} needs the pass over the batch that "
            "algorithm.rollout_correction.bypass_mode skips; leave that out"
        )
    model, load_format = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.load_format
    if model.lora_rank and not model.lora.merge and load_format == "dummy" and config.trainer.device == "cpu":
        raise ConfigError(
            "a LoRA adapter on a CPU needs actor_rollout_ref.rollout.load_format=auto (configs/lora.yaml)"
        )
    if config.critic.enable is not None:
        raise ConfigError("critic.enable: the advantage decides (algorithm.adv_estimator=gae); leave it out")


def check_reward_model(config: DictConfig, tokenizer: Any) -> None:
    """The reward model exists and reads the policy's ids; its path is made absolute. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer

    settings = config.reward.reward_model
    key = f"reward.reward_model.model_path={settings.model_path}"
    if not settings.model_path:
        raise ConfigError("reward.reward_model.enable needs reward.reward_model.model_path")
    if (path := Path(settings.model_path).expanduser()).is_dir():
        settings.model_path = str(path.resolve())
    try:
        theirs = AutoTokenizer.from_pretrained(settings.model_path)
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"{key}: no model folder, and no model of the hub ({why}); give one of the two") from None
    head = AutoConfig.from_pretrained(settings.model_path)
    kinds = ("ForTokenClassification", "ForSequenceClassification")
    if not (head.architectures or [""])[0].endswith(kinds) or head.num_labels != 1:
        raise ConfigError(
            f"{key}: {head.architectures} has no scalar head; give a token or sequence classifier with one label"
        )
    if theirs.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"{key} has another vocabulary than the policy, whose ids it would score; give one with its tokenizer"
        )


def check_sizes(config: DictConfig, command: str) -> None:
    """Batches, groups and GPUs go into one another. Raises ConfigError."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    world = config.trainer.n_gpus_per_node * config.trainer.nnodes
    prompts, n, mini = config.data.train_batch_size, rollout.n, actor.ppo_mini_batch_size
    infer = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if world % infer:
        raise ConfigError(
            f"{world} GPUs do not divide by actor_rollout_ref.rollout.tensor_model_parallel_size * data_parallel_size "
            f"= {infer}; lower these, or raise trainer.n_gpus_per_node"
        )
    if command not in ("train", "sft"):
        return
    if prompts % mini:
        raise ConfigError(
            f"data.train_batch_size={prompts} does not divide by actor_rollout_ref.actor.ppo_mini_batch_size={mini}; "
            "change one of them"
        )
    if mini * n % world:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n = {mini} * {n} episodes do not divide among "
            f"{world} GPUs; change one of these"
        )
    if command == "sft":
        return
    estimator = str(config.algorithm.adv_estimator)
    compares = (
        own.asks(estimator, "index") if own.is_own(estimator) else estimator in ESTIMATORS and estimator not in ALONE
    )
    if n < 2 and compares:
        raise ConfigError(f"actor_rollout_ref.rollout.n={n}: a group needs at least two answers to compare; raise it")


def check_tool_format(name: str) -> None:
    """The parser that reads the model's tool calls exists. Raises ConfigError."""
    from vllm.tool_parsers import ToolParserManager  # takes 7 s, and is needed anyway

    known = ToolParserManager.list_registered()
    if name not in known:
        key = f"actor_rollout_ref.rollout.multi_turn.format={name}"
        raise ConfigError(f"{key}: vLLM has no such tool parser; it has {', '.join(known)}")
