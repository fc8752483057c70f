"""Describe the processes that serve judges, and reserve GPUs for them.

Each judge has one of Gym's model servers, which sends its requests to the judge proxy
(judge_proxy.py). A judge with `start` also has a vLLM server.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from env import Json
from extras.judges.judge_settings import Judge
from kit.recipe.keys import ROOT
from kit.verify import network
from kit.verify.server_process import MODELS, ProcessSpec

# of vLLM, and to download its model
VLLM_VARIABLES = re.compile(r"(?:VLLM|NCCL|TORCH|HF)_\w+|HUGGING_FACE_HUB_TOKEN|\w+_(?i:proxy)")


def model_server_spec(judge: Judge, base_url: str, api_key: str, python: str) -> ProcessSpec:
    """Return the process of Gym's model server for a judge.

    base_url, api_key: of the judge proxy. python: interpreter with nemo-gym.
    """
    prefix = "openai_" if judge.settings.server == "openai_model" else ""
    settings: Json = {
        f"{prefix}base_url": base_url,
        f"{prefix}api_key": api_key,
        f"{prefix}model": judge.model,
    }
    if judge.settings.server == "vllm_model":
        settings |= {"return_token_id_information": False, "uses_reasoning_parser": False}
    return ProcessSpec(
        judge.name,
        MODELS,
        judge.settings.server,
        settings | judge.settings.config,
        f"gym.judges.{judge.name}.config",
        port=network.find_free_port(),
        python=str(Path(python).absolute()),
    )


def vllm_process_spec(judge: Judge) -> ProcessSpec:
    """Return the process of the vLLM server for a judge with `start`. Its port is in judge.url."""
    start = judge.settings.start
    assert start
    port = urlsplit(judge.url).port
    path = Path(start.model).expanduser()
    model = str(path.resolve()) if path.is_dir() else start.model
    options: Json = {
        "model": model,
        "served_model_name": judge.model,
        "host": network.HOST,
        "port": port,
        # No web page can call the server, and it answers only the routes that Gym uses.
        "allowed_origins": "[]",
        "middleware": "kit.engine.vllm_routes.JudgeRoutes",
    }
    if judge.cpu_dtype:
        options |= {"dtype": judge.cpu_dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**30}
    # PYTHONPATH: for the middleware
    env = {"VLLM_API_KEY": judge.key, "PYTHONPATH": str(ROOT)}
    if start.gpus:
        options["tensor_parallel_size"] = len(start.gpus)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(start.gpus)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return ProcessSpec(
        f"{judge.name}_vllm",
        port=port or 0,
        command=command + _format_options(options | start.args),
        env=env,
        visible_variables=[name for name in os.environ if VLLM_VARIABLES.fullmatch(name)],
        start_timeout_s=start.deadline_s,
    )


def _format_options(values: Json) -> list[str]:
    """Return command-line options. True is a flag without value; False and None are left out."""
    options = []
    for key, value in values.items():
        if value is False or value is None:
            continue
        options.append(f"--{key.replace('_', '-')}")
        if value is not True:
            options.append(str(value))
    return options


def reserve_gpus(judges: Mapping[str, Judge]) -> None:
    """Hide the judges' GPUs from this process and from the processes that it starts later."""
    starts = [judge.settings.start for judge in judges.values()]
    reserved = set(itertools.chain(*[start.gpus for start in starts if start]))
    if not reserved:
        return
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
    kept = [name for name in names if name.strip() not in reserved]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(kept)
