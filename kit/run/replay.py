"""Train on the recorded episodes of a run, without a rollout engine (`--replay`).

The recorded log-probs are those of the behavior policy, which sampled the episodes. With the recipe
of the recorded run, and the same functions and weights by their content, each step is computed as
in that run. With another loss or advantage, the weights are the recorded ones only at the first
step. From then on the episodes are off-policy: the loss gets the recorded log-probs as the old
ones. The same holds from the first step at which the measured distance is larger than arithmetic
explains.

Protects: weights, from episodes that another policy sampled and that count as on-policy.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from env import Task
from kit.data.episode import Episode, list_rows
from kit.data.fingerprint import Fingerprint
from kit.data.importance import PolicyShift, measure_shift
from kit.data.json_lines import has_incomplete_line, read_metrics
from kit.data.rollout_files import load_replay
from kit.data.training_rows import count_episodes, join_rows
from kit.engine.inputs import RunInputs
from kit.errors import ConfigError, RunError
from kit.recipe.keys import flatten, is_below
from kit.recipe.recipe import Recipe
from kit.recipe.schema import TrainerSection
from kit.run import checkpoints, identity
from kit.run.console import say

if TYPE_CHECKING:
    from verl import DataProto

    from training import WorkerGroup

# The keys that decide how a step is computed from its episodes, and those below them that do not.
UPDATE_KEYS = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.model",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.temperature",
    "algorithm",
    "data.train_batch_size",
    "distillation.enabled",
    "env.filters",
    "env.reward",
    "reward.reward_model.enable",
    "trainer.critic_warmup",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)
OTHER_KEYS = re.compile(r".*\.(checkpoint|profiler)\..*|.*(max_token_len_per_gpu|chat_template)")
KL = "rollout_corr/k3_kl"
ROUNDING = 1e-4  # nats per token
MAX_KL = 0.01  # nats per token, between sampler and trainer at the same weights, if not recorded


class Recording(NamedTuple):
    """The rollouts files of consecutive steps of a run."""

    files: Mapping[int, Path]  # {step: rollouts/step_<N>.jsonl}, in the order of the steps

    @property
    def first(self) -> int:
        """Return the first step."""
        return min(self.files)

    @property
    def last(self) -> int:
        """Return the last step."""
        return max(self.files)

    @property
    def steps(self) -> str:
        """Return the steps as a part of a name: 4, or 4_9."""
        return str(self.first) if len(self.files) == 1 else f"{self.first}_{self.last}"

    @property
    def folder(self) -> Path:
        """Return the folder of the run that wrote the files."""
        return self.files[self.first].parent.parent


@dataclasses.dataclass(frozen=True)
class Replay:
    """A recording that passed all checks.

    tasks: the rows of the recipe. changes: `key old -> new` of the keys that decide the update and
    that the recorded run had otherwise; empty if it had the same recipe.
    """

    recording: Recording
    tasks: Sequence[Task]
    changes: list[str]  # grows by what a step measures
    kl: Mapping[int, float] = dataclasses.field(default_factory=dict)  # {step: as recorded}

    @property
    def note(self) -> str:
        """Return the line of the summary."""
        recording = self.recording
        line = f"replay      steps {recording.first} to {recording.last} of {recording.folder}"
        if not self.changes:
            return f"{line}, with its recipe: the weights are those of the recorded run"
        return f"{line}, off-policy, since the recipe differs: {', '.join(self.changes)}"


# --- before anything starts ----------------------------------------------------------------------


def find_recording(pattern: str) -> Recording:
    """Find the rollouts files that a path or a glob pattern names. Raises ConfigError.

    The steps must be consecutive. If one were missing, the learning rate and the number of updates
    would not be those of the recorded run.
    """
    found = [Path(name) for name in glob.glob(str(Path(pattern).expanduser()))]
    files: dict[int, Path] = {}
    for path in found:
        match = re.fullmatch(r"step_(\d+)\.jsonl", path.name)
        if match:
            files[int(match[1])] = path
    steps = sorted(files)
    if not steps or len(steps) != len(found) or steps != list(range(steps[0], steps[-1] + 1)):
        raise ConfigError(
            f"--replay {pattern} names {len(found)} files that are not those of consecutive steps. "
            "Name step_<N>.jsonl of one run, in quotes: "
            "--replay 'runs/<name>/rollouts/step_*.jsonl'."
        )
    return Recording({step: files[step] for step in steps})


def prepare(trainer: TrainerSection, recording: Recording) -> tuple[Path | None, list[str]]:
    """Return the checkpoint before the first step (None for step 1), and changes of the recipe.

    The changes are key=value arguments: a replay trains in a separate run folder. No engine
    samples, so no held-out row is evaluated: `evaluate` does that with the export of the replay.
    The rewards are the recorded ones, so there is no shadow verifier. Raises ConfigError.
    """
    checkpoint = find_checkpoint(trainer, recording)
    if checkpoint:
        before = recording.first - 1
        damage = checkpoints.find_damage(checkpoint)
        if damage or checkpoints.step_of(checkpoint) != before:
            problem = f"not complete: {damage}" if damage else "of another step"
            raise ConfigError(
                f"--replay {recording.files[recording.first]} starts from the weights after step "
                f"{before}, but {checkpoint} is {problem}. Replay from a step after a checkpoint, "
                "or save every step (trainer.save_freq=1), or set trainer.resume_from_path."
            )
    name = f"{trainer.experiment_name}_replay_{recording.steps}"
    changes = [
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir=runs/{name}/checkpoints",
        "trainer.val_before_train=false",
        "env.val_files=[]",
        "env.shadow_verifier=null",
    ]
    return checkpoint, changes


def find_checkpoint(trainer: TrainerSection, recording: Recording) -> Path | None:
    """Return the checkpoint before the first step, which may be missing; None for step 1."""
    if trainer.resume_mode == "resume_path":
        return Path(trainer.resume_from_path or "nowhere")
    if recording.first == 1:
        return None
    folders = (recording.folder / "checkpoints", Path(trainer.default_local_dir))
    candidates = [folder / f"global_step_{recording.first - 1}" for folder in folders]
    return next((path for path in candidates if path.is_dir()), candidates[0])


def load(
    recording: Recording,
    recipe: Recipe,
    inputs: RunInputs[Task],
    fingerprint: Fingerprint | None = None,
) -> Replay:
    """Read every file once, and check it against the model and the rows. Raises ConfigError.

    fingerprint: of the replay. Each step reads its file again, so that memory does not grow with
    the number of steps.
    """
    for path in recording.files.values():
        if has_incomplete_line(path):
            raise ConfigError(
                f"--replay {path} ends within an episode, so others are missing, too. Copy the "
                "file again, or name earlier steps."
            )
        batches = load_replay(path, inputs.train)
        episodes = list(itertools.chain.from_iterable(batches))
        check_tokens(path, episodes, inputs)
    now = fingerprint or Fingerprint(flatten(recipe.redacted()))
    changes = list_changes(recording, recipe, now)
    return Replay(recording, inputs.train, changes, read_kl(recording))


def read_kl(recording: Recording) -> dict[int, float]:
    """Return {step: KL of trainer and sampler} of the recorded steps, as far as it is known."""
    lines = read_metrics(recording.folder / "metrics.jsonl")
    return {line["step"]: line[KL] for line in lines if line.get(KL) is not None}


def check_tokens(path: Path, episodes: Sequence[Episode], inputs: RunInputs[Task]) -> None:
    """Check that the model has the ids of the episodes, and decodes them to the recorded texts.

    It is an error if no text agrees. A few may differ: a parser removes calls and thoughts from
    them. Raises ConfigError.
    """
    lists = [[*row.prompt_ids, *row.response_ids] for row in list_rows(episodes)]
    vocabulary = range(inputs.model.vocab_size)
    is_known = all(token_id in vocabulary for token_id in itertools.chain(*lists))
    compared = [e for e in episodes if e.turns and e.response.strip()]
    if is_known and (not compared or any(has_text_of_ids(e, inputs) for e in compared)):
        return
    raise ConfigError(
        f"--replay {path} has token ids of another model or tokenizer. Set "
        "actor_rollout_ref.model.path to the model of the recorded run."
    )


def has_text_of_ids(episode: Episode, inputs: RunInputs[Task]) -> bool:
    """Return whether the ids of the last turn are decoded to the text of the response."""
    span = episode.turns[-1]
    decoded = str(inputs.tokenizer.decode(episode.response_ids[span.start : span.end]))
    return episode.response.strip() in decoded


def list_changes(recording: Recording, recipe: Recipe, fingerprint: Fingerprint) -> list[str]:
    """List what decides the update and differs from the recorded run, by its content."""
    if not (recording.folder / "config.yaml").is_file():
        return [f"{recording.folder / 'config.yaml'} is missing"]
    roles = {
        "critic": recipe.has_critic,
        "actor_rollout_ref.ref": recipe.has_reference,
        "reward": recipe.has_reward_model,
        "distillation": recipe.teacher,
    }
    parents = [*UPDATE_KEYS, *(key for key, has_role in roles.items() if has_role)]

    def decides(key: str) -> bool:
        return is_below(key, *parents) and not OTHER_KEYS.fullmatch(key)

    before = identity.read_run(recording.folder).select(decides)
    return list(fingerprint.select(decides).list_changes(before).values())


# --- while it runs -------------------------------------------------------------------------------


class ReplayServers:
    """Recorded episodes behind the methods of inference.Servers that the training loop calls."""

    is_asleep = True  # no engine runs, so also a skipped step ends with `update_weights`

    def __init__(self, replay: Replay):
        self.replay = replay
        self.batches: list[list[Episode]] = []  # of the next step, as `load_replay` returns them

    def rollout(self, *_: object, **__: object) -> list[Episode]:
        """Return the step's next recorded batch, [] if there is no other."""
        return self.batches.pop(0) if self.batches else []

    def start_rollout(self, *_: object, **__: object) -> None:
        """Do nothing: the recorded run has sampled all batches."""

    def sleep(self) -> None:
        """Do nothing: no rollout engine runs."""

    def update_weights(self, step: int) -> dict[str, float]:
        """Load the episodes that the recorded run sampled after this step. No metrics."""
        path = self.replay.recording.files.get(step + 1)
        self.batches = load_replay(path, self.replay.tasks) if path else []
        return {}


