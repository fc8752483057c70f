"""Collect the files that a GPU node without a network needs, and list their sizes.

    python benchmarks/gpu_carry.py FOLDER --model MODEL --gsm8k SOURCE [--without-packages]

MODEL is the folder of the model. SOURCE is the folder of GSM8K's original JSONL files. Before, run
`make gpu gym`: packages are downloaded for the Python versions of .venv-gpu and .venv-gym. So the
node must have the same ones. flash-attn is not downloaded. If you have its wheel, copy it to
FOLDER/wheels.

Copy FOLDER to the node, and run FOLDER/run.sh there. It installs everything and runs
benchmarks/gpu_acceptance.py. This has not been run on such a node.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP = ROOT / ".venv-uv" / "bin" / "pip"
WHEELS = {  # requirements -> the environment with the Python version to download for
    "requirements-gpu.txt": ".venv-gpu",
    "requirements-gym.txt": ".venv-gym",
}
TOOLS = ("uv==0.13.9", "pip==25.3")  # of .venv-uv, as in the Makefile
RUN = """#!/usr/bin/env bash
# On the GPU node: bash run.sh. Repeat it until no slice is left.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$here/wheels UV_NO_INDEX=1 UV_FIND_LINKS=$here/wheels
export HF_HUB_OFFLINE=1
mkdir -p quintet && tar -xf "$here/quintet.tar" -C quintet
cd quintet
bash kit/extras/preflight/check_gpu_node.sh
make VENV=.venv-gpu TOOLS=.venv-uv gym data/gsm8k_train.jsonl GSM8K="$here/gsm8k"
wheel=$(find "$here/wheels" -name 'flash_attn-*.whl' 2>/dev/null || true)
bash kit/extras/preflight/flash_attn.sh .venv-uv/bin/uv .venv-gpu "$wheel"
exec .venv-gpu/bin/python benchmarks/gpu_acceptance.py actor_rollout_ref.model.path="$here/model"
"""


def pack_repository(out: Path) -> None:
    """Write the committed files of the repository to a tar file."""
    subprocess.run(["git", "archive", "--output", out, "HEAD"], cwd=ROOT, check=True)


def download_packages(folder: Path) -> None:
    """Download the packages of the lock files, uv, pip and nemo-gym."""
    folder.mkdir(exist_ok=True)
    for requirements, environment in WHEELS.items():
        python = ROOT / environment / "bin" / "python"
        options = ["--no-deps", "--quiet", "--dest", str(folder), "-r", requirements]
        subprocess.run([PIP, "--python", python, "download", *options], cwd=ROOT, check=True)
    code = "import importlib.metadata; print(importlib.metadata.version('nemo-gym'))"
    python = ROOT / ".venv-gym" / "bin" / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    for package in (*TOOLS, f"nemo-gym=={done.stdout.strip()}"):
        options = ["--no-deps", "--ignore-requires-python", "--quiet", "--dest", str(folder)]
        subprocess.run([PIP, "download", *options, package], cwd=ROOT, check=True)


def size_mb(path: Path) -> float:
    """Return the size of a file or a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to collect the files")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument(
        "--gsm8k", type=Path, required=True, help="folder of GSM8K's original JSONL files"
    )
    parser.add_argument(
        "--without-packages",
        action="store_true",
        help="do not download packages, if the node already has the folder `wheels`",
    )
    args = parser.parse_args()
    for source in (args.model / "config.json", args.gsm8k):
        if not source.exists():
            sys.exit(f"error: {source} does not exist. Correct --model or --gsm8k.")
    args.folder.mkdir(parents=True, exist_ok=True)
    pack_repository(args.folder / "quintet.tar")
    shutil.copytree(args.model, args.folder / "model", dirs_exist_ok=True)
    shutil.copytree(args.gsm8k, args.folder / "gsm8k", dirs_exist_ok=True)
    if not args.without_packages:
        download_packages(args.folder / "wheels")
    (args.folder / "run.sh").write_text(RUN)
    paths = sorted(args.folder.iterdir(), key=size_mb, reverse=True)
    for path in paths:
        print(f"{size_mb(path):10.1f} MB  {path.name}")
    print(f"{sum(map(size_mb, paths)):10.1f} MB  in total, in {args.folder}")


if __name__ == "__main__":
    main()
