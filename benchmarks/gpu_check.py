"""Check the GPU environment as far as that is possible without a GPU. Write docs/gpu_check.md.

    python benchmarks/gpu_check.py [--again] [--only PART] [--out docs/gpu_check.md]

It needs .venv, .venv-gpu (make gpu) and .venv-gym. In .venv-gpu it imports every module, makes a
dry run of every recipe on a simulated node with one and with eight H100, has vLLM parse the engine
arguments of each, runs the tests that start no engine, and trains two steps with `--config hf`. It
compares the signatures of all that the kit uses of vLLM and verl in both environments. Each part
keeps its result in runs/gpu_check, so that an interrupted check resumes. Exit status 1 if a part
fails.
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
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from conftest import STARTS_COMMANDS, STARTS_RUNS  # noqa: E402  (files whose tests start programs)

FOLDER = ROOT / "runs" / "gpu_check"
CPU, GPU = ROOT / ".venv" / "bin" / "python", ROOT / ".venv-gpu" / "bin" / "python"
PARTS_FILE = ROOT / "benchmarks" / "gpu_check_parts.py"
ON_CPU = {  # without them verl does not find the CPU's vLLM
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "kit.cpu.platform,kit.rollout.verl_patches",
}
VERSIONS = ("torch", "vllm", "verl", "transformers", "ray", "flash_attn")
# Symbols whose signature differs between the environments, and why that does no harm.
KNOWN_DIFFERENCES: dict[str, str] = {
    "verl.workers.rollout.replica.RolloutMode": "an Enum, which Python 3.12 formats differently",
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest": (
        "seven more optional fields in 0.28.0"
    ),
}
# Tests that need a device, if only a simulated one. The part `routes` has them.
NOT_HERE = ("tests/rollout/test_vllm_routes.py",)


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
    """Run a part of gpu_check_parts.py -> its results."""
    name = "_".join([part, *arguments, python.parent.parent.name.removeprefix(".")])
    out = FOLDER / f"{name}.out.json"
    out.unlink(missing_ok=True)
    done = run([python, PARTS_FILE, part, out, *arguments], name, 1800, **variables)
    if done.returncode:
        return {part: " ".join(done.stdout.strip().splitlines()[-1:]) or "no result"}
    return dict(json.loads(out.read_text()))


def count(results: dict[str, str], noun: str) -> Outcome:
    """Turn {name: reason or ""} into an outcome."""
    failures = [f"{name}: {reason}" for name, reason in results.items() if reason]
    return Outcome(f"{len(results) - len(failures)} of {len(results)} {noun}", failures)


# --- the parts -----------------------------------------------------------------------------------


def check_imports() -> Outcome:
    return count(run_part(GPU, "imports"), "modules can be imported")


def check_one_gpu() -> Outcome:
    return count(
        run_part(GPU, "recipes", "1"), "dry runs and engine arguments, for one simulated H100"
    )


def check_eight_gpus() -> Outcome:
    return count(
        run_part(GPU, "recipes", "8"), "dry runs and engine arguments, for eight simulated H100"
    )


def check_symbols() -> Outcome:
    """Compare the signatures in both environments."""
    here = run_part(GPU, "symbols")
    there = run_part(CPU, "symbols", **ON_CPU)
    differing = {}
    for name in sorted({*here, *there}):
        pair = (here.get(name, "missing"), there.get(name, "missing"))
        differs = pair[0] != pair[1] or any(text.startswith("missing") for text in pair)
        is_known = name in KNOWN_DIFFERENCES
        differing[name] = f"GPU ({pair[0]}), CPU ({pair[1]})" if differs and not is_known else ""
    outcome = count(
        differing,
        "symbols of vLLM and verl have the same signature as on a CPU, or a known difference",
    )
    return Outcome(f"{outcome.summary} ({len(KNOWN_DIFFERENCES)})", outcome.failures)


def check_routes() -> Outcome:
    return count(run_part(GPU, "routes"), "tests of vLLM's routes pass, one H100")


def run_tests(name: str, *folders: str) -> Outcome:
    """Run the tests of some folders that start no engine, no Ray and no program of the CPU's."""
    paths = [path for folder in folders for path in sorted((ROOT / "tests").glob(folder))]
    chosen = [path for path in paths if path.stem not in (*STARTS_RUNS, *STARTS_COMMANDS)]
    skipped = [f"--deselect={test}" for test in NOT_HERE]
    # tests/conftest.py marks the tests that start the stack as a group
    arguments = ["-p", "no:cacheprovider", "-m", "not soak and not xdist_group", *skipped, *chosen]
    done = run([GPU, "-m", "pytest", *arguments], name, 1800)
    lines = done.stdout.strip().splitlines() or ["no output"]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failures:
        failures = lines[-1:]
    return Outcome(f"tests that need no device, {folders[0]}: {lines[-1].strip('= ')}", failures)


