"""The command `explain`: replay a recorded step without changing weights, and say what it did.

python algorithm.py explain runs/math 12 --config math [key=value ...]

The recipe is that of --config, as for --replay, and is compared with the run's config.yaml. A run
folder may come from others, and a recipe names code.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from torch import Tensor

from env import Json
from kit.data.episode import Episode
from kit.data.importance import measure_shift
from kit.data.selection import group_episodes
from kit.data.training_rows import join_rows
from kit.errors import ConfigError, NonFiniteStep, SkippedStep
from kit.run import checkpoints, files
from kit.run.cli import plan
from kit.run.console import say
from lab.run_folder import RunFolder

if TYPE_CHECKING:
    from verl import DataProto

    from algorithm import Trainer
    from lab.explain.gradients import Gradient, GradientMeter

SHOWN = 5  # groups, and episodes


@dataclasses.dataclass
class Explanation:
    """What a step did: the content of explain_<N>.json. reason: why it cannot be used, if so."""

    step: int
    checkpoint: str  # the weights that the step started from
    reason: str = ""
    gradient_norm: float = math.nan
    signal_to_noise: float | None = None
    importance: Json = dataclasses.field(default_factory=dict)
    groups: list[Json] = dataclasses.field(default_factory=list)
    blame: list[Json] = dataclasses.field(default_factory=list)


def main(arguments: Sequence[str]) -> None:
    """Run the command. Raises ConfigError if the step cannot be replayed."""
    parser = argparse.ArgumentParser(
        prog="python algorithm.py explain",
        description="Replay a recorded step without changing weights, and say what it did.",
    )
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("step", type=int, help="number of the step")
    parser.add_argument("--config", action="append", help="a recipe, as in the run's command")
    parser.add_argument("words", nargs="*", metavar="key=value", help="the run's other arguments")
    args = parser.parse_intermixed_args(arguments)
    run_folder = RunFolder(args.run.expanduser())
    folder = run_folder.path
    rollouts = run_folder.list_rollout_files("step").get(args.step)
    if not rollouts or not args.config:
        raise ConfigError(
            f"explain: {folder} has no episodes of step {args.step}, or --config is missing. Name "
            "a recorded step, and add the recipe of the run with --config, as in its command."
        )
    changes = ["trainer.replay_min_ess=0", "trainer.logger=[]"]
    changes.append(f"trainer.experiment_name={folder.name}_explain")
    changes += find_start(folder, args.step)
    planned = plan(args.config, [*args.words, *changes], "train", str(rollouts))
    if planned.replay and planned.replay.changes:
        say(
            "WARNING     This is not the recorded step, since the recipe differs: "
            f"{', '.join(planned.replay.changes)}"
        )
    from algorithm import start_trainer
    from kit.run.run import Run

    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            Run(planned.recipe, planned.resume_from, planned.fingerprint, planned.features)
        )
        trainer = start_trainer(planned, run, stack)
        explanation = explain_step(trainer)
    out = write(explanation, folder)
    shutil.rmtree(run.folder, ignore_errors=True)  # it has only the logs of this command
    print_explanation(explanation)
    say(f"Written to {out}")


def find_start(folder: Path, step: int) -> list[str]:
    """Return the key=value that start from the checkpoint before a step. Raises ConfigError."""
    if step == 1:
        return ["trainer.resume_mode=auto"]
    folders = checkpoints.list_checkpoint_folders(folder)
    candidates = [each / f"global_step_{step - 1}" for each in folders]
    checkpoint = next((path for path in candidates if path.is_dir()), candidates[-1])
    if checkpoints.find_damage(checkpoint):
        raise ConfigError(
            f"explain: step {step} starts from the weights of step {step - 1}, and {folder} has no "
            "complete checkpoint of it. Choose step 1 or one after a checkpoint, or train with "
            "trainer.save_freq=1."
        )
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]


# --- the step ------------------------------------------------------------------------------------


def explain_step(trainer: Trainer) -> Explanation:
    """Replay the next recorded step up to its gradient, which changes no weight.

    Raises ConfigError if the step has nothing to train on.
    """
    import training
    from lab.explain.gradients import measuring

    trainer.state = dataclasses.replace(trainer.state, step=trainer.state.step + 1)
    step = trainer.state.step
    start = str(trainer.run.files.checkpoint or trainer.recipe.model.path)
    try:
        episodes = trainer.collect()
    except SkippedStep as skipped:
        raise ConfigError(
            f"explain: step {step} has no gradient: {skipped}. Choose another step."
        ) from None
    trainer.shape_rewards(episodes)
    batch = training.to_batch(episodes, trainer.inputs, trainer.recipe)
    explanation = Explanation(step, start, reason=prepare_batch(trainer, batch))
    actor = trainer.workers.actor
    log_probs = training.compute_log_probs(actor, batch, trainer.recipe)["log_probs"]
    recorded = batch.batch["rollout_log_probs"]
    mask = batch.batch["response_mask"].bool()
    is_sampled = mask & (batch.batch["turn"] >= 0)
    shift = measure_shift(*join_rows(batch, log_probs, recorded, is_sampled))
    explanation.importance = shift._asdict()
    for row, number in enumerate(batch.non_tensor_batch["episode"]):
        episode = episodes[number]
        own = mask[row]
        values = {"recorded log-probs": recorded[row][own], "log-probs": log_probs[row][own]}
        reasons = list_bad_numbers(episode, values)
        if reasons:
            number = episode.record_index.rollout
            explanation.blame.append({"row": episode.row_id, "episode": number, "reasons": reasons})
    with measuring(actor, batch, trainer.recipe) as meter:
        measure_gradients(explanation, episodes, meter)
    return explanation


def prepare_batch(trainer: Trainer, batch: DataProto) -> str:
    """Add log-probs and advantages. Return why the run would skip the step, "" if it would not.

    Both parts compute all tensors before they refuse the batch.
    """
    reasons = []
    for prepare in (trainer.compute_log_probs, trainer.compute_advantages):
        try:
            prepare(batch)
        except NonFiniteStep as skipped:
            reasons.append(str(skipped))
    return "; ".join(dict.fromkeys(reasons))


def list_bad_numbers(episode: Episode, values: Mapping[str, Tensor]) -> list[str]:
    """List what is NaN or infinite in an episode, besides the advantages: these are its group's.

    values: {what they are: of its response tokens}.
    """
    reasons = []
    reward = episode.trained_reward
    if reward is None or not math.isfinite(reward):
        reasons.append(f"its reward is {reward}")
    for name, numbers in values.items():
        count = int((~numbers.isfinite()).sum())
        if count:
            reasons.append(f"{count} of its {name} are NaN or infinite")
    return reasons


def measure_gradients(
    explanation: Explanation, episodes: Sequence[Episode], meter: GradientMeter
) -> None:
    """Measure the gradient of the batch and, if it is finite, of its groups."""
    whole = meter.measure(range(len(meter.batch)))
    explanation.gradient_norm = whole.norm
    if not whole.is_finite:
        explanation.reason = explanation.reason or f"the gradient norm is {whole.norm}"
        return
    members: dict[str, list[int]] = {}
    for row, name in enumerate(meter.batch.non_tensor_batch["uid"]):
        members.setdefault(name, []).append(row)
    parts = {name: meter.measure(rows) for name, rows in members.items()}
    norms = [part.norm for part in parts.values()]
    by_group = group_episodes(episodes)
    explanation.signal_to_noise = measure_signal(norms, whole.norm)
    explanation.groups = [
        describe_group(name, by_group[name], part, whole.norm) for name, part in parts.items()
    ]


def measure_signal(norms: Sequence[float], batch_norm: float) -> float | None:
    """Return |G| / the standard error of G, the sum of n group gradients g_i; None if unknown.

    n g_i is an estimate of G from one group. With S = sum |n g_i - G|^2 / (n - 1), the trace of
    their covariance, the standard error of G is sqrt(S / n). Source: McCandlish et al. 2018,
    arXiv:1812.06162, appendix A.1.
    """
    n = len(norms)
    if n < 2:
        return None
    squares = math.fsum(norm**2 for norm in norms)
    trace = (n**2 * squares - n * batch_norm**2) / (n - 1)
    return batch_norm / math.sqrt(trace / n) if trace > 0 else None


def describe_group(name: str, episodes: Sequence[Episode], part: Gradient, batch: float) -> Json:
    """Describe the gradient of a group. batch: the norm of the whole gradient."""
    trained = [float(episode.trained_reward or 0.0) for episode in episodes]
    verified = [float(episode.reward or 0.0) for episode in episodes]
    return {
        "group": name,
        "row": episodes[0].row_id,
        "prompt": episodes[0].question,
        "episodes": len(episodes),
        "reward": math.fsum(trained) / len(trained),  # the one trained on
        "verified_reward": math.fsum(verified) / len(verified),
        "norm": part.norm,
        "cosine": part.cosine(batch),
        "share": part.share(batch),
    }


# --- results -------------------------------------------------------------------------------------


def write(explanation: Explanation, folder: Path) -> Path:
    """Write runs/<name>/explain_<step>.json, and return its path. NaN becomes null."""
    out = folder / f"explain_{explanation.step}.json"
    with files.replace_atomically(out) as partial:
        content = TypeAdapter(Json).dump_python(dataclasses.asdict(explanation), mode="json")
        partial.write_text(json.dumps(content, indent=1))
    return out


def print_explanation(explanation: Explanation) -> None:
    """Print what matters most."""
    say(f"step {explanation.step}, from {explanation.checkpoint}")
    if explanation.reason:
        say(f"  not usable: {explanation.reason}")
    for culprit in explanation.blame[:SHOWN]:
        reasons = "; ".join(culprit["reasons"])
        say(f"  blame: episode {culprit['episode']} of {culprit['row']}: {reasons}")
    if explanation.reason and not explanation.blame:
        say("  blame: no single episode. Read the reason")
    importance = explanation.importance
    signal = explanation.signal_to_noise
    known = "unknown" if signal is None else f"{signal:.2f}"
    say(f"  gradient norm {explanation.gradient_norm:.3g}, signal-to-noise {known}")
    say(
        f"  policy against the sampler: KL {importance['kl']:.3g}, effective sample size "
        f"{importance['ess']:.3f} of the episodes, {importance['token_ess']:.3f} of the tokens"
    )
    groups = sorted(explanation.groups, key=lambda group: -abs(group["share"]))
    for group in groups[:SHOWN]:
        cosine = "none" if group["cosine"] is None else f"{group['cosine']:+.2f}"
        reward = f"reward {group['reward']:.3g}"
        if group["verified_reward"] != group["reward"]:
            reward += f" (the verifier's {group['verified_reward']:.3g})"
        say(
            f"  group {group['group']}: share {group['share']:.0%}, norm {group['norm']:.3g}, "
            f"cosine {cosine}, {reward}  {group['prompt'][:50]!r}"
        )
