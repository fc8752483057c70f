"""Write the run card: the README.md of an export, a model card of Hugging Face.

Each number in it is from the files of the run: config.yaml, metrics.jsonl and rollouts/. Texts of
the user are escaped. Secrets and paths of this machine are left out (privacy.py).
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from huggingface_hub import ModelCardData
from omegaconf import OmegaConf

from env import Json
from kit.config.keys import diff, find_changes, is_below, is_kit_key
from kit.config.recipe import Recipe
from kit.config.redaction import has_settings, redacted
from kit.data.json_lines import read_metrics, read_objects
from kit.data.metrics import HIGH, LOW
from kit.extras.run_card import provenance, scores
from kit.extras.run_card.privacy import Cleaner
from kit.extras.run_card.provenance import HashedFile
from kit.runs import files
from kit.runs.checkpoints import EXPORTED

MARKDOWN = re.compile(r"([\\`*_\[\]#|~])")
TAG = "quintet"
# Sections that change nothing about the policy, or repeat other keys
LEFT_OUT = ("ray_kwargs", "trainer.default_local_dir", "trainer.logger")
METHODS = {"sft": "supervised fine-tuning", "train": "reinforcement learning"}


class Base(NamedTuple):
    """The model that a run started from.

    name: on the hub, or of its folder. license: as its own card says, empty if it says nothing.
    started_from: what the run read, if that was the export of an earlier run.
    """

    name: str
    license: str
    started_from: str


def write_card(recipe: Recipe, folder: Path) -> None:
    """Write README.md of the export of a run. folder: of the run."""
    text = compose(recipe, folder, sys.argv)
    with files.replace_atomically(folder / "export" / "README.md") as partial:
        partial.write_text(text, encoding="utf-8")


def compose(recipe: Recipe, folder: Path, arguments: Sequence[str]) -> str:
    """Return the card of a run. arguments: the command line, with the script's name first."""
    cleaner = Cleaner(recipe.verl)
    base = read_base(recipe, cleaner)
    name = cleaner.clean(recipe.trainer.experiment_name)
    is_replay = any("replay/ess" in line for line in read_metrics(folder / "metrics.jsonl"))
    recordings = list(provenance.list_recordings(arguments)) if is_replay else None
    lines = [f"# {escape(name)}", "", describe(recipe, folder, base, cleaner)]
    if is_replay:
        lines.append(
            "It was trained on recorded episodes, without sampling. Their rewards are those of the "
            "recorded run."
        )
    lines.append("")
    lines += ["## Scores", "", *describe_scores(recipe, folder), ""]
    lines += [
        "## Data and verifiers",
        "",
        *describe_sources(recipe, folder, cleaner, recordings),
        "",
    ]
    lines += ["## Run", "", *describe_run(recipe, folder), ""]
    lines += ["Command:", "", *fence(describe_command(cleaner, arguments), "bash"), ""]
    lines += ["## Recipe", "", "What differs from the defaults of verl and Quintet:", ""]
    lines += [*fence(cleaner.clean(describe_recipe(recipe)), "yaml"), ""]
    body = cleaner.clean("\n".join(lines))
    return f"---\n{front_matter(recipe, base)}\n---\n\n{body}"


# --- text ----------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """Return a text on one line that Markdown and HTML show as it is."""
    line = " ".join(text.split())
    line = MARKDOWN.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;"))
    return line


def fence(text: str, language: str) -> list[str]:
    """Return the lines of a code block. Its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return [f"{marks}{language}", *text.splitlines(), marks]


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose cells are escaped already."""
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


# --- what it is ----------------------------------------------------------------------------------


def read_base(recipe: Recipe, cleaner: Cleaner) -> Base:
    """Return the model that a run started from, and what its own card says about it."""
    path = Path(recipe.model.path)
    if not path.is_dir():
        return Base(path.name if path.is_absolute() else recipe.model.path, "", "")
    data = read_front_matter(path / "README.md")
    license_name = str(data.get("license") or "")
    is_export = (path / EXPORTED).is_file()
    if is_export and TAG in (data.get("tags") or []):
        name = str(data.get("base_model") or path.name)
        return Base(name, license_name, cleaner.clean(str(path)))
    return Base(path.name, license_name, "")


