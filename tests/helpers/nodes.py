"""What a GPU node has, on a machine without a GPU: a fake `nvidia-smi`, and sizes of models."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from kit.recipe.derive import Facts
from kit.recipe.load import read_source
from kit.recipe.recipe import Recipe, build
from kit.recipe.settings import make_settings
from kit.run.features import make_features
from kit.run.prepare import make_model_facts

SCRIPT = """#!/usr/bin/env bash
gpus=({lines})
declare -A columns=({columns})
chosen=${{!gpus[*]}}
for option; do
  case $option in --id=*) chosen=$(echo "${{option#--id=}}" | sed 's/GPU-0000000//g') ;; esac
done
for option; do
  case $option in
    -L)
      for gpu in ${{!gpus[*]}}; do
        IFS=, read -ra values <<< "${{gpus[gpu]}}"
        echo "GPU $gpu: ${{values[2]}} (UUID: ${{values[1]}})"
        for part in $(seq 1 {parts}); do echo "  MIG 1g.10gb  Device $part: (UUID: MIG-$part)"; done
      done ;;
    --query-gpu=*)
      for gpu in ${{chosen//,/ }}; do
        [[ $gpu =~ ^[0-9]+$ && -n ${{gpus[gpu]}} ]] || {{ echo "No devices were found"; exit 6; }}
        IFS=, read -ra values <<< "${{gpus[gpu]}}"
        line=
        for name in $(echo "${{option#--query-gpu=}}" | tr , ' '); do
          line="$line, ${{values[${{columns[$name]}}]}}"
        done
        echo "${{line#, }}"
      done ;;
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


def write_nvidia_smi(
    folder: Path, gpus: int = 1, mig_parts: int = 0, **values: str | Sequence[str]
) -> dict[str, str]:
    """Write the program to a folder -> the environment variables with which it is found first.

    values: replace those of H100, a list one for each GPU. Their names have `_` instead of `.`.
    """
    changed = H100 | {name.replace("memory_", "memory."): value for name, value in values.items()}
    lines = []
    for index in range(gpus):
        own = [value if isinstance(value, str) else value[index] for value in changed.values()]
        lines.append(",".join([str(index), f"GPU-0000000{index}", *own]))
    columns = enumerate(["index", "uuid", *changed])
    path = folder / "nvidia-smi"
    path.write_text(
        SCRIPT.format(
            lines=" ".join(f"'{line}'" for line in lines),
            columns=" ".join(f"[{name}]={number}" for number, name in columns),
            parts=mig_parts,
        )
    )
    path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


# Qwen2.5: {model: (published number of parameters, sizes of its config.json)}
QWEN = {
    "0.5B": (0.494e9, (896, 4864, 24, 14, 2, 151936, True)),
    "1.5B": (1.54e9, (1536, 8960, 28, 12, 2, 151936, True)),
    "32B": (32.5e9, (5120, 27648, 64, 40, 8, 152064, False)),
}


CONFIG_KEYS = (  # of the sizes in QWEN
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


def qwen(name: str) -> Qwen2Config:
    """The configuration of a model of QWEN."""
    _, sizes = QWEN[name]
    settings: dict[str, Any] = dict(zip(CONFIG_KEYS, sizes, strict=True))
    return Qwen2Config(**settings)


def make_recipe(
    model: Any, *changes: str, recipes: Sequence[str] = ("math",), command: str = "train"
) -> Recipe:
    """Make a recipe for one GPU, with the sizes of a run. model: of QWEN, or its configuration."""
    source = read_source(recipes, ["trainer.n_gpus_per_node=1", *changes])
    hf_config = qwen(model) if isinstance(model, str) else model
    checks = make_features(make_settings(source, command)).checks
    facts = Facts(
        model=make_model_facts(hf_config),
        derivations=tuple(functools.partial(each.derive, hf_config=hf_config) for each in checks),
    )
    return build(source, command, facts)
