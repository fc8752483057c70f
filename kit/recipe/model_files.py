"""The files of a model that are read before a run: configuration, tokenizer, stop ids.

Models of the hub are downloaded once, before the processes start. A run has at least two processes
for each GPU. If each asked the hub for the model, a slow or limited hub would stop the run.

Protects: models that cannot read the policy's ids end the run before a worker starts.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from kit.errors import ConfigError, RunError
from kit.recipe.keys import CRITIC, MODEL, REWARD_MODEL, ROOT, TEACHER, make_command
from kit.recipe.settings import Settings

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

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


def check_paths(settings: Settings) -> Iterator[str]:
    """Check that each model that the recipe needs is a folder, or maybe a name of the hub."""
    needed = [f"{MODEL}.path"]
    if settings.reward.reward_model.enable:
        needed.append(REWARD_MODEL)
    if settings.distillation.enabled:
        needed.append(TEACHER)
    if settings.critic.model.path != settings.model.path:
        needed.append(CRITIC)
    for key in needed:
        name = settings.get(key) or ""
        folder = Path(name).expanduser()
        if not name:
            yield f"This recipe needs {key}. Set it."
        elif folder.is_file():
            yield f"{key}={name} is a file. Give the model's folder, {folder.parent}."
        elif is_missing_folder(name):
            yield (
                f"{key}={name}: no such model folder. Give an existing one, or a name of the hub "
                f"(`{make_command('model')}` fetches the demo's model)."
            )


def is_missing_folder(name: str) -> bool:
    """Return whether a model's name is a folder that does not exist, and no name of the hub."""
    folder = Path(name).expanduser()
    is_hub_name = len(folder.parts) <= 2 and not name.startswith((".", "/", "~"))
    return not folder.is_dir() and (not is_hub_name or ("/" in name and folder.parent.is_dir()))


def load_model_files(settings: Settings, chat_template: str | None = None) -> ModelFiles:
    """Load the policy's configuration and tokenizer. Raises ConfigError.

    chat_template: replaces the tokenizer's.
    """
    from transformers import GenerationConfig

    hf_config, tokenizer = load_pretrained(settings, f"{MODEL}.path")
    try:
        generation_config = GenerationConfig.from_pretrained(settings.model.path)
    except OSError:
        generation_config = None  # without the file a response ends at the tokenizer's EOS
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # the attention mask marks padding, not the id
    if chat_template:
        tokenizer.chat_template = chat_template
    return ModelFiles(tokenizer, hf_config, stop_token_ids(tokenizer, generation_config))


def read_chat_template(settings: Settings) -> str | None:
    """Return the template of model.custom_chat_template, a text or a file. Raises ConfigError.

    The workers need its text.
    """
    value = settings.model.custom_chat_template
    if not value or "{" in value:
        return value
    for path in (Path(value).expanduser(), ROOT / value):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            if "{" in text:
                return text
            value = text
    raise ConfigError(
        f"{MODEL}.custom_chat_template={value!r:.80} is neither a file in the current folder "
        f"({Path.cwd()}) or in {ROOT}, nor a template: it has no {{. Give one of these."
    )


