"""Checks for rollouts with SGLang, transformers, fp8 or speculative decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kit.recipe.keys import MODEL, ROLLOUT, select_nested
from kit.recipe.load import read_defaults
from kit.recipe.model_files import expert_count
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings
from kit.run.features import RecipeCheck

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


class Backends(RecipeCheck):
    """Another rollout engine than vLLM with its defaults."""

    def check_settings(self, settings: Settings) -> Iterator[str]:
        """Check that the rollout engine supports the options that the recipe sets."""
        rollout = settings.rollout
        if rollout.name not in ENGINES:
            yield f"{ROLLOUT}.name={rollout.name} is not one of {', '.join(ENGINES)}. Change it."
        if rollout.name == "sglang":
            yield from check_sglang(settings)
        elif rollout.engine_kwargs.get("sglang"):
            yield f"{ROLLOUT}.engine_kwargs.sglang needs {ROLLOUT}.name=sglang. Set that."
        if rollout.name == "hf":
            yield from check_transformers(settings)
        if (rollout.engine_kwargs.get("vllm") or {}).get("speculative_config"):
            yield from check_speculative(settings)

    def derive(self, settings: Settings, hf_config: PretrainedConfig) -> Mapping[str, object]:
        """Return values that follow from the rollout engine."""
        if settings.rollout.name != "sglang" or settings.rollout.max_model_len:
            return {}
        # verl's SGLang server leaves one token free
        return {f"{ROLLOUT}.max_model_len": settings.max_episode_length + 1}

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


def check_sglang(settings: Settings) -> Iterator[str]:
    """Check that SGLang has GPUs, and that verl's server for it reads the options of the recipe."""
    rollout = settings.rollout
    if settings.trainer.device == "cpu":
        yield f"{ROLLOUT}.name=sglang needs GPUs. Use vllm or hf."
    if rollout.full_determinism:
        yield f"{ROLLOUT}.full_determinism: verl passes no seed to SGLang's requests. Remove it."
    if rollout.nnodes and rollout.free_cache_engine:
        yield (
            f"{ROLLOUT}.free_cache_engine: servers on separate GPUs would release their memory "
            "twice. Set it to false."
        )
    defaults = read_defaults(settings.model_engine).base.resolved
    for name in UNREAD_BY_SGLANG:
        key = f"{ROLLOUT}.{name}"
        is_set = name in rollout.model_fields_set
        if is_set and settings.get(key) != select_nested(defaults, key):
            yield f"{key} is not read with {ROLLOUT}.name=sglang. Remove it."


def check_transformers(settings: Settings) -> Iterator[str]:
    """Check that rollouts by transformers use one whole model on each GPU."""
    rollout = settings.rollout
    model = settings.model
    if not model.external_lib:
        yield f"{ROLLOUT}.name=hf is not in {MODEL}.external_lib. Add --config hf."
    if rollout.tensor_model_parallel_size * rollout.data_parallel_size > 1:
        yield (
            f"{ROLLOUT}.name=hf has the whole model on each GPU. Remove "
            f"{ROLLOUT}.tensor_model_parallel_size."
        )
    if rollout.nnodes or settings.trainer.one_step_off:
        yield f"{ROLLOUT}.name=hf samples between updates only. Remove --config separate or ahead."
    if model.lora_rank and not model.lora.merge:
        yield f"{ROLLOUT}.name=hf takes no separate adapter. Set {MODEL}.lora.merge=true."


def check_speculative(settings: Settings) -> Iterator[str]:
    """Check that speculative decoding uses n-grams, with vLLM."""
    rollout = settings.rollout
    method = rollout.engine_kwargs["vllm"]["speculative_config"].get("method")
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
