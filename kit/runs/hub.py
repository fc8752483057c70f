"""Download the models of a recipe from the hub once, before its processes start.

A run has at least two processes for each GPU. If each asked the hub for the model, a slow or
limited hub would stop the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import httpx
import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from omegaconf import DictConfig, OmegaConf

from kit.config.load import MODEL
from kit.config.model_files import REWARD_MODEL
from kit.config.user_functions import TEACHER, needs, teacher_model
from kit.errors import RunError

OFFLINE = "HF_HUB_OFFLINE"
# formats that neither transformers nor vLLM reads from these models
UNUSED = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pth", "*.ot", "original/*", "onnx/*"]
UNREACHABLE = (OSError, HfHubHTTPError, httpx.HTTPError)


def download_models(config: DictConfig, command: str, say: Callable[[str], None]) -> None:
    """Download the models that a recipe names, unless they are folders or already here.

    Sets HF_HUB_OFFLINE for the workers, unless they are on a cluster or may need other files of the
    hub: code that a model names, or attention kernels. Raises RunError.
    """
    for name in list_hub_models(config, command):
        say(f"Downloading {name} from the hub, if it is not here")
        download_model(name)
    is_cluster = bool(config.ray_kwargs.ray_init.get("address"))
    uses_code = config.actor_rollout_ref.model.trust_remote_code
    if is_cluster or uses_code or importlib.util.find_spec("kernels"):
        return
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    OmegaConf.update(variables, OFFLINE, "1", force_add=True)


def list_hub_models(config: DictConfig, command: str) -> list[str]:
    """The models of the hub that the workers of a command load."""
    keys = [f"{MODEL}.path"]
    if command == "train" and needs(config, "values"):
        keys.append("critic.model.path")
    if command == "train" and config.reward.reward_model.enable:
        keys.append(REWARD_MODEL)
    if command == "train" and teacher_model(config):
        keys.append(TEACHER)
    names = [str(OmegaConf.select(config, key)) for key in keys]
    return [name for name in dict.fromkeys(names) if not Path(name).expanduser().is_dir()]


def download_model(name: str) -> str:
    """Download a model -> its folder. Of two formats of the weights, only safetensors."""
    ignored = list(UNUSED)
    try:
        if has_safetensors(name):
            ignored += ["*.bin", "*.pt"]
        return str(huggingface_hub.snapshot_download(name, ignore_patterns=ignored))
    except UNREACHABLE as error:
        reason = str(error).strip().splitlines()[0]
        raise RunError(
            f"{name} could not be downloaded from the hub: {reason} Set {MODEL}.path to a folder, "
            "or try again."
        ) from error


def has_safetensors(name: str) -> bool:
    """Whether a model of the hub has safetensors files. False if the hub cannot be reached."""
    try:
        files = huggingface_hub.HfApi().list_repo_files(name)
    except UNREACHABLE:
        return False  # snapshot_download finds the files that are already here
    return any(file.endswith(".safetensors") for file in files)
