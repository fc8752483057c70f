"""The numbers of a recipe: the range of each key, and the meaning of -1, 0 and null.

    find_rule(key)                    the entry of NUMBERS for a key of verl, or None
    rule.is_valid(value)              whether the key may have this value
    rule.normalize(value)             the value that the code reads: 3 for 3.0, null for "-1: all"
    rule.describe()                   the allowed values, for messages

Meanings are those of verl's configuration files. A value without a meaning there is refused.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from kit.config.keys import matches

NONE: Mapping[object, Any] = MappingProxyType({})
THRESHOLD = r"[0-9.eE-]+(_[0-9.eE-]+)?(, *[0-9.eE-]+(_[0-9.eE-]+)?)*"  # "0.5_2", or "0.1,0.5_2"


class Number(NamedTuple):
    """The values that a number of the recipe may have.

    words: {value outside the range: its meaning}. same_as: {value that verl accepts, too: the value
    of the same meaning that the code reads}. is_list: the key is a list of such numbers. text: a
    pattern of texts that the key also takes.
    """

    low: float = -math.inf
    high: float = math.inf
    is_whole: bool = False
    excludes_low: bool = False
    excludes_high: bool = False
    words: Mapping[object, str] = NONE
    same_as: Mapping[object, object] = NONE
    is_list: bool = False
    text: str = ""

    def with_words(
        self, words: Mapping[object, str], same_as: Mapping[object, object] = NONE
    ) -> Number:
        """Return this rule with other values and their meanings."""
        return self._replace(words=words, same_as=same_as)

    def is_valid(self, value: object) -> bool:
        """Whether the key may have this value."""
        if self.is_list and isinstance(value, list):
            return all(self._replace(is_list=False).is_valid(item) for item in value)
        if isinstance(value, bool):
            return False
        if value is None or isinstance(value, str):
            is_text = isinstance(value, str) and self.is_valid_text(value)
            return value in self.words or value in self.same_as or is_text
        if not isinstance(value, (int, float)) or self.is_list:
            return False
        return value in self.words or value in self.same_as or self.is_in_range(value)

    def is_valid_text(self, value: str) -> bool:
        """Whether a text is a range such as 0.5_2, or a number within the limits."""
        if not self.text or not re.fullmatch(self.text, value):
            return False
        number = as_float(value)
        return isinstance(number, str) or self.is_in_range(number)

    def is_in_range(self, value: float) -> bool:
        """Whether a finite number is within the limits."""
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.is_whole and value != int(value):
            return False
        is_above = value > self.low if self.excludes_low else value >= self.low
        return is_above and (value < self.high if self.excludes_high else value <= self.high)

    def normalize(self, value: Any) -> Any:  # of a recipe: a number, a text, a list or null
        """Return a valid value as the code reads it."""
        if isinstance(value, list):
            return value
        if value in self.same_as:
            return self.same_as[value]
        if isinstance(value, str):
            return as_float(value) if self.text else value
        return int(value) if self.is_whole and value is not None else value

    def describe(self) -> str:
        """Describe the allowed values: "a whole number of at least 1, or null (all)"."""
        noun = "a whole number" if self.is_whole else "a number"
        noun = f"a list, each value {noun}" if self.is_list else noun
        low = f"{self.low:.12g}"
        high = f"{self.high:.12g}"
        if math.isinf(self.low):
            limits = "" if self.is_whole else ", and finite"
        elif math.isinf(self.high):
            limits = f" above {low}" if self.excludes_low else f" of at least {low}"
        elif self.excludes_low or self.excludes_high:
            limits = f" above {low}" if self.excludes_low else f" of at least {low}"
            limits += f" and below {high}" if self.excludes_high else f" and at most {high}"
        else:
            limits = f" from {low} to {high}"
        words = "".join(
            f", or {show(value)}{f' ({meaning})' if meaning else ''}"
            for value, meaning in self.words.items()
        )
        texts = ", or a range such as 0.5_2" if self.text else ""
        return f"{noun}{limits}{texts}{words}"


def as_float(text: str) -> float | str:
    """The number in a text, or the text if it is something else, such as the range 0.5_2."""
    try:
        return text if "_" in text else float(text)
    except ValueError:
        return text


def show(value: object) -> str:
    """A value as it is written in YAML, cut if it is long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    if isinstance(value, (dict, list)):
        text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