def read_front_matter(path: Path) -> Json:
    """Return the YAML front matter of a model card, {} if there is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    match = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}


def front_matter(recipe: Recipe, base: Base) -> str:
    """Return the YAML that the Hugging Face hub reads."""
    tags = [TAG, "verl"]
    if recipe.command == "train":
        estimator = recipe.algorithm.adv_estimator
        tags += ["reinforcement-learning", *([] if ".py:" in estimator else [estimator])]
    else:
        tags.append(recipe.command)
    if recipe.model.lora_rank:
        tags.append("lora")
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base.name,
        license=base.license or None,
        tags=tags,
    )
    return str(data.to_yaml())


def describe(recipe: Recipe, folder: Path, base: Base, cleaner: Cleaner) -> str:
    """Return the first paragraph: the model, the method, and the size of the training."""
    step = read_step(folder)
    size = recipe.data.train_batch_size
    work = f"{size} conversations"
    if recipe.command == "train":
        work = f"{size} prompts with {recipe.rollout.n} responses each"
    sentences = [
        f"The model {escape(base.name)} after {METHODS[recipe.command]}: {step} of "
        f"{recipe.trainer.total_training_steps} planned steps, each with {work}."
    ]
    if base.started_from:
        sentences.append(f"The run started from {escape(base.started_from)}.")
    if recipe.model.lora_rank:
        rank = f"rank {recipe.model.lora_rank}, alpha {recipe.model.lora_alpha:g}"
        sentences.append(
            f"A LoRA adapter ({rank}) was trained. It is merged into these weights, and is also in "
            "`lora_adapter/`, to be used with the base model."
        )
    if recipe.model.lora_adapter_path:
        path = escape(cleaner.clean(recipe.model.lora_adapter_path))
        sentences.append(f"The adapter started from {path}.")
    return " ".join(sentences)


def read_step(folder: Path) -> str:
    """Return the training step of the exported weights."""
    return (folder / "export" / EXPORTED).read_text().strip()


# --- scores --------------------------------------------------------------------------------------


def describe_scores(recipe: Recipe, folder: Path) -> Iterator[str]:
    """The held-out scores by step, and the failed episodes."""
    evaluations = scores.read_evaluations(folder)
    found = scores.read_scores(folder)
    losses = {step: one["val/loss"] for step, one in evaluations.items() if "val/loss" in one}
    if found:
        yield from describe_curve(found)
    elif losses:
        steps = scores.pick_steps(list(losses))
        yield from table(
            ["step", "held-out loss (nats per token)"],
            [[str(step), f"{losses[step]:.4f}"] for step in steps],
        )
    else:
        yield "No held-out rows were evaluated."
    for line in read_objects(folder / "changes.jsonl"):
        changes = ", ".join(escape(text) for text in line["changes"])
        yield from ["", f"After step {line['after_step']} the run was resumed with: {changes}."]
    if recipe.command == "train":
        yield from ["", describe_failures(folder, evaluations)]


def describe_curve(found: Sequence[scores.Score]) -> Iterator[str]:
    """The table of scores, and what its intervals mean."""
    rows = []
    for score in found:
        value = f"{score.value:.3f}"
        if score.interval:
            value += f" ({score.interval[LOW]:.3f} to {score.interval[HIGH]:.3f})"
        count = str(score.rows) if score.rows else ""
        rows.append([str(score.step), escape(score.test_set), score.name, value, count])
    yield from table(["step", "test set", "score", "value", "rows"], rows)
    yield ""
    text = "`acc` is the share of responses with the full reward of the verifier."
    if any(score.interval for score in found):
        text += (
            " In parentheses: the 0.95 interval over other rows of the same kind. It says nothing "
            "about other seeds, which need other runs."
        )
    yield text


def describe_failures(folder: Path, evaluations: dict[int, Json]) -> str:
    """The share of episodes that failed, in training and in the last evaluation."""
    failures = scores.count_failures(folder)
    failed = sum(failures.by_status.values())
    share = f"{failed / failures.episodes:.1%}" if failures.episodes else "none"
    reasons = ", ".join(f"{n} {escape(name)}" for name, n in failures.by_status.items() if n)
    text = f"{failed} of {failures.episodes} training episodes failed ({share})"
    text += f": {reasons}." if reasons else "."
    last = next(reversed(evaluations.values()), {})
    if last.get("val-aux/failed_frac") is not None:
        text += f" In the last evaluation, {last['val-aux/failed_frac']:.1%} failed."
    return text + " A failed episode has no reward and is not trained on."


# --- data, run and recipe ------------------------------------------------------------------------


def describe_sources(
    recipe: Recipe, folder: Path, cleaner: Cleaner, recordings: Sequence[HashedFile] | None
) -> Iterator[str]:
    """The files that the run reads with their hashes, and what verifies the responses.

    recordings: what it replays, None for a run that samples. A replay verifies nothing.
    """
    lines = read_metrics(folder / "metrics.jsonl")
    started_at = lines[0]["time"] if lines else 0.0
    hashed = list(recordings or [])
    hashed += [*provenance.list_row_files(recipe), *provenance.list_functions(recipe)]
    rows = [describe_file(file, started_at, cleaner) for file in hashed]
    yield from table(["use", "file", "SHA-256"], rows)
    verifies = recipe.command == "train" and recordings is None
    servers = list(provenance.list_servers(recipe)) if verifies else []
    if servers:
        yield ""
    for name, text in servers:
        yield f"- verifier {escape(cleaner.clean(name))}: {escape(cleaner.clean(text))}"


def describe_file(file: HashedFile, started_at: float, cleaner: Cleaner) -> list[str]:
    """The cells of a file. started_at: when the run wrote its first metrics."""
    digest = f"`{file.digest}`" if file.digest else "it was no longer there"
    if file.modified_at > started_at:
        digest += " (changed after the run started)"
    return [escape(cleaner.clean(file.use)), escape(cleaner.clean(file.path)), digest]


def describe_run(recipe: Recipe, folder: Path) -> list[str]:
    """The seed, the machine, the date, the duration and the versions."""
    lines = read_metrics(folder / "metrics.jsonl")
    values = {
        "seed": str(recipe.data.seed),
        "finished": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(lines[-1]["time"])),
        "duration": f"{measure_minutes(lines):.1f} min of steps and evaluations",
        "devices": f"{recipe.all_gpus} {recipe.trainer.device}",
        "machine": provenance.describe_machine(recipe.trainer.device),
    }
    values |= provenance.list_versions()
    return table(["", ""], [[name, escape(value)] for name, value in values.items()])


def measure_minutes(lines: Sequence[Json]) -> float:
    """Return the minutes of a run's steps and evaluations, without start and pauses."""
    steps = sum(
        line.get("timing_s/step") or line.get("timing_s/update_actor") or 0 for line in lines
    )
    testing = {
        line["step"]: line["timing_s/testing"] for line in lines if "timing_s/testing" in line
    }
    return (steps + sum(value or 0 for value in testing.values())) / 60


def describe_command(cleaner: Cleaner, arguments: Sequence[str]) -> str:
    """Return the command line of the run."""
    if Path(arguments[0]).name != "algorithm.py":
        return "# The run was started from Python."
    return shlex.join(["python", "algorithm.py", *cleaner.clean_words(arguments[1:])])


def describe_recipe(recipe: Recipe) -> str:
    """Return the changed keys of a recipe as YAML, without secrets."""
    shown = redacted(recipe.verl)
    changed = {key: value for key, (value, _) in find_changes(shown, recipe.defaults).items()}
    for key, (value, _) in diff(shown, recipe.defaults).items():
        if is_kit_key(key):
            changed[key] = value
    kept = {}
    for key, value in changed.items():
        is_of_critic = is_below(key, "critic") and not recipe.has_critic
        if not (has_settings(key) or is_below(key, *LEFT_OUT) or is_of_critic):
            kept[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return yaml.safe_dump(kept, sort_keys=True, allow_unicode=True, width=1000)
