"""Check the GPU environment: on any machine all that needs no GPU, and on GPUs a few steps.

    .venv-gpu/bin/python benchmarks/gpu_check.py [key=value ...] [--config math] [--only CHECK ...]

`make gpu-check` sets up all that this needs. These checks need no GPU:

    one_gpu, eight_gpus   make a dry run of each recipe on a simulated node with one or eight H100,
                          and let vLLM parse the engine arguments
    routes                run the tests of vLLM's HTTP routes on a simulated H100
    tests                 run the tests of `make fast`

The others (RUNS) train a few steps of the recipe, which must fit into the GPUs. The rows are made
up, and the reward is a hash of the response. So the runs need no Gym server, and the rewards of a
group differ. The model does not become better. To rehearse on a CPU, name a run, and add
--config math_cpu --config cpu.

A check that fails does not stop the others. Each keeps its result in runs/gpu_check, so the same
command resumes after an interruption. --only runs these checks again. The exit status is 1 if
something does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import yaml
from measure import ROOT, gpus, machine, read_metrics, run, stages

FOLDER = ROOT / "runs" / "gpu_check"
ROUTE_TESTS = "tests/engine/test_vllm_routes.py"  # need a device, at least a simulated one
ROWS = 1100  # so that each recipe has a whole batch
# Recipes that are also checked without flash-attn. Torch computes its part, also for a critic.
WITHOUT_FLASH_ATTENTION = ("math", "ppo", "reward_model", "turn_gae")
MIN_CORRELATION = 0.98  # of the probabilities in the rollout engine and the trainer
MAX_DIFFERENCE = 0.02  # mean difference of these probabilities, in bfloat16
MAX_KL_SHARE = 0.25  # KL(rollout engine, trainer) / KL(trainer, initial policy)
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
VERIFIER = """import zlib

def score(data_source, solution_str, ground_truth, extra_info=None):
    return zlib.crc32(solution_str.encode()) % 1000 / 999
