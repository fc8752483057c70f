"""Run one part of benchmarks/gpu_check.py in the environment that it checks.

    python benchmarks/gpu_check_parts.py imports|recipes|symbols|routes OUT.json [GPUS]

GPUS, for `recipes`, is the number of simulated GPUs. OUT.json has {name: ""} for each check that
passed, and {name: reason} for the others. For `symbols` it has {name: signature}.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SOURCES = [
    *sorted(ROOT.glob("*.py")),
    *sorted(path for path in ROOT.glob("kit/**/*.py") if path.name != "__init__.py"),
]
LIBRARIES = ("vllm", "verl")
ROWS = 1100  # so that each recipe has a whole batch


def describe(error: BaseException) -> str:
    """Return the first line of an error."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0][:500]


def module_name(path: Path) -> str:
    """Return the name of the module in a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


# --- imports -------------------------------------------------------------------------------------


def check_imports() -> dict[str, str]:
    """Import every module of the kit and of the root folder.

    Modules of kit.cpu are imported in separate processes, because they patch verl for a CPU.
    """
    results = {}
    for path in SOURCES:
        name = module_name(path)
        if name.startswith("kit.cpu"):
            code = f"import {name}"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            results[name] = done.stderr.strip().splitlines()[-1] if done.returncode else ""
            continue
        try:
            importlib.import_module(name)
            results[name] = ""
        except Exception as error:
            results[name] = describe(error)
    return results


# --- symbols -------------------------------------------------------------------------------------


def list_symbols() -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each import from vLLM and verl. `import x` has the name ""."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if str(node.module).partition(".")[0] in LIBRARIES:
                        yield str(node.module), alias.name
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in LIBRARIES:
                        yield alias.name, ""


def list_attributes() -> set[str]:
    """Return all names that the kit reads as an attribute, or defines as a function."""
    names = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
    return names


def signature(value: Any) -> str:
    """Return the parameters of a function with their defaults, without types.

    Of other values, return the type's name.
    """
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return type(value).__name__
    untyped = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(untyped))[1:-1]


def import_symbol(module: str, name: str) -> Any:
    """Import a module, or a name or submodule of it. Raises the errors of the import."""
    value = importlib.import_module(module)
    if not name:
        return value
    if hasattr(value, name):
        return getattr(value, name)
    return importlib.import_module(f"{module}.{name}")


def read_symbols() -> dict[str, str]:
    """Return {symbol: signature} of all that the kit imports from vLLM and verl.

    Of a class, it also has the methods whose names occur in the kit.
    """
    used = list_attributes()
    results = {}
    for module, name in sorted(set(list_symbols())):
        symbol = f"{module}.{name}".rstrip(".")
        try:
            value = import_symbol(module, name)
        except Exception as error:
            results[symbol] = f"missing: {describe(error)}"
            continue
        results[symbol] = signature(value)
        if inspect.isclass(value):
            for method in sorted(used & set(vars(value))):
                if callable(getattr(value, method)):
                    results[f"{symbol}.{method}"] = signature(getattr(value, method))
    return results


# --- recipes -------------------------------------------------------------------------------------


def write_models(folder: Path) -> None:
    """Write tiny models: a policy, one that reads images, and a reward model.

    The sizes in the policy's config.json are those that fp8 and Megatron can divide. Its weights do
    not have these sizes, and a dry run does not load them.
    """
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from tests.helpers.models import make_model, make_vision_model

    make_model(folder / "policy", tied=True)
    make_model(folder / "untied", tied=False)
    make_vision_model(folder / "vision", folder / "untied")
    scorer = AutoModelForTokenClassification.from_pretrained(
        folder / "policy", num_labels=1, dtype=torch.float32
    )
    scorer.save_pretrained(folder / "scorer")
    AutoTokenizer.from_pretrained(folder / "policy").save_pretrained(folder / "scorer")
    path = folder / "policy" / "config.json"
    sizes = {"hidden_size": 256, "num_key_value_heads": 2, "intermediate_size": 512}
    sizes |= {"head_dim": 128, "max_position_embeddings": 32768}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    path = folder / "vision" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["max_position_embeddings"] = 32768
    path.write_text(json.dumps(config))


def write_rows(folder: Path) -> None:
    """Write rows of Gym, rows of verl, and conversations."""
    text = [{"role": "user", "content": "say 7"}]
    gym = {"responses_create_params": {"input": text}, "answer": "7", "expected_answer": "7"}
    verl = {"prompt": text, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}}
    chat = {"messages": [*text, {"role": "assistant", "content": "7"}]}
    for name, row in (("gym", gym), ("verl", verl), ("chat", chat)):
        (folder / f"{name}.jsonl").write_text("".join([json.dumps(row) + "\n"] * ROWS))


def list_recipes() -> dict[str, list[str]]:
    """Return {recipe: the arguments of --config}. A recipe without rows is added to `math`."""
    import yaml

    recipes = {}
    for path in sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/algorithms/*.yaml")]):
        if path.stem == "base":
            continue
        is_task = bool((yaml.safe_load(path.read_text()).get("env") or {}).get("train_files"))
        recipes[path.stem] = [path.stem] if is_task else ["math", path.stem]
    recipes["deterministic"] = ["math", "deterministic"]
    recipes["ahead, separate"] = ["math", "ahead", "separate"]
    return recipes


def make_changes(name: str, files: list[str], folder: Path, gpus: int) -> list[str]:
    """Return key=value arguments that give a recipe rows and models in `folder`."""
    key = "distillation.teacher_models.teacher_model.model_path"
    model = "vision" if name == "circle_click" else "policy"
    changes = [
        f"actor_rollout_ref.model.path={folder / model}",
        f"env.train_files=[{choose_rows(name, files, folder)}]",
        "env.val_files=[]",
        f"trainer.n_gpus_per_node={gpus}",
        "trainer.device=cuda",
        f"trainer.experiment_name=gpu_check_{gpus}",
    ]
    if name == "judge":  # the recipe's judge is on the internet
        changes.append("gym.judges={judge_model: policy}")
    if name == "reward_model":
        changes.append(f"reward.reward_model.model_path={folder / 'scorer'}")
    if name == "distill":
        changes.append(f"{key}={folder / 'policy'}")
    if name == "megatron" and gpus == 1:
        changes.append("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1")
    return changes


def choose_rows(name: str, files: list[str], folder: Path) -> str:
    """Return the entries of env.train_files for a recipe: a file for each of its servers."""
    from omegaconf import OmegaConf

    from kit.config.load import load_config

    if name == "sft":
        return f"{folder}/chat.jsonl"
    config, _ = load_config(files, [])
    verifier = OmegaConf.select(config, "env.verifier")
    if verifier == "verl":
        return f"{folder}/verl.jsonl"
    if verifier:
        return f"{folder}/gym.jsonl"
    path = f"{folder}/gym.jsonl"
    return ",".join(f"{{path: {path}, server: {server}}}" for server in config.gym.servers)


def check_recipe(name: str, files: list[str], folder: Path, gpus: int) -> str:
    """Make a dry run, and let vLLM parse the engine arguments. Returns "" or the first error."""
    from kit.runs import cli

    command = "sft" if name == "sft" else "train"
    try:
        planned = cli.plan(files, make_changes(name, files, folder, gpus), command)
        text = cli.describe_plan(planned, is_dry_run=True)
        if "nothing was started" not in text:
            return "the dry run did not print its last line"
        if planned.recipe.verl.actor_rollout_ref.rollout.name == "vllm" and command == "train":
            parse_engine_arguments(planned.recipe.verl)
    except (Exception, SystemExit) as error:
        return describe(error)
    return ""


def simulate_h100(gpus: int) -> None:
    """Have vLLM detect a node with H100 GPUs on this machine. No kernel runs.

    vLLM's modules are imported before that. If vLLM detects a GPU during the import, it loads
    kernels. They need libcuda, which is a part of the driver.
    """
    importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):
        """vLLM's platform of a node with H100 GPUs."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 81559 * 2**20

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return gpus

        def is_cumem_allocator_available(self) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    # Other modules have imported the object, so change its class.
    vllm.platforms.current_platform.__class__ = H100