COUNT = Number(1, is_whole=True)
COUNT_OR_ZERO = Number(0, is_whole=True)
COUNT_OR_NULL = COUNT.with_words({None: ""})
ALL = COUNT.with_words({None: "all"}, {-1: None})
SEED = Number(0, 2**31 - 1, is_whole=True)
PORT = Number(1, 65535, is_whole=True)
POSITIVE = Number(0, excludes_low=True)
AT_LEAST_ZERO = Number(0)
FINITE = Number()
FRACTION = Number(0, 1)
SHARE = Number(0, 1, excludes_low=True)
DECAY = Number(0, 1, excludes_high=True)
SECONDS = Number(0, 10**9, excludes_low=True)
PERIOD: Mapping[object, str] = {-1: "only after the last step"}  # 0 is the same, in verl and here
CONCURRENCY = COUNT.with_words({"auto": "raised until the server slows down"})
LIMIT_OF_TURNS = COUNT.with_words({None: "as many as fit"})

# Patterns as in verl_keys.yaml. If several match a key, the longest decides.
NUMBERS: dict[str, Number] = {
    # the run
    "trainer.total_training_steps": COUNT.with_words({None: "train for trainer.total_epochs"}),
    "trainer.total_epochs": COUNT,
    "trainer.save_freq": COUNT.with_words(PERIOD, {0: -1}),
    "trainer.test_freq": COUNT.with_words({-1: "only before and after training"}, {0: -1}),
    "trainer.max_actor_ckpt_to_keep": COUNT.with_words({None: "all"}, {-1: None, 0: None}),
    "trainer.critic_warmup": COUNT_OR_ZERO,
    "trainer.log_val_generations": COUNT_OR_ZERO,
    "trainer.nnodes": COUNT,
    "trainer.n_gpus_per_node": COUNT,
    "trainer.ray_wait_register_center_timeout": SECONDS.with_words({None: "verl's default"}),
    "ray_kwargs.ray_init.num_cpus": COUNT.with_words({None: "all"}),
    "ray_kwargs.ray_init.num_gpus": COUNT_OR_ZERO.with_words({None: "all"}),
    "ray_kwargs.ray_init.object_store_memory": COUNT.with_words({None: "Ray's default"}),
    # rows
    "data.train_batch_size": COUNT,
    "data.max_prompt_length": COUNT,
    "data.max_response_length": COUNT,
    "data.seed": COUNT_OR_ZERO,
    # sampling
    "actor_rollout_ref.rollout.n": COUNT,
    "actor_rollout_ref.rollout.val_kwargs.n": COUNT,
    "actor_rollout_ref.**.temperature": Number(0, 2),  # vLLM's limit
    "actor_rollout_ref.**.top_k": COUNT.with_words({-1: "off"}, {0: -1}),
    "actor_rollout_ref.**.top_p": SHARE,
    "actor_rollout_ref.rollout.repetition_penalty": POSITIVE,
    "actor_rollout_ref.rollout.seed": SEED,
    "actor_rollout_ref.rollout.agent.num_workers": COUNT_OR_ZERO,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": LIMIT_OF_TURNS,
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": COUNT,
    # the rollout engine
    "actor_rollout_ref.rollout.nnodes": COUNT_OR_ZERO,
    "actor_rollout_ref.rollout.n_gpus_per_node": COUNT,
    "actor_rollout_ref.rollout.gpu_memory_utilization": SHARE,
    "actor_rollout_ref.rollout.*_parallel_size": COUNT,
    "actor_rollout_ref.rollout.max_num_batched_tokens": COUNT,
    "actor_rollout_ref.rollout.max_num_seqs": COUNT,
    "actor_rollout_ref.rollout.max_model_len": COUNT.with_words({None: "the longest episode"}),
    "actor_rollout_ref.rollout.limit_images": COUNT_OR_ZERO.with_words({None: "no limit"}),
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": COUNT_OR_NULL._replace(is_list=True),
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": COUNT,
    "actor_rollout_ref.rollout.prometheus.port": PORT,
    "actor_rollout_ref.rollout.disaggregation.*_replicas": COUNT,
    "actor_rollout_ref.rollout.disaggregation.*_parallel_size": COUNT_OR_NULL,
    "actor_rollout_ref.model.mtp.num_speculative_tokens": COUNT,
    # models
    "**.model.lora_rank": COUNT_OR_ZERO,
    "**.model.lora_alpha": POSITIVE,
    # batches of the workers
    "**.ppo_mini_batch_size": COUNT,
    "**.ppo_epochs": COUNT,
    "**_max_token_len_per_gpu": COUNT,
    "**_micro_batch_size_per_gpu": COUNT_OR_NULL,
    "**.data_loader_seed": SEED,
    "**.ulysses_sequence_parallel_size": COUNT,
    # the loss
    "actor_rollout_ref.actor.clip_ratio_low": AT_LEAST_ZERO,
    "actor_rollout_ref.actor.clip_ratio_high": AT_LEAST_ZERO,
    "actor_rollout_ref.actor.clip_ratio_c": Number(1, excludes_low=True),
    "actor_rollout_ref.actor.tau_*": POSITIVE,
    "actor_rollout_ref.actor.entropy_coeff": FINITE,
    "actor_rollout_ref.actor.kl_loss_coef": AT_LEAST_ZERO,
    "actor_rollout_ref.actor.policy_loss.*_cov_ratio": FRACTION,
    "actor_rollout_ref.actor.policy_loss.clip_cov_*b": FINITE,
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": AT_LEAST_ZERO,
    "actor_rollout_ref.actor.policy_loss.dro_beta": POSITIVE.with_words({None: "not set"}),
    "**.loss_scale_factor": POSITIVE.with_words({None: "the longest response"}),
    "critic.cliprange_value": AT_LEAST_ZERO,
    "critic.model.override_config.initializer_range": POSITIVE,  # 0 would mean 0.02
    # the optimizer
    "**.optim.lr": AT_LEAST_ZERO,
    "**.optim.betas": DECAY._replace(is_list=True),
    "**.optim.weight_decay": AT_LEAST_ZERO,
    "**.optim.clip_grad": POSITIVE,
    "**.optim.lr_warmup_steps": COUNT_OR_ZERO.with_words(
        {-1: "lr_warmup_steps_ratio decides"}, {None: -1}
    ),
    "**.optim.lr_warmup_steps_ratio": FRACTION,
    "**.optim.min_lr_ratio": FRACTION.with_words({None: "0"}),
    "**.optim.num_cycles": POSITIVE,
    # the advantage
    "algorithm.gamma": FRACTION,
    "algorithm.lam": FRACTION,
    "algorithm.kl_ctrl.kl_coef": AT_LEAST_ZERO,
    "algorithm.kl_ctrl.horizon": COUNT,
    "algorithm.kl_ctrl.target_kl": POSITIVE,
    "algorithm.filter_groups.max_num_gen_batches": COUNT_OR_ZERO,
    "algorithm.gdpo_reward_weights": FINITE.with_words({None: "equal"})._replace(is_list=True),
    "algorithm.rollout_correction.rollout_is_threshold": POSITIVE._replace(text=THRESHOLD),
    "algorithm.rollout_correction.rollout_rs_threshold": POSITIVE.with_words(
        {None: "not set"}
    )._replace(text=THRESHOLD),
    # verl's engines: FSDP, Megatron
    "**.fsdp_size": COUNT.with_words({-1: "all GPUs"}),
    "**.min_num_params": COUNT_OR_ZERO,
    "**.pad_to_length_bucket": COUNT,
    "**.entropy_from_logits_chunk_size": COUNT,
    "**.qat.group_size": COUNT,
    "**.fsdp_config.seed": SEED,
    "critic.fsdp.seed": SEED,
    "**.nccl_timeout": SECONDS._replace(is_whole=True),
    "**.megatron.seed": SEED,
    "**.megatron.*_parallel_size": COUNT,
    "**.megatron.expert_tensor_parallel_size": COUNT_OR_NULL,
    "**.megatron.virtual_pipeline_model_parallel_size": COUNT_OR_NULL,
    "**.megatron.max_seqlen_per_dp_cp_rank": COUNT_OR_NULL,
    "**.recompute_num_layers": COUNT_OR_NULL,
    "**.optim.lr_warmup_init": AT_LEAST_ZERO,
    "**.optim.lr_*decay_steps": COUNT_OR_NULL,
    "**.optim.min_lr": AT_LEAST_ZERO,
    "**.optim.muon_momentum": DECAY,
    "**.optim.muon_num_ns_steps": COUNT,
    "**.optim.muon_extra_scale_factor": POSITIVE,
}


@functools.cache
def find_rule(key: str) -> Number | None:
    """The rule for a key of verl, or None if it is no number. The kit's keys: sections.py."""
    patterns = [pattern for pattern in NUMBERS if matches(key, pattern)]
    return NUMBERS[max(patterns, key=len)] if patterns else None