def set_old_log_probs(
    replay: Replay, step: int, actor: WorkerGroup, batch: DataProto, recipe: Recipe
) -> dict[str, float]:
    """Set the old policy of a step, and return metrics of its distance to the behavior policy.

    With the recipe of the recorded run, the old log-probs are computed as in that run: by a
    separate pass, by the update itself, or (bypass mode) by the rollout engine.

    With another recipe, or if the distance is larger than in the recorded run, PPO's ratio must
    begin at the policy that sampled, so `old_log_probs` are the recorded ones. Exception: if the
    recipe corrects for the rollout engine (rollout_is or rollout_rs), they are computed at the
    present weights. The correction's weights then lead from the recorded policy to the old one
    (decoupled PPO, Hilton et al. 2021, arXiv:2110.00641).

    Raises RunError if the effective sample size is below trainer.replay_min_ess.
    """
    import training  # imports verl, which takes 10 s

    computed = training.compute_log_probs(actor, batch, recipe)
    tensors = batch.batch
    is_sampled = tensors["response_mask"].bool() & (tensors["turn"] >= 0)  # [B, R]
    behavior = tensors["rollout_log_probs"]
    shift = measure_shift(*join_rows(batch, computed["log_probs"], behavior, is_sampled))
    note_other_policy(replay, step, shift)
    metrics = {
        "replay/staleness": step - replay.recording.first if replay.changes else 0,
        "replay/kl": shift.kl,
        "replay/log_ratio_max": shift.log_ratio_max,
        "replay/ess": shift.ess,
        "replay/token_ess": shift.token_ess,
    }
    correction = recipe.algorithm.rollout_correction
    if not replay.changes:
        if correction.bypass_mode:
            tensors["old_log_probs"] = behavior
        elif not recipe.is_on_policy or step <= recipe.trainer.critic_warmup:
            metrics |= training.set_old_log_probs(batch, **computed)
        return metrics
    check_sample_size(shift, step, count_episodes(batch), recipe)
    others = training.set_old_log_probs(batch, **computed)  # it also fills `behavior`
    if correction.bypass_mode or not (correction.rollout_is or correction.rollout_rs):
        tensors["old_log_probs"] = behavior
    # A large difference of the probabilities would skip the step, and here it is expected.
    return metrics | {"actor/entropy": others["actor/entropy"]}


