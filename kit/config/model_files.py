"""The files of a model that are read before a run: configuration, tokenizer, stop ids."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from kit.config.load import MODEL
from kit.errors import ConfigError

REWARD_MODEL = "reward.reward_model.model_path"
REWARD_HEADS = ("ForTokenClassification", "ForSequenceClassification")


class ModelFiles(NamedTuple):
    """A model without its weights."""

    tokenizer: Any
    hf_config: Any  # the Hugging Face configuration
    stop_ids: set[int]  # ids that end a response


def load_model_files(config: DictConfig) -> ModelFiles:
    """Load the policy's configuration and tokenizer. Raises ConfigError."""
    from transformers import GenerationConfig

    model = config.actor_rollout_ref.model
    hf_config, tokenizer = load_pretrained(
        config, f"{MODEL}.path", trust_remote_code=model.trust_remote_code
    )
    try:
        generation_config = GenerationConfig.from_pretrained(model.path)
    except OSError:
        generation_config = None  # without the file a response ends at the tokenizer's EOS
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # the attention mask marks padding, not the id
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return ModelFiles(tokenizer, hf_config, stop_token_ids(tokenizer, generation_config))


def load_pretrained(config: DictConfig, key: str, **settings: Any) -> tuple[Any, Any]:
    """(configuration, tokenizer) of the model that a key names. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer

    name = OmegaConf.select(config, key)
    try:
        hf_config = AutoConfig.from_pretrained(name, **settings)
        return hf_config, AutoTokenizer.from_pretrained(name, **settings)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}={name} is neither a model folder nor a model of the hub ({reason}). Give one."
        ) from None


def stop_token_ids(tokenizer: Any, generation_config: Any) -> set[int]:
    """Every id that ends a response: the tokenizer's EOS and those of generation_config.json."""
    eos = getattr(generation_config, "eos_token_id", None)
    ids = eos if isinstance(eos, (list, tuple)) else [eos]
    return {tokenizer.eos_token_id, *ids} - {None}


def check_reward_model(config: DictConfig, tokenizer: Any) -> None:
    """Check that the reward model has a scalar head and the policy's vocabulary.

    Raises ConfigError.
    """
    hf_config = check_vocabulary(config, REWARD_MODEL, tokenizer)
    architecture = (hf_config.architectures or [""])[0]
    if not architecture.endswith(REWARD_HEADS) or hf_config.num_labels != 1:
        raise ConfigError(
            f"{REWARD_MODEL}={OmegaConf.select(config, REWARD_MODEL)}: {hf_config.architectures} "
            "has no scalar head. Give a classifier with one label."
        )


def check_vocabulary(config: DictConfig, key: str, tokenizer: Any) -> Any:
    """Check that a model has the policy's vocabulary -> its configuration. Raises ConfigError.

    The model scores the policy's ids, so each id must be the same token for both models.
    """
    trust_remote_code = config.actor_rollout_ref.model.trust_remote_code
    hf_config, other = load_pretrained(config, key, trust_remote_code=trust_remote_code)
    differing = set(other.get_vocab().items()) ^ set(tokenizer.get_vocab().items())
    if differing:
        raise ConfigError(
            f"{key}={OmegaConf.select(config, key)}: its vocabulary differs from the policy's "
            f"({min(differing)[0]!r} does), and it would score the policy's ids. Give a model with "
            "the same vocabulary."
        )
    return hf_config


def expert_count(text_config: Any) -> int:
    """Experts of a layer; 0 if the model is no mixture of experts."""
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if count := getattr(text_config, key, 0):
            return int(count)
    return 0