def check_step() -> Outcome:
    """Train two steps of the demo with transformers as the rollout engine, on the GPU's pins."""
    arguments = ["--config", "math_cpu", "--config", "cpu", "--config", "hf"]
    changes = ["trainer.experiment_name=gpu_check_step", "trainer.total_training_steps=2"]
    changes += ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", "env.val_files=[]"]
    changes += ["trainer.save_freq=-1", "ray_kwargs.ray_init.num_cpus=16"]
    done = run([GPU, "algorithm.py", *arguments, *changes], "step", 900)
    path = ROOT / "runs" / "gpu_check_step" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() and not done.returncode else []
    steps = [line for line in map(json.loads, lines) if "actor/grad_norm" in line]
    if len(steps) != 2:
        return Outcome("no step", [done.stdout.strip()[-500:]])
    apart = max(line["training/rollout_probs_diff_max"] for line in steps)
    summary = f"probabilities of rollout engine and trainer differ by at most {apart:.4f}"
    failures = [summary] if apart > 0.05 else []
    return Outcome(f"2 steps on the CPU with `--config hf`; {summary}", failures)


def check_sglang() -> Outcome:
    """Resolve requirements-sglang.txt for glibc 2.34."""
    uv = ROOT / ".venv-uv" / "bin" / "uv"
    arguments = ["--override", "requirements-sglang.overrides", "--python", GPU]
    arguments += ["--python-platform", "x86_64-manylinux_2_34", "--only-binary", ":all:"]
    done = run([uv, "pip", "compile", "requirements-sglang.txt", *arguments], "sglang", 600)
    found = len(re.findall(r"^[\w.-]+==", done.stdout, re.MULTILINE))
    failures = [done.stdout.strip()[-500:]] if done.returncode else []
    return Outcome(f"requirements-sglang.txt resolves to {found} packages", failures)


PARTS: dict[str, Callable[[], Outcome]] = {
    "imports": check_imports,
    "one_gpu": check_one_gpu,
    "eight_gpus": check_eight_gpus,
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
    """The versions in .venv-gpu."""
    code = (
        "import importlib.metadata as m, sys\n"
        f"print('Python', sys.version.split()[0])\nfor name in {VERSIONS}:\n"
        "  try: print(name, m.version(name))\n"
        "  except m.PackageNotFoundError: print('no', name)"
    )
    done = subprocess.run([GPU, "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(done.stdout.splitlines())


def report(results: dict[str, dict]) -> list[str]:
    """The lines of docs/gpu_check.md."""
    cores = os.cpu_count()
    lines = [
        "# Checks of the GPU environment without a GPU",
        "",
        f"`make gpu-check`, {datetime.date.today()}, {cores} cores, no GPU. Nothing here has run "
        "on a GPU.",
        "",
        f"`.venv-gpu` has {read_versions()}.",
        "",
        "| part | result | minutes | status |",
        "| --- | --- | ---: | --- |",
    ]
    for name, result in results.items():
        state = "FAILED" if result["failures"] else "passed"
        lines.append(f"| {name} | {result['summary']} | {result['seconds'] / 60:.1f} | {state} |")
    lines += [f"| {name} | not run | | |" for name in PARTS if name not in results]
    failures = [failure for result in results.values() for failure in result["failures"]]
    if failures:
        lines += ["", *[f"- {failure}" for failure in failures]]
    if KNOWN_DIFFERENCES:
        lines += ["", "Known differences between vLLM 0.24.0 here and 0.28.0 on a CPU:", ""]
        lines += [f"- `{name}`: {reason}" for name, reason in KNOWN_DIFFERENCES.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--again", action="store_true", help="repeat the parts that are done")
    parser.add_argument("--only", choices=PARTS, action="append", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu_check.md")
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
    args.out.write_text("\n".join(report(results)) + "\n")
    sys.exit(len(results) < len(PARTS) or any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    main()
