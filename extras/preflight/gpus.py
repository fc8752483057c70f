"""The GPUs that this process may use: how many, their memory, and whether CUDA starts.

    python -P extras/preflight/gpus.py

This starts CUDA, and prints the number of GPUs or one line with the reason (make math).
"""

from __future__ import annotations

import os
import subprocess
import sys

TIMEOUT_S = 20.0


def read_smi(*options: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if there is no GPU or no nvidia-smi."""
    command = ["nvidia-smi", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def list_visible() -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES (indices or UUIDs); None if it is not set."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return None
    entries = [entry.strip() for entry in variable.split(",")]
    return [entry for entry in entries if entry not in ("", "-1")]


def count_gpus() -> int:
    """Return the number of GPUs that CUDA shows to this process, without starting CUDA.

    `nvidia-smi -L` also has a line for each part of a GPU that MIG has divided. CUDA shows one part
    of such a GPU.
    """
    lines = [line for line in read_smi("-L") if line.startswith("GPU ")]
    visible = list_visible()
    return len(lines) if visible is None else min(len(visible), len(lines))


def query(value: str) -> list[str]:
    """Return a value (nvidia-smi --help-query-gpu) of each GPU that this process sees."""
    visible = list_visible()
    if visible == []:
        return []
    ids = [f"--id={','.join(visible)}"] if visible else []
    lines = read_smi(*ids, f"--query-gpu={value}", "--format=csv,noheader,nounits")
    return [line.strip() for line in lines]


def main() -> None:
    """Start CUDA in this process. Print the number of GPUs."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        sys.exit(
            f"error: CUDA {torch.version.cuda} does not start: {reason} Check `nvidia-smi`: it "
            "must list the GPUs and a driver of 580 or newer."
        )
    print(torch.cuda.device_count())


if __name__ == "__main__":
    main()
