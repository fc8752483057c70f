"""A fake `nvidia-smi` program for tests and benchmarks/gpu_check.py on machines without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

SCRIPT = """#!/usr/bin/env bash
declare -A values=({values})
chosen=$(seq 0 {last})
for option; do
  case $option in --id=*) chosen=${{option#--id=}} ;; esac
done
for option; do
  case $option in
    -L)
      for gpu in $(seq 0 {last}); do
        echo "GPU $gpu: NVIDIA H100 80GB HBM3 (UUID: GPU-0000000$gpu)"
        for part in $(seq 1 {parts}); do echo "  MIG 1g.10gb  Device $part: (UUID: MIG-$part)"; done
      done ;;
    --query-gpu=*)
      for gpu in ${{chosen//,/ }}; do echo "${{values[${{option#--query-gpu=}}]}}"; done ;;
  esac
done
"""
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory.total": "81559",
    "memory.used": "4",
    "driver_version": "580.95.05",
    "compute_cap": "9.0",
}


def write(folder: Path, gpus: int = 1, mig_parts: int = 0, **values: str) -> dict[str, str]:
    """Write the program to a folder -> the environment variables with which it is found first.

    values: replace those of H100. Their names have `_` instead of `.`.
    """
    changed = H100 | {name.replace("memory_", "memory."): value for name, value in values.items()}
    entries = " ".join(f"[{name}]='{value}'" for name, value in changed.items())
    path = folder / "nvidia-smi"
    path.write_text(SCRIPT.format(values=entries, last=gpus - 1, parts=mig_parts))
    path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
