"""The numbers of a recipe: the range of each key, and the meaning of -1 and null.

    find_rule(key, default)           the rule for a key of verl, or None
    rule.is_valid(value)              whether the key may have this value
    rule.describe()                   the allowed values, for messages

Meanings are those of verl's configuration files. A value without a meaning there is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml

from kit.recipe.keys import KEYS, matches, matches_any

NONE: Mapping[object, Any] = MappingProxyType({})


class Number(NamedTuple):
    """The values that a number of the recipe may have.

    words: {value outside the range: its meaning}.
    """

    low: float = -math.inf
    high: float = math.inf
    is_whole: bool = False
    excludes_low: bool = False
    words: Mapping[object, str] = NONE

    def with_words(self, words: Mapping[object, str]) -> Number:
        """Return this rule with other values and their meanings."""
        return self._replace(words=words)

    def is_valid(self, value: object) -> bool:
        """Whether the key may have this value."""
        if isinstance(value, (bool, list, dict)):
            return False
        if value in self.words:
            return True
        return isinstance(value, (int, float)) and self.is_in_range(value)

    def is_in_range(self, value: float) -> bool:
        """Whether a finite number is within the limits."""
        if not math.isfinite(value) or (self.is_whole and not isinstance(value, int)):
            return False
        is_above = value > self.low if self.excludes_low else value >= self.low
        return is_above and value <= self.high

    def describe(self) -> str:
        """Describe the allowed values: "a whole number of at least 1, or null (all)"."""
        noun = "a whole number" if self.is_whole else "a number"
        limits = ""
        if not math.isinf(self.low):
            limits = f" {'above' if self.excludes_low else 'of at least'} {self.low:.12g}"
        if not math.isinf(self.high):
            limits += f" and at most {self.high:.12g}"
        words = "".join(
            f", or {show(value)}{f' ({meaning})' if meaning else ''}"
            for value, meaning in self.words.items()
        )
        return f"{noun}{limits}{words}"


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
ALL = COUNT.with_words({None: "all"})
SEED = Number(0, 2**31 - 1, is_whole=True)
PORT = Number(1, 65535, is_whole=True)
POSITIVE = Number(0, excludes_low=True)
AT_LEAST_ZERO = Number(0)
FINITE = Number()
FRACTION = Number(0, 1)
SHARE = Number(0, 1, excludes_low=True)
SECONDS = Number(0, 10**9, excludes_low=True)
CONCURRENCY = COUNT.with_words({"auto": "raised until the server slows down"})

# Patterns as in verl_keys.yaml. If several match a key, the longest decides. Other numbers have a
# rule by their default.
NUMBERS: dict[str, Number] = {
    # the run
    "trainer.total_training_steps": COUNT.with_words({None: "train for trainer.total_epochs"}),
    "trainer.save_freq": COUNT.with_words({-1: "only after the last step"}),
    "trainer.test_freq": COUNT.with_words({-1: "only before and after training"}),
    "trainer.max_actor_ckpt_to_keep": ALL,
    "ray_kwargs.ray_init.num_cpus": ALL,
    "ray_kwargs.ray_init.num_gpus": COUNT_OR_ZERO.with_words({None: "all"}),
    "ray_kwargs.ray_init.object_store_memory": COUNT.with_words({None: "Ray's default"}),
    "**seed": SEED,
    # the rollout engine
    "actor_rollout_ref.**.temperature": Number(0, 2),  # vLLM's limit
    "actor_rollout_ref.**.top_k": COUNT.with_words({-1: "off"}),
    "actor_rollout_ref.**.top_p": SHARE,
    "actor_rollout_ref.rollout.repetition_penalty": POSITIVE,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": COUNT.with_words(
        {None: "as many as fit"}
    ),
    "actor_rollout_ref.rollout.gpu_memory_utilization": SHARE,
    "actor_rollout_ref.rollout.max_model_len": COUNT.with_words({None: "the longest episode"}),
    # models and batches
    "**.model.lora_alpha": POSITIVE,
    "**_micro_batch_size_per_gpu": COUNT_OR_NULL,
    "**.fsdp_size": COUNT.with_words({-1: "all GPUs"}),
    # the loss
    "actor_rollout_ref.actor.clip_ratio_c": Number(1, excludes_low=True),
    "actor_rollout_ref.actor.entropy_coeff": FINITE,
    "actor_rollout_ref.actor.policy_loss.*_cov_ratio": FRACTION,
    "actor_rollout_ref.actor.policy_loss.clip_cov_*b": FINITE,
    "actor_rollout_ref.actor.policy_loss.dro_beta": POSITIVE.with_words({None: "not set"}),
    "**.loss_scale_factor": POSITIVE.with_words({None: "the longest response"}),
    "critic.model.override_config.initializer_range": POSITIVE,  # 0 would mean 0.02
    # the optimizer
    "**.optim.clip_grad": POSITIVE,
    "**.optim.lr_warmup_steps": COUNT_OR_ZERO.with_words({-1: "lr_warmup_steps_ratio decides"}),
    "**.optim.lr_warmup_steps_ratio": FRACTION,
    "**.optim.min_lr_ratio": FRACTION.with_words({None: "0"}),
    # the advantage
    "algorithm.gamma": FRACTION,
    "algorithm.lam": FRACTION,
}


def find_rule(key: str, default: object = None) -> Number | None:
    """The rule for a key of verl, or None if it is no number. The kit's keys: sections.py.

    default: of the key. Without a rule in the table, a number may be 0 if its default is.
    """
    if matches_any(key, KEYS.texts):
        return None
    patterns = [pattern for pattern in NUMBERS if matches(key, pattern)]
    if patterns:
        return NUMBERS[max(patterns, key=len)]
    if isinstance(default, bool) or not isinstance(default, (int, float)):
        return None
    if isinstance(default, float):
        return AT_LEAST_ZERO
    return COUNT if default else COUNT_OR_ZERO