"""
SETTINGS = [  # of every training run
    "env.val_files=[]",
    f"env.verifier={FOLDER}/hash_verifier.py:score",
    "env.verifier_pool.processes=2",
    "data.train_batch_size=32",
    "data.max_prompt_length=128",
    "data.max_response_length=128",
    f"{ROLLOUT}.n=8",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.001",
    f"{ACTOR}.kl_loss_type=low_var_kl",
    f"{ACTOR}.optim.lr=3e-5",  # moves the policy far enough to see in the engine's probabilities
    "trainer.save_freq=-1",  # only the last step
    "trainer.test_freq=-1",
    "trainer.print_samples_every=0",
]


class Result(NamedTuple):
    """The result of a check."""

    holds: dict[str, bool]  # what was checked -> whether it holds
    lines: list[str]  # a table, or the reason of a failure


# --- a simulated node ----------------------------------------------------------------------------


def simulate_h100(count: int) -> None:
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
            return count

        def is_cumem_allocator_available(self) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    # Other modules have imported the object, so change its class.
    vllm.platforms.current_platform.__class__ = H100


def write_models(folder: Path) -> None:
    """Write tiny models: a policy, one that reads images, and a reward model.

    The sizes in the policy's config.json are those that fp8 and Megatron can divide. Its weights do
    not have these sizes, and a dry run does not load them.
    """
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from tests.helpers.models import make_model, make_vision_model

    make_model(folder / "policy", tied=True)
    make_model(folder / "untied", tied=False)
    make_vision_model(folder / "vision", folder / "untied")
    scorer = AutoModelForTokenClassification.from_pretrained(folder / "policy", num_labels=1)
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


def write_recipe_rows(folder: Path) -> None:
    """Write rows of Gym, rows of verl, and conversations."""
    text = [{"role": "user", "content": "say 7"}]
    gym = {"responses_create_params": {"input": text}, "answer": "7", "expected_answer": "7"}
    verl = {"prompt": text, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "7"}}
    chat = {"messages": [*text, {"role": "assistant", "content": "7"}]}
    for name, row in (("gym", gym), ("verl", verl), ("chat", chat)):
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * ROWS)


def list_recipes() -> dict[str, list[str]]:
    """Return {recipe: the arguments of --config}. A recipe without rows is added to `math`."""
    recipes = {}
    for path in sorted([*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/algorithms/*.yaml")]):
        if path.stem == "base":
            continue
        section = yaml.safe_load(path.read_text()).get("env") or {}
        if section.get("agent") or section.get("environment"):  # need more packages, and no GPU
            continue
        is_task = bool(section.get("train_files"))
        recipes[path.stem] = [path.stem] if is_task else ["math", path.stem]
    for name in ("deterministic", "gpu_24gb", "gpu_16gb"):
        recipes[name] = ["math", name]
    recipes["ahead, separate"] = ["math", "ahead", "separate"]
    return recipes


def choose_rows(name: str, files: list[str], folder: Path) -> str:
    """Return the entries of env.train_files for a recipe: a file for each of its servers."""
    from kit.recipe.load import read_source
    from kit.recipe.settings import make_settings

    if name == "sft":
        return f"{folder}/chat.jsonl"
    settings = make_settings(read_source(files, []), "train")
    verifier = settings.env.verifier
    if verifier:
        return f"{folder}/{'verl' if verifier == 'verl' else 'gym'}.jsonl"
    path = f"{folder}/gym.jsonl"
    return ",".join(f"{{path: {path}, server: {server}}}" for server in settings.gym.servers)


def make_changes(name: str, files: list[str], folder: Path, count: int) -> list[str]:
    """Return key=value arguments that give a recipe rows and models in `folder`."""
    model = "vision" if name == "circle_click" else "policy"
    changes = [
        f"actor_rollout_ref.model.path={folder / model}",
        f"env.train_files=[{choose_rows(name, files, folder)}]",
        "env.val_files=[]",
        f"trainer.n_gpus_per_node={count}",
        "trainer.device=cuda",
        f"trainer.experiment_name=gpu_check_{count}",
    ]
    if name == "judge":  # the recipe's judge is on the internet
        changes.append("gym.judges={judge_model: policy}")
    if name == "reward_model":
        changes.append(f"reward.reward_model.model_path={folder / 'scorer'}")
    if name == "distill":
        key = "distillation.teacher_models.teacher_model.model_path"
        changes.append(f"{key}={folder / 'policy'}")
    if name == "megatron" and count == 1:
        changes.append(f"{ACTOR}.megatron.tensor_model_parallel_size=1")
    return changes


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


def check_recipe(name: str, files: list[str], folder: Path, count: int) -> str:
    """Make a dry run, and let vLLM parse the engine arguments. Returns "" or the first error."""
    from kit.run import cli

    command = "sft" if name == "sft" else "train"
    try:
        planned = cli.plan(files, make_changes(name, files, folder, count), command)
        cli.describe_plan(planned, is_dry_run=True)
        if planned.recipe.rollout.name == "vllm" and command == "train":
            parse_engine_arguments(planned.recipe.for_verl())
    except (Exception, SystemExit) as error:
        return f": {type(error).__name__}: {str(error).strip()[:500]}"
    return ""


def check_recipes(count: int) -> dict[str, bool]:
    """Check all recipes on a simulated node, as if flash-attn were installed.

    If it is not installed, also check some recipes without it.
    """
    from extras.preflight import attention
    from extras.preflight.gpus import read_gpus
    from tests.helpers import nodes

    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    os.environ |= nodes.write_nvidia_smi(folder, gpus=count)
    read_gpus.cache_clear()
    simulate_h100(count)
    write_models(folder)
    write_recipe_rows(folder)
    is_installed = attention.is_installed

    def has_flash_attention(package: str) -> bool:
        return package == "flash_attn" or is_installed(package)

    reasons = {}
    for name, files in list_recipes().items():
        with mock.patch.object(attention, "is_installed", has_flash_attention):
            reasons[name] = check_recipe(name, files, folder, count)
        if name in WITHOUT_FLASH_ATTENTION and not is_installed("flash_attn"):
            reasons[f"{name} without flash-attn"] = check_recipe(name, files, folder, count)
    shutil.rmtree(folder)
    return {f"{name} on {count} H100{reason}": not reason for name, reason in reasons.items()}


def check_routes() -> dict[str, bool]:
    """Run the tests of vLLM's HTTP routes. vLLM parses its arguments only if it has a device."""
    import pytest

    simulate_h100(1)
    status = pytest.main(["-p", "no:cacheprovider", ROUTE_TESTS])
    return {"the tests of vLLM's HTTP routes pass": status == 0}