def note_other_policy(replay: Replay, step: int, shift: PolicyShift) -> None:
    """Note as a change that the distance is larger than in the recorded run, and print it once."""
    limit = 2 * replay.kl[step] + ROUNDING if step in replay.kl else MAX_KL
    # what is not finite skips the step, and says nothing about the policy
    if not replay.changes and math.isfinite(shift.kl) and shift.kl > limit:
        replay.changes.append(f"step {step} measured another policy")
        say(
            f"WARNING     step {step} is off-policy, although the recipe is the recorded one: KL "
            f"{shift.kl:.3g} per token, effective sample size {shift.ess:.3f} of the episodes. "
            "From here on, the recorded log-probs are the old ones."
        )


def check_sample_size(shift: PolicyShift, step: int, episodes: int, recipe: Recipe) -> None:
    """Raise RunError if the recorded episodes say too little about the present policy."""
    floor = recipe.trainer.replay_min_ess
    if shift.ess < floor:
        raise RunError(
            f"step {step}: the effective sample size of the recorded episodes is {shift.ess:.3f} "
            f"of {episodes} episodes, below trainer.replay_min_ess={floor:g}: the policy is too "
            f"far from the recorded one (KL {shift.kl:.3g} per token). End the replay at step "
            f"{step - 1}, lower actor_rollout_ref.actor.optim.lr, or set trainer.replay_min_ess=0."
        )
