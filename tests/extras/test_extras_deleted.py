"""All optional features can be deleted. Only a recipe that needs one gets an error, and only one.

The tests delete features in copies of the repository. Importing verl takes 10 s, so one process
imports it once, and runs each dry run in a fork.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kit.run import features
from tests.helpers.recipes import CLEAN_ENV, ROOT, row, write_rows

FEATURES = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "extras").iterdir()
    if path.name not in ("__init__.py", "__pycache__")
)
# {feature: the changes of a recipe that turn it on}
CHANGES = {
    "judges": ["gym.judges={judge_model: {base_url: http://127.0.0.1:9/v1, model: m}}"],
    "policy_programs": ["env.verifier_pool.sandbox=bwrap"],
    "megatron.py": ["model_engine=megatron"],
    "backends.py": ["actor_rollout_ref.rollout.name=hf"],
    "monitor.py": [
        "actor_rollout_ref.rollout.prometheus.enable=true",
        "actor_rollout_ref.rollout.disable_log_stats=false",
    ],
    "gloo": [
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=extras.gloo",
    ],
    "images.py": ["actor_rollout_ref.model.path={reads_images}"],
    "sft.py": ["sft"],
    "one_step_off": ["trainer.one_step_off=1"],
    "environments": ["env.environment={openenv: 'http://127.0.0.1:9'}"],
    "shadow_verifier.py": ["env.shadow_verifier=templates/reward.py:compute_score"],
    "agents": ["env.agent={command: 'true'}"],
    "rollout_workers": ["actor_rollout_ref.rollout.agent.num_workers=2"],
}
# The command, the model's files and the engine's section decide about these.
ALONE = {"images.py", "megatron.py", "sft.py"}
DRIVER = """
import io, json, os, runpy, sys, traceback
results = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries print while they are imported
import torch, transformers, verl.trainer.ppo.core_algos, verl.workers.engine_workers
import vllm.tool_parsers, hydra, aiohttp, httpx, psutil, orjson
assert not [name for name in sys.modules if name.startswith(("extras.", "lab."))]

PROJECT = ("kit", "extras", "lab", "env", "gym_client", "algorithm", "inference", "training")

def forget_project():
    for name in list(sys.modules):
        if name.split(".")[0] in PROJECT:
            del sys.modules[name]

for line in sys.stdin:
    case = json.loads(line)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.close(read_end)
        forget_project()
        os.chdir(case["folder"])
        sys.path[0] = case["folder"]
        sys.argv = ["algorithm.py", *case["arguments"]]
        status = 0
        try:
            runpy.run_path("algorithm.py", run_name="__main__")
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code)
            status = 1 if error.code else 0
        except BaseException:
            traceback.print_exc()
            status = 2
        print("MODULES", *sorted(n for n in sys.modules if n.partition(".")[0] in PROJECT))
        sys.stdout.flush()
        os._exit(status)
    os.close(write_end)
    with open(read_end) as pipe:
        output = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps({"status": status, "output": output}), file=results, flush=True)