def run_child(name: str) -> Result:
    """Run a check of SIMULATED in a new process, because it changes vLLM."""
    out = FOLDER / f"{name}.holds.json"
    command = [sys.executable, __file__, "--only", name, "--child", str(out)]
    run(command, FOLDER / f"{name}.log", list, every=1.0)
    return Result(json.loads(out.read_text()), [])


def run_tests() -> Result:
    """Run the tests of `make fast`, without those that need a device."""
    options = ["-p", "no:cacheprovider", "-m", "not slow and not docs and not soak"]
    command = [sys.executable, "-m", "pytest", *options, f"--deselect={ROUTE_TESTS}"]
    run(command, FOLDER / "tests.log", list, every=1.0)
    return Result({"the tests of `make fast` pass": True}, [])


# --- a training run ------------------------------------------------------------------------------


Steps = list[dict[str, Any]]  # the metrics of each step of a run


class Plan(NamedTuple):
    """A training run, in addition to the recipes of the command line and SETTINGS."""

    checks: tuple[Callable[[Steps], dict[str, bool]], ...]  # in addition to check_steps
    recipes: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()  # key=value
    steps: int = 2
    resumes: str = ""  # the run that it resumes
    gpus: int = 1  # how many it needs
    pools: int = 1  # the GPUs are divided among so many pools: trainer, vLLM


def check_steps(lines: Steps, count: int) -> dict[str, bool]:
    """Check what holds for every run. count: the number of steps that it should have."""
    spread = [line["critic/advantages/max"] - line["critic/advantages/min"] for line in lines]
    is_finite = all(0 < line["actor/grad_norm"] < float("inf") for line in lines)
    return {
        f"{count} steps have gradients that are finite and not 0": len(lines) == count
        and is_finite,
        "the advantages of each step differ": all(value > 0 for value in spread),
        "no episode failed": all(line["rollout/failed_frac"] == 0 for line in lines),
    }


def check_agreement(lines: Steps) -> dict[str, bool]:
    """Check that rollout engine and trainer compute the same probabilities."""
    correlation = min(line["training/rollout_actor_probs_pearson_corr"] for line in lines)
    difference = max(line["training/rollout_probs_diff_mean"] for line in lines)
    text = (
        "rollout engine and trainer give the sampled tokens the same probabilities: correlation "
        f"{correlation:.4f} of at least {MIN_CORRELATION}, mean difference {difference:.4f} of at "
        f"most {MAX_DIFFERENCE}"
    )
    return {text: correlation >= MIN_CORRELATION and difference <= MAX_DIFFERENCE}


def check_sync(lines: Steps) -> dict[str, bool]:
    """Check that the engine follows the trainer.

    An engine without the new weights would be as far from the trainer as the initial policy is.
    """
    last_line = lines[-1]
    engine = last_line["rollout_corr/k3_kl"]
    initial = last_line["actor/kl_loss"]
    text = (
        f"new weights reach the rollout engine: at step {last_line['step']}, its KL to the trainer "
        f"is {engine:.5f}, and the initial policy's is {initial:.5f} (at most {MAX_KL_SHARE} of it)"
    )
    return {text: engine <= MAX_KL_SHARE * initial}


def check_resume(lines: Steps) -> dict[str, bool]:
    """Check that the run resumed with the trained weights."""
    numbers = [line["step"] for line in lines]
    before, after = (line["actor/kl_loss"] for line in lines[-2:])
    text = f"the trained weights are loaded: KL to the initial policy {before:.5f}, {after:.5f}"
    return {f"the run has the steps {numbers}": numbers == [1, 2, 3], text: after > before / 3}


def check_ahead(lines: Steps) -> dict[str, bool]:
    """Check that batches are sampled with weights that are one step old."""
    staleness = [line["rollout/staleness/max"] for line in lines]
    return {f"weights that sampled are up to one step old: {staleness}": max(staleness) == 1}


SYNCED = (check_agreement, check_sync)
RUNS = {
    "training": Plan(SYNCED),
    "resume": Plan((*SYNCED, check_resume), steps=3, resumes="training"),
    "ppo": Plan(SYNCED, ("ppo",)),
    "lora": Plan(SYNCED, ("lora",), (f"{ACTOR}.optim.lr=3e-4",)),
    "ahead": Plan((check_ahead,), ("ahead",), steps=3),
    "separate": Plan((check_ahead,), ("ahead", "separate"), steps=3, gpus=2, pools=2),
    "tensor_parallel": Plan(SYNCED, (), (f"{ROLLOUT}.tensor_model_parallel_size=2",), gpus=2),
}


