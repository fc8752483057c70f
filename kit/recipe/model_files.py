"""The files of a model that are read before a run: configuration, tokenizer, stop ids.

Models of the hub are downloaded once, before the processes start. A run has at least two processes
for each GPU. If each asked the hub for the model, a slow or limited hub would stop the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from omegaconf import DictConfig, OmegaConf

from kit.errors import ConfigError, RunError
from kit.recipe.keys import ROOT
from kit.recipe.load import MODEL
from kit.recipe.recipe import Recipe
from kit.recipe.user_functions import TEACHER

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

REWARD_MODEL = "reward.reward_model.model_path"
OFFLINE = "HF_HUB_OFFLINE"
# formats that neither transformers nor vLLM reads from these models
UNUSED = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pth", "*.ot", "original/*", "onnx/*"]
UNREACHABLE = (OSError, HfHubHTTPError, httpx.HTTPError)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
REWARD_HEADS = ("ForTokenClassification", "ForSequenceClassification")


class ModelFiles(NamedTuple):
    """A model without its weights."""

    tokenizer: PreTrainedTokenizerBase
    hf_config: PretrainedConfig
    stop_ids: set[int]  # ids that end a response


def is_missing_folder(name: str) -> bool:
    """Whether a model's name is a folder that does not exist, and no name of the hub."""
    folder = Path(name).expanduser()
    is_hub_name = len(folder.parts) <= 2 and not name.startswith((".", "/", "~"))
    return not folder.is_dir() and (not is_hub_name or ("/" in name and folder.parent.is_dir()))


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


def take_chat_template(config: DictConfig) -> Iterator[ConfigError]:
    """Read the file that model.custom_chat_template names, since the workers need its text."""
    model = config.actor_rollout_ref.model
    value = model.custom_chat_template or "{"
    for path in (Path(value).expanduser(), ROOT / value):
        if "{" not in value and path.is_file():
            value = model.custom_chat_template = path.read_text(encoding="utf-8")
    if "{" not in value:
        yield ConfigError(
            f"{MODEL}.custom_chat_template={value!r:.80} is neither a file in the current folder "
            f"({Path.cwd()}) or the kit's, nor a template: it has no {{. Give one of these."
        )


def load_pretrained(
    config: DictConfig, key: str, trust_remote_code: bool
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """(configuration, tokenizer) of the model that a key names. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer

    name = OmegaConf.select(config, key)
    try:
        hf_config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        return hf_config, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}={name} is neither a model folder nor a model of the hub ({reason}). Give one."
        ) from None


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> set[int]:
    """Every id that ends a response: the tokenizer's EOS and those of generation_config.json."""
    eos = getattr(generation_config, "eos_token_id", None)
    ids = eos if isinstance(eos, (list, tuple)) else [eos]
    return {tokenizer.eos_token_id, *ids} - {None}


def check_reward_model(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Check that the reward model has a scalar head and the policy's vocabulary.

    Returns its configuration. Raises ConfigError.
    """
    hf_config = check_vocabulary(config, REWARD_MODEL, tokenizer)
    architecture = (hf_config.architectures or [""])[0]
    if not architecture.endswith(REWARD_HEADS) or hf_config.num_labels != 1:
        raise ConfigError(
            f"{REWARD_MODEL}={OmegaConf.select(config, REWARD_MODEL)}: {hf_config.architectures} "
            "has no scalar head. Give a classifier with one label."
        )
    return hf_config


def check_vocabulary(
    config: DictConfig, key: str, tokenizer: PreTrainedTokenizerBase
) -> PretrainedConfig:
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


def expert_count(text_config: PretrainedConfig) -> int:
    """Experts of a layer; 0 if the model is no mixture of experts."""
    for key in EXPERT_COUNTS:
        if count := getattr(text_config, key, 0):
            return int(count)
    return 0


# --- download ------------------------------------------------------------------------------------


def download_models(recipe: Recipe, say: Callable[[str], None]) -> dict[str, str]:
    """Download the models that a recipe names, unless they are folders or already here.

    Returns environment variables for the workers: HF_HUB_OFFLINE, unless they are on a cluster or
    may need other files of the hub: code that a model names, or attention kernels. Raises RunError.
    """
    for name in list_hub_models(recipe):
        say(f"Downloading {name} from the hub, if it is not here")
        download_model(name)
    is_cluster = bool(recipe.verl.ray_kwargs.ray_init.get("address"))
    uses_code = recipe.model.trust_remote_code
    if is_cluster or uses_code or importlib.util.find_spec("kernels"):
        return {}
    return {OFFLINE: "1"}


def list_hub_models(recipe: Recipe) -> list[str]:
    """The models of the hub that the workers of a command load."""
    keys = [f"{MODEL}.path"]
    if recipe.has_critic:
        keys.append("critic.model.path")
    if recipe.has_reward_model:
        keys.append(REWARD_MODEL)
    if recipe.teacher:
        keys.append(TEACHER)
    names = [str(recipe.get(key)) for key in keys]
    return [name for name in dict.fromkeys(names) if not Path(name).expanduser().is_dir()]


def download_model(name: str) -> str:
    """Download a model -> its folder."""
    try:
        return str(huggingface_hub.snapshot_download(name, ignore_patterns=UNUSED))
    except UNREACHABLE as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"{name} could not be downloaded from the hub: {reason} Set {MODEL}.path to a folder, "
            "or try again."
        ) from error