"""


class Driver:
    """A process that has imported the libraries, and runs algorithm.py in its forks."""

    def __init__(self, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, arguments: list[str]) -> tuple[int, str]:
        """Run `python algorithm.py` in a folder. Return (exit status, output)."""
        case = json.dumps({"folder": str(folder), "arguments": arguments})
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the driver ended"
        result = json.loads(line)
        return result["status"], result["output"]


@pytest.fixture(scope="module")
def driver():
    driver = Driver(CLEAN_ENV)
    yield driver
    driver.process.stdin.close()
    driver.process.wait(timeout=30)


def make_copy(folder: Path) -> Path:
    """Copy the repository's code to a new folder, and return the folder."""
    folder.mkdir()
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    for name in ("kit", "extras", "lab", "configs", "templates"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / ".venv-gym").symlink_to(ROOT / ".venv-gym")
    return folder


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A copy without any feature, without the lab and without the code for CPUs."""
    folder = make_copy(tmp_path_factory.mktemp("copies") / "bare")
    for feature in FEATURES:
        delete(folder / feature)
    delete(folder / "kit" / "cpu")
    delete(folder / "lab")
    return folder


def make_arguments(name: str, server: str, workspace: Path) -> list[str]:
    """Make the arguments of a dry run of a recipe with a tiny model and rows."""
    rows = write_rows(workspace / f"{server}.jsonl", [row(f"say {i}") for i in range(8)])
    return [
        f"--config={name}",
        "--dry-run",
        f"actor_rollout_ref.model.path={workspace / 'untied'}",
        f"env.train_files=[{{path: {rows}, server: {server}}}]",
        "env.val_files=[]",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.n_gpus_per_node=1",
    ]


def test_a_dry_run_of_math_imports_few_features(workspace, driver):
    """Only the estimates of memory and disk, and the list of the lab's features, are loaded."""
    arguments = make_arguments("math", "math_with_judge", workspace)
    status, output = driver.run(ROOT, arguments)
    assert status == 0 and "no run was started" in output, output[-3000:]
    modules = output.partition("MODULES")[2].split()
    files = [name for name in modules if not (ROOT / name.replace(".", "/")).is_dir()]
    features = [name for name in files if name.startswith(("extras.", "lab.", "kit.cpu."))]
    assert len(files) > 20
    estimates = ("extras.preflight.", "lab.features")
    assert [name for name in features if not name.startswith(estimates)] == []


def test_without_any_feature_other_recipes_pass_their_dry_run(bare, workspace, driver):
    status, output = driver.run(bare, make_arguments("math", "math_with_judge", workspace))
    assert status == 0 and "no run was started" in output, output[-3000:]


def test_a_recipe_that_needs_deleted_features_gets_one_error_for_each(
    bare, workspace, driver, vision_model
):
    changes = [change for name in CHANGES for change in CHANGES[name] if name not in ALONE]
    arguments = make_arguments("math", "math_with_judge", workspace)
    status, output = driver.run(bare, [*arguments, *changes])
    assert status == 1 and output.count("error: ") == 1, output[-3000:]
    assert "Traceback" not in output, output[-3000:]
    for name in CHANGES.keys() - ALONE:
        text = f"needs extras/{name.removesuffix('.py')}, which this copy does not have"
        assert text in output, (name, output[-3000:])


@pytest.mark.parametrize("name", sorted(ALONE))
def test_a_deleted_feature_that_is_not_in_that_list_has_its_own_error(
    name, bare, workspace, driver, vision_model
):
    changes = [change.replace("{reads_images}", str(vision_model)) for change in CHANGES[name]]
    arguments = make_arguments("math", "math_with_judge", workspace)
    status, output = driver.run(bare, [*arguments, *changes])
    text = f"needs extras/{name.removesuffix('.py')}, which this copy does not have"
    assert status == 1 and text in output, output[-3000:]
    assert output.count("error: ") == 1 and "Traceback" not in output, output[-3000:]


def test_every_feature_that_a_recipe_turns_on_is_tested():
    """The other features are commands, or every run uses them if they exist."""
    needed = {entry.module for entry in features.ENTRIES if not entry.may_be_missing}
    needed |= {"extras.images", "extras.sft"}
    tested = {f"extras.{name.removesuffix('.py')}" for name in CHANGES}
    assert needed <= tested


def test_a_command_that_converts_rows_without_its_module_is_one_error(bare):
    command = [sys.executable, "env.py", "check", "rows.jsonl"]
    done = subprocess.run(command, cwd=bare, env=CLEAN_ENV, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: this command needs lab/convert, which this copy")


def test_a_recipe_for_cpus_needs_the_code_for_cpus(bare, workspace, driver):
    arguments = make_arguments("math_cpu", "reasoning_gym", workspace)
    status, output = driver.run(bare, [*arguments, "--config=cpu"])
    assert status == 1 and "kit/cpu" in output and "Traceback" not in output, output[-3000:]