def write_task() -> None:
    """Write the rows and the verifier of all training runs. No row has a right answer."""
    (FOLDER / "hash_verifier.py").write_text(VERIFIER)
    with (FOLDER / "rows.jsonl").open("w") as file:
        for number in range(256):
            messages = [{"role": "user", "content": f"Tell a short story about {number} stones."}]
            row = {"responses_create_params": {"input": messages}, "answer": str(number)}
            file.write(json.dumps(row) + "\n")


def build_command(name: str, recipes: list[str], changes: list[str]) -> list[str]:
    """Return the command of a training run, which is in runs/gpu_check/NAME."""
    plan = RUNS[name]
    command = [sys.executable, "algorithm.py"]
    for recipe in [*recipes, *plan.recipes]:
        command += ["--config", recipe]
    command += [f"env.train_files=[{FOLDER}/rows.jsonl]", *SETTINGS]
    if gpus():
        command.append(f"trainer.n_gpus_per_node={len(gpus()) // plan.pools}")
    command += [
        f"trainer.experiment_name=gpu_check/{plan.resumes or name}",
        f"trainer.total_training_steps={plan.steps}",
        f"trainer.resume_mode={'auto' if plan.resumes else 'disable'}",
    ]
    return [*command, *plan.changes, *changes]


def run_training(name: str, recipes: list[str], changes: list[str]) -> Result:
    """Train, and check the run. Only `training` keeps its weights, for the run `resume`."""
    plan = RUNS[name]
    folder = FOLDER / (plan.resumes or name)
    write_task()
    try:
        run(build_command(name, recipes, changes), FOLDER / f"{name}.log", list, every=1.0)
        lines = read_metrics(folder / "metrics.jsonl")
        steps = [line for line in lines if "timing_s/step" in line]
        holds = check_steps(steps, plan.steps)
        for check in plan.checks:
            holds |= check(steps)
    finally:
        for weights in ("checkpoints", "export") if name != "training" else ():
            shutil.rmtree(folder / weights, ignore_errors=True)
    seconds = [f"{stage} {value:.2f}" for stage, value in stages(steps[-1]).items()]
    return Result(holds, [f"seconds of the last step: {', '.join(seconds)}"])


# --- all checks ----------------------------------------------------------------------------------


SIMULATED: dict[str, Callable[[], dict[str, bool]]] = {
    "one_gpu": partial(check_recipes, 1),
    "eight_gpus": partial(check_recipes, 8),
    "routes": check_routes,
}
NAMES = (*SIMULATED, "tests", *RUNS)


def run_check(name: str, recipes: list[str], changes: list[str]) -> Result:
    """Run a check. If it fails, its result has the reason."""
    try:
        if name in SIMULATED:
            return run_child(name)
        return run_tests() if name == "tests" else run_training(name, recipes, changes)
    except (Exception, SystemExit) as error:  # SystemExit: measure.run
        return Result({"it runs to its end": False}, [str(error).strip()[-3000:] or repr(error)])


def report(name: str, result: Result, seconds: float) -> None:
    """Print the result of a check: what does not hold, or the number of things that hold."""
    print(f"\n== {name}: {sum(result.holds.values())} of {len(result.holds)} hold, {seconds:.0f} s")
    for text, holds in result.holds.items():
        if not holds or name in RUNS:
            print(f"- {'holds' if holds else 'DOES NOT HOLD'}: {text}")
    print(*result.lines, sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NAMES, help="run these checks again")
    parser.add_argument("--config", action="append", help="a recipe of the runs (default: math)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="settings of the runs")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if args.child:
        args.child.write_text(json.dumps(SIMULATED[args.only[0]]()))
        return
    print(json.dumps(machine()))
    all_hold = True
    for name in args.only or NAMES:
        path = FOLDER / f"{name}.json"
        if not args.only and name in RUNS and RUNS[name].gpus > len(gpus()):
            print(f"\n== {name}: not run, because it needs GPUs: {RUNS[name].gpus}")
            continue
        if args.only or not path.is_file():
            begin = time.monotonic()
            result = run_check(name, args.config or ["math"], args.changes)
            path.write_text(json.dumps([result, time.monotonic() - begin], indent=1))
        saved, seconds = json.loads(path.read_text())
        report(name, Result(*saved), seconds)
        all_hold = all_hold and all(Result(*saved).holds.values())
    sys.exit(not all_hold)


if __name__ == "__main__":
    main()
