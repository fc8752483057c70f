"""Sampling parameters that change the rollout engine's probabilities, and not the trainer's.

The trainer computes the probabilities of the model over all tokens, at the temperature of sampling.

Protects: training, from log-probs that are not those of the sampler.
"""

from __future__ import annotations

from collections.abc import Mapping

from kit.recipe.keys import ROLLOUT
from kit.recipe.recipe import Recipe
from kit.recipe.settings import Settings

# {key of actor_rollout_ref.rollout: the values with which the engine samples like the trainer}
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "repetition_penalty": (1,),
    "logprobs_mode": ("processed_logprobs", None),
    "engine_kwargs.vllm.logprobs_mode": ("processed_logprobs", None),
    "engine_kwargs.vllm.logits_processors": (None, []),
    "engine_kwargs.sglang.enable_custom_logit_processor": (None, False),
}
# the same of keys with which the engine computes less exactly than its dtype
EXACT_VALUES: dict[str, tuple[object, ...]] = {
    "quantization": (None,),
    "engine_kwargs.vllm.quantization": (None,),
    "engine_kwargs.vllm.kv_cache_dtype": ("auto", "bfloat16", "float16"),
    "engine_kwargs.sglang.quantization": (None,),
    "engine_kwargs.sglang.kv_cache_dtype": ("auto", "bfloat16", "float16"),
}


def find_distortions(
    settings: Settings, values: Mapping[str, tuple[object, ...]] = NEUTRAL_VALUES
) -> dict[str, object]:
    """Return {key: value} of the parameters that are not neutral.

    A missing key is neutral.
    """
    distortions = {}
    for key, neutral in values.items():
        value = settings.get(f"{ROLLOUT}.{key}")
        if value is not None and value not in neutral:
            distortions[key] = value
    return distortions


def requires_same_probs(recipe: Recipe) -> bool:
    """Return whether the rollout engine and the trainer should compute the same probabilities.

    With top_p, a penalty and others, the engine changes its probabilities before it samples. With
    one_step_off, it has older weights by design.
    """
    return not (find_distortions(recipe) or recipe.trainer.one_step_off)