def load_pretrained(
    settings: Settings, key: str
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Load (configuration, tokenizer) of the model that a key names. Raises ConfigError."""
    from transformers import AutoConfig, AutoTokenizer

    name = str(Path(settings.get(key)).expanduser())
    trust = {"trust_remote_code": settings.model.trust_remote_code}
    try:
        hf_config = AutoConfig.from_pretrained(name, **trust)
        return hf_config, AutoTokenizer.from_pretrained(name, **trust)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}={name} is neither a model folder nor a model of the hub ({reason}). Give one."
        ) from None


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None
) -> set[int]:
    """Return each id that ends a response: the tokenizer's EOS, those of generation_config.json."""
    eos = getattr(generation_config, "eos_token_id", None)
    ids = eos if isinstance(eos, (list, tuple)) else [eos]
    return {tokenizer.eos_token_id, *ids} - {None}


def load_other_models(
    settings: Settings, tokenizer: PreTrainedTokenizerBase
) -> dict[str, PretrainedConfig]:
    """Return {name: configuration} of the other models, which read the policy's ids.

    Raises ConfigError.
    """
    keys = {}
    if settings.has_critic and settings.critic.model.path != settings.model.path:
        keys["critic"] = CRITIC
    if settings.has_reward_model:
        keys["reward model"] = REWARD_MODEL
    if settings.teacher:
        keys["teacher"] = TEACHER
    models = {name: check_vocabulary(settings, key, tokenizer) for name, key in keys.items()}
    if settings.has_reward_model:
        check_reward_head(settings, models["reward model"])
    return models


def check_reward_head(settings: Settings, hf_config: PretrainedConfig) -> None:
    """Check that the reward model has a scalar head. Raises ConfigError."""
    architecture = (hf_config.architectures or [""])[0]
    if not architecture.endswith(REWARD_HEADS) or hf_config.num_labels != 1:
        raise ConfigError(
            f"{REWARD_MODEL}={settings.get(REWARD_MODEL)}: {hf_config.architectures} has no scalar "
            "head. Give a classifier with one label."
        )


def check_vocabulary(
    settings: Settings, key: str, tokenizer: PreTrainedTokenizerBase
) -> PretrainedConfig:
    """Check that a model has the policy's vocabulary, and return its configuration.

    The model scores the policy's ids, so each id must be the same token for both models. Raises
    ConfigError.
    """
    hf_config, other = load_pretrained(settings, key)
    differing = set(other.get_vocab().items()) ^ set(tokenizer.get_vocab().items())
    if differing:
        raise ConfigError(
            f"{key}={settings.get(key)}: its vocabulary differs from the policy's "
            f"({min(differing)[0]!r} does), and it would score the policy's ids. Give a model with "
            "the same vocabulary."
        )
    return hf_config


def expert_count(text_config: PretrainedConfig) -> int:
    """Return the experts of a layer; 0 if the model is no mixture of experts."""
    for key in EXPERT_COUNTS:
        if count := getattr(text_config, key, 0):
            return int(count)
    return 0


# --- download ------------------------------------------------------------------------------------


def download_models(recipe: Settings, say: Callable[[str], None]) -> dict[str, str]:
    """Download the models that a recipe names, unless they are folders or already here.

    Returns environment variables for the workers: HF_HUB_OFFLINE, unless they are on a cluster or
    may need other files of the hub: code that a model names, or attention kernels. Raises RunError.
    """
    for name in list_hub_models(recipe):
        say(f"Downloading {name} from the hub, if it is not here")
        download_model(name)
    is_cluster = bool(recipe.ray_kwargs.ray_init.get("address"))
    uses_code = recipe.model.trust_remote_code
    if is_cluster or uses_code or importlib.util.find_spec("kernels"):
        return {}
    return {OFFLINE: "1"}


def list_hub_models(recipe: Settings) -> list[str]:
    """Return the models of the hub that the workers of a command load."""
    keys = [f"{MODEL}.path"]
    if recipe.has_critic:
        keys.append(CRITIC)
    if recipe.has_reward_model:
        keys.append(REWARD_MODEL)
    if recipe.teacher:
        keys.append(TEACHER)
    names = [str(recipe.get(key)) for key in keys]
    return [name for name in dict.fromkeys(names) if not Path(name).expanduser().is_dir()]


def download_model(name: str) -> str:
    """Download a model, and return its folder. Raises RunError."""
    try:
        return str(huggingface_hub.snapshot_download(name, ignore_patterns=UNUSED))
    except UNREACHABLE as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"{name} could not be downloaded from the hub: {reason} Set {MODEL}.path to a folder, "
            "or try again."
        ) from error
