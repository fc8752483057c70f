"""Checks for rollouts with SGLang, transformers, fp8 or speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from kit.features import Feature
from kit.recipe.load import MODEL, ROLLOUT, base_configs
from kit.recipe.model_files import expert_count
from kit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ENGINES = ("vllm", "hf", "sglang")
SPECULATIVE = f"{ROLLOUT}.engine_kwargs.vllm.speculative_config"
UNREAD_BY_SGLANG = (  # keys of rollout that verl's SGLang server does not read
    "ignore_eos",
    "repetition_penalty",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "logprobs_mode",
    "max_num_batched_tokens",
    "scheduling_policy",
    "cudagraph_capture_sizes",
    "seed",
)


class Backends(Feature):
    """Another rollout engine than vLLM with its defaults."""

    def check_recipe(self, config: DictConfig) -> Iterator[str]:
        """Check that the rollout engine supports the options that the recipe sets."""
        rollout = config.actor_rollout_ref.rollout
        if rollout.name not in ENGINES:
            yield f"{ROLLOUT}.name={rollout.name} is not one of {', '.join(ENGINES)}. Change it."
        if rollout.name == "sglang":
            yield from check_sglang(config)
        elif rollout.engine_kwargs.sglang:
            yield f"{ROLLOUT}.engine_kwargs.sglang needs {ROLLOUT}.name=sglang. Set that."
        if rollout.name == "hf":
            yield from check_transformers(config)
        if (rollout.engine_kwargs.get("vllm") or {}).get("speculative_config"):
            yield from check_speculative(config)

    def set_sizes(self, config: DictConfig, hf_config: PretrainedConfig) -> None:
        """Fill in values that follow from the rollout engine."""
        rollout = config.actor_rollout_ref.rollout
        if rollout.name == "sglang" and not rollout.max_model_len:
            longest = config.data.max_prompt_length + config.data.max_response_length
            rollout.max_model_len = longest + 1  # verl's SGLang server leaves one token free

    def check_model(self, recipe: Recipe, hf_config: PretrainedConfig) -> Iterator[str]:
        """Check that the model fits transformers' rollouts, and fp8 rollouts the device."""
        rollout = recipe.rollout
        if rollout.name == "hf" and expert_count(hf_config.get_text_config()):
            yield (
                f"{ROLLOUT}.name=hf takes no mixture of experts: verl sends each expert by itself, "
                "and transformers has them in one tensor. Remove it, for vLLM."
            )
        if not rollout.quantization:
            return
        key = f"{ROLLOUT}.quantization={rollout.quantization}"
        if rollout.quantization != "fp8" or rollout.name == "hf":
            yield f"{key} is not supported: only fp8 is, with vLLM and SGLang. Remove it."
        elif recipe.trainer.device == "cpu":
            yield f"{key} on a CPU: verl's weight sync does not quantize there. Remove it."


def check_sglang(config: DictConfig) -> Iterator[str]:
    """Check that SGLang has GPUs, and that verl's server for it reads the options of the recipe."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.device == "cpu":
        yield f"{ROLLOUT}.name=sglang needs GPUs. Use vllm or hf."
    if rollout.full_determinism:
        yield f"{ROLLOUT}.full_determinism: verl passes no seed to SGLang's requests. Remove it."
    if rollout.nnodes and rollout.free_cache_engine:
        yield (
            f"{ROLLOUT}.free_cache_engine: servers on separate GPUs would release their memory "
            "twice. Set it to false."
        )
    defaults = base_configs(config.model_engine)[1].actor_rollout_ref.rollout
    for key in UNREAD_BY_SGLANG:
        if rollout.get(key) != defaults.get(key):
            yield f"{ROLLOUT}.{key} is not read with {ROLLOUT}.name=sglang. Remove it."


def check_transformers(config: DictConfig) -> Iterator[str]:
    """Check that rollouts by transformers use one whole model on each GPU."""
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    if not model.external_lib:
        yield f"{ROLLOUT}.name=hf is not in {MODEL}.external_lib. Add --config hf."
    if rollout.tensor_model_parallel_size * rollout.data_parallel_size > 1:
        yield (
            f"{ROLLOUT}.name=hf has the whole model on each GPU. Remove "
            f"{ROLLOUT}.tensor_model_parallel_size."
        )
    if rollout.nnodes or config.trainer.one_step_off:
        yield f"{ROLLOUT}.name=hf samples between updates only. Remove --config separate or ahead."
    if model.lora_rank and not model.lora.merge:
        yield f"{ROLLOUT}.name=hf takes no separate adapter. Set {MODEL}.lora.merge=true."


def check_speculative(config: DictConfig) -> Iterator[str]:
    """Check that speculative decoding uses n-grams, with vLLM."""
    rollout = config.actor_rollout_ref.rollout
    method = rollout.engine_kwargs.vllm.speculative_config.get("method")
    if rollout.name != "vllm":
        yield f"{SPECULATIVE}: {ROLLOUT}.name={rollout.name} takes no draft tokens. Remove it."
    if method != "ngram":
        yield (
            f"{SPECULATIVE}.method={method} drafts with a model that gets no weight updates, so it "
            "gets worse with every step. Set ngram."
        )
    if rollout.full_determinism:
        yield (
            f"{SPECULATIVE}: with {ROLLOUT}.full_determinism vLLM uses other random numbers where "
            "a draft ends. Set one of them."
        )