def parse_engine_arguments(config: Any) -> None:
    """Make vLLM's arguments with verl's server, and vLLM's configuration from them.

    Raises the errors of verl and vLLM.
    """
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
    from vllm.engine.arg_utils import AsyncEngineArgs

    class Server(vLLMHttpServer):
        """verl's server, which stops before vLLM starts."""

        def __init__(self) -> None:
            self.config = self._init_config(config.actor_rollout_ref.rollout)
            self.model_config = self._init_model_config(config.actor_rollout_ref.model)
            self.replica_rank = 1  # not 0, because verl prints the arguments of replica 0
            self.node_rank = 0
            self.nnodes = 1
            self._disaggregation_role = "null"

        def _should_profile(self) -> bool:
            return False

        async def run_server(self, args: Any) -> None:
            self.engine_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()

    server = Server()
    asyncio.run(server.launch_server())
    sequences = server.engine_config.scheduler_config.max_num_seqs
    assert sequences == config.actor_rollout_ref.rollout.max_num_seqs, sequences


# Recipes that are also checked without flash-attn. Torch computes its part, also for a critic.
WITHOUT_FLASH_ATTENTION = ("math", "ppo", "reward_model", "turn_gae")


def check_recipes(gpus: int) -> dict[str, str]:
    """Check all recipes on a simulated node, as if flash-attn were installed.

    If it is not installed, also check some recipes without it.
    """
    from extras.preflight import attention
    from tests.helpers import nodes

    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    os.environ |= nodes.write_nvidia_smi(folder, gpus=gpus)
    simulate_h100(gpus)
    write_models(folder)
    write_rows(folder)
    is_installed = attention.is_installed
    has_flash_attention = is_installed("flash_attn")
    results = {}

    def is_installed_or_flash_attention(package: str) -> bool:
        return package == "flash_attn" or is_installed(package)

    for name, files in list_recipes().items():
        attention.is_installed = is_installed_or_flash_attention
        results[name] = check_recipe(name, files, folder, gpus)
        attention.is_installed = is_installed
        if name in WITHOUT_FLASH_ATTENTION and not has_flash_attention:
            results[f"{name} without flash-attn"] = check_recipe(name, files, folder, gpus)
    shutil.rmtree(folder)
    return results


# --- routes --------------------------------------------------------------------------------------


class TestResults:
    """A plugin of pytest that collects {test: last line of its failure, or ""}."""

    def __init__(self) -> None:
        self.results: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.results[report.nodeid] = report.longreprtext.strip().splitlines()[-1]
        elif report.when == "call":
            self.results.setdefault(report.nodeid, "")


def check_routes() -> dict[str, str]:
    """Run the tests of vLLM's HTTP routes.

    vLLM parses its arguments only if it detects a device, so an H100 is simulated.
    """
    import pytest

    simulate_h100(1)
    collected = TestResults()
    test_file = ROOT / "tests" / "rollout" / "test_vllm_routes.py"
    pytest.main(["-p", "no:cacheprovider", str(test_file)], plugins=[collected])
    return collected.results or {str(test_file): "no test ran"}


def main() -> None:
    part, out, *rest = sys.argv[1:]
    results = {}
    if part == "imports":
        results = check_imports()
    elif part == "symbols":
        results = read_symbols()
    elif part == "recipes":
        results = check_recipes(int(rest[0]))
    elif part == "routes":
        results = check_routes()
    Path(out).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
