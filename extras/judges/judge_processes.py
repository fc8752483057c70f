"""Describe the processes that serve judges, and reserve GPUs for them.

Each judge has one of Gym's model servers, which sends its requests to the judge proxy
(judge_proxy.py). A judge with `start` also has a vLLM server.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from extras.judges.judge_settings import Judge
from kit.errors import ConfigError
from kit.gym import network
from kit.gym.server_process import MODELS, ProcessSpec

DEFAULT_START_TIMEOUT_S = 600.0  # for a vLLM to load its model
# of vLLM, and to download its model
VLLM_VARIABLES = re.compile(r"(?:VLLM|NCCL|TORCH|HF)_\w+|HUGGING_FACE_HUB_TOKEN|\w+_(?i:proxy)")
REPOSITORY = Path(__file__).parents[2]


def model_server_spec(judge: Judge, base_url: str, api_key: str, python: str) -> ProcessSpec:
    """Return the process of Gym's model server for a judge.

    base_url, api_key: of the judge proxy. python: interpreter with nemo-gym.
    """
    prefix = "openai_" if judge.server == "openai_model" else ""
    settings: dict[str, Any] = {
        f"{prefix}base_url": base_url,
        f"{prefix}api_key": api_key,
        f"{prefix}model": judge.model,
    }
    if judge.server in ("vllm_model", "genrm_model"):
        settings |= {"return_token_id_information": False, "uses_reasoning_parser": False}
    overrides = settings | judge.config
    return ProcessSpec(
        judge.name,
        network.HOST,
        network.find_free_port(),
        MODELS,
        judge.server,
        overrides=overrides,
        config_key=f"gym.judges.{judge.name}.config",
        python=str(Path(python).absolute()),
    )


def vllm_process_spec(judge: Judge) -> ProcessSpec:
    """Return the process of the vLLM server for a judge with `start`. Its port is in judge.url."""
    start = judge.start or {}
    port = urlsplit(judge.url).port
    gpus = start.get("gpus") or []
    path = Path(start["model"]).expanduser()
    model = str(path.resolve()) if path.is_dir() else str(start["model"])
    arguments: dict[str, Any] = {
        "host": network.HOST,
        "port": port,
        # No web page can call the server, and it answers only the routes that Gym uses.
        "allowed_origins": "[]",
        "middleware": "kit.rollout.vllm_routes.JudgeRoutes",
    }
    if gpus:
        arguments["tensor_parallel_size"] = len(gpus)
    arguments |= start["args"]
    # PYTHONPATH: for the middleware
    env = {"VLLM_API_KEY": judge.key, "PYTHONPATH": str(REPOSITORY)}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--served-model-name", judge.model]
    return ProcessSpec(
        f"{judge.name}_vllm",
        network.HOST,
        port or 0,
        command=command + _format_options(arguments),
        env=env,
        visible_variables=[name for name in os.environ if VLLM_VARIABLES.fullmatch(name)],
        start_timeout_s=float(start.get("deadline_s") or DEFAULT_START_TIMEOUT_S),
    )


def _format_options(arguments: Mapping[str, Any]) -> list[str]:
    """Return command-line options. True is a flag without value; False and None are left out."""
    options = []
    for key, value in arguments.items():
        if value is False or value is None:
            continue
        options.append(f"--{key.replace('_', '-')}")
        if value is not True:
            options.append(str(value))
    return options


@contextlib.contextmanager
def reserve_gpus(specs: Mapping[str, Any]) -> Generator[None, None, None]:
    """Hide the judges' GPUs from this process and the processes that it starts, until exit.

    specs: gym.judges. Raises ConfigError if a GPU is not visible here.
    """
    reserved = _find_reserved_gpus(specs)
    if not reserved:
        yield
        return
    import torch

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if before:
        visible = [entry.strip() for entry in before.split(",")]
    else:
        visible = [str(index) for index in range(torch.cuda.device_count())]
    missing = reserved - set(visible)
    if missing:
        raise ConfigError(
            f"`gym.judges`: start.gpus contains {', '.join(sorted(missing))}, but the visible GPUs "
            f"are {', '.join(visible) or 'none'}. Set GPUs that are visible."
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for gpu in visible if gpu not in reserved)
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _find_reserved_gpus(specs: Mapping[str, Any]) -> set[str]:
    """Return the GPUs that the entries of gym.judges name."""
    reserved: set[str] = set()
    for spec in specs.values():
        if spec != "policy" and spec.get("start"):
            reserved.update(str(gpu) for gpu in spec["start"].get("gpus") or [])
    return reserved
