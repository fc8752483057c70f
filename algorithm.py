"""RL on NeMo Gym tasks with verl and vLLM: the training loop and the command line.

    python algorithm.py --config configs/math.yaml [--config more.yaml] [key=value ...] [--dry-run]
    python algorithm.py --config configs/math.yaml rollout      # collect episodes, without training
    python algorithm.py --config configs/math.yaml evaluate     # mean@k and pass@k on held-out rows
    python algorithm.py --config configs/math.yaml --config sft sft 'env.train_files=[chats.jsonl]'
    python algorithm.py --config configs/math.yaml --replay 'runs/math/rollouts/step_*.jsonl'
    python algorithm.py show runs/math                          # also runs/math/report.html

One step of GRPO, in the order of `Trainer.step` (Shao et al. 2024, arXiv:2402.03300, section 4.1):

 1. Take the next `data.train_batch_size` prompts (env.py).
 2. Sample `rollout.n` responses to each from vLLM, with the log-prob of every token (inference.py):
    in one turn, or in several with the tools and observations of the row's Gym server.
 3. When an episode ends, its Gym server computes the reward (gym_client.py).
 4. Drop failed episodes: a failure is never a reward. If the advantage compares the responses of a
    group, drop groups of fewer than two. Then apply `env.filters` to what is left. With
    `algorithm.filter_groups`, sample more prompts until the batch is full (DAPO).
 5. Shape the rewards (`env.reward`). Compute the old log-probs with the trainer, and those of the
    reference if a KL term is on. If one optimizer step uses the whole batch, the update takes its
    own log-probs as the old ones, since it runs at the weights from before the update.
 6. Correct for differences between rollout engine and trainer (`algorithm.rollout_correction`).
    Compute the advantages (`algorithm.adv_estimator`).
 7. Minimize PPO's clipped loss on the response tokens with AdamW (training.py): `ppo_epochs` over
    mini-batches.
 8. Save a checkpoint if one is due. Send the new weights to vLLM.

Differences from the paper: there is no KL term unless configured (`actor.use_kl_loss`), and the
loss is the mean over all tokens of a mini-batch (verl's `loss_agg_mode: token-mean`), not over each
response first. Recipes of a few lines set other algorithms of verl (docs/algorithms.md): steps 4-7.

To change the algorithm without editing a file, name a custom function in the recipe (templates/):

    the sampler of rows    env.sampler                                     in `collect`
    the verifier           env.verifier, instead of a Gym server           in `collect`
    the filters            env.filters                                     in `collect`
    the reward             env.reward                                      in `shape_rewards`
    the advantage          algorithm.adv_estimator                         in `compute_advantages`
    the loss               actor_rollout_ref.actor.policy_loss.loss_mode   in `update`

To change it by an edit: tasks in env.py, `inference.run_turns`, and `Trainer.step`.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import omegaconf  # noqa: F401
except ModuleNotFoundError as error:  # another Python than this project's
    from kit.recipe.packages import describe_wrong_python

    raise SystemExit(f"error: {describe_wrong_python(error)}") from None

import env
from kit.data import batch_keys as keys
from kit.data.episode import Episode
from kit.data.fingerprint import name_rates, place_rates
from kit.data.metrics import (
    ZERO_VARIANCE,
    compute_component_means,
    compute_rollout_metrics,
    compute_validation_metrics,
    count_zero_variance_groups,
    update_pass_rates,
    warn_about_failures,
)
from kit.data.rollout_files import assign_record_indices
from kit.data.selection import (
    check_failures,
    describe_nothing_left,
    select_trainable,
    take_groups,
)
from kit.engine.inputs import RunInputs
from kit.engine.sampling import make_rollout_args
from kit.errors import NonFiniteStep, SkippedStep
from kit.recipe.recipe import Recipe
from kit.run import checkpoints, cli
from kit.run.checkpoints import LoopState
from kit.run.console import say
from kit.run.replay import ReplayServers, set_old_log_probs
from kit.run.run import Run

if TYPE_CHECKING:
    from verl import DataProto

    import training  # noqa: TC004  import_training imports it
    from inference import Servers


def import_training() -> None:
    """Import training.py and verl, which takes 10 s, once the recipe has passed its checks."""
    global training
    import training


@dataclass
class Trainer:
    """The training loop over started processes. `train` makes a Trainer; `fit` runs all steps."""

    recipe: Recipe
    inputs: RunInputs
    run: Run
    workers: training.Workers
    servers: Servers | ReplayServers
    state: LoopState  # saved in a checkpoint
    metrics: dict[str, float] = field(default_factory=dict)  # of the current step
    scores: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    is_compared: bool = False  # whether `compare_engines` has compared

    def __post_init__(self) -> None:
        import_training()
        self.kl_controller = training.make_kl_controller(self.recipe, self.state.kl_coef)
        self.saved_state = self.state  # `state` at the workers' last update

    @property
    def updates_actor(self) -> bool:
        """Return whether this step trains the actor: after trainer.critic_warmup steps."""
        return bool(self.state.step > self.recipe.trainer.critic_warmup)

    @functools.cached_property
    def loss_has_other_terms(self) -> bool:
        """Return whether the actor learns from a step without advantages. Tried once a run."""
        return training.loss_has_other_terms(self.recipe)

    def fit(self) -> None:
        """Train to the last step. Evaluate and save as the recipe says."""
        if self.recipe.trainer.val_before_train:
            self.evaluate()
        self.run.log.write(self.state.step, self.run.stages.timings())
        while self.state.step < self.run.last:
            self.step_or_skip()  # it saves a checkpoint, if one is due, while vLLM sleeps
            self.evaluate_if_due()
        if not self.scores:  # no step was left: the run resumed after its last one
            self.evaluate()
        self.run.mark_complete()  # `train` exports the model after the processes have ended

    def step_or_skip(self) -> dict[str, float]:
        """Run one step, which may end as a skipped one, and return its metrics."""
        try:
            self.step()
        except SkippedStep as skipped:
            self.skip(skipped)
        return self.metrics

    # --- the step: change it here ----------------------------------------------------------------

    def step(self) -> None:
        """Run one step, 1 to 8 of the header. Raises SkippedStep and NonFiniteStep.

        The order keeps the trainer and the rollout engine from holding GPU memory together. The
        engine sleeps until the new weights are sent. The checkpoint is saved while it sleeps, since
        saving needs GPU memory, too. With one_step_off, sampling of the next batch starts as soon
        as this batch is complete.
        """
        self.state = replace(self.state, step=self.state.step + 1)
        self.metrics = {}
        self.run.stages.begin_step(self.state.step)
        with self.run.stage("step"):
            episodes = self.collect()  # 1 to 4
            with self.run.stage("sleep"):  # frees the rollout engine's GPU memory
                self.servers.sleep()
            self.start_next_rollout()
            self.shape_rewards(episodes)
            batch = training.to_batch(episodes, self.inputs, self.recipe)
            self.compute_log_probs(batch)  # 5
            self.compare_engines(batch)
            self.compute_advantages(batch)  # 6
            self.run.files.write_advantages(self.state.step, episodes, batch.batch)
            self.update(batch)  # 7
            self.save_if_due()  # 8
            self.update_weights()
        self.metrics |= training.compute_step_metrics(batch, self.run.stages.timing, self.recipe)
        self.run.files.nonfinite_steps = 0
        self.log_step(episodes)

    def collect(self) -> list[Episode]:
        """Sample and verify until data.train_batch_size groups pass the filters.

        Raises SkippedStep if no group is left after the last batch of prompts.
        """
        size = self.recipe.data.train_batch_size
        min_group = 2 if self.recipe.compares_group else 1
        episodes: list[Episode] = []
        kept: list[Episode] = []
        filtered = Counter[str]()
        batches = 0
        limit = self.recipe.max_prompt_batches  # 1 without algorithm.filter_groups
        with self.run.stage("gen"):
            while batches < limit and len({e.group_id for e in kept}) < size:
                batches += 1
                tasks = self.take_tasks()
                self.state = replace(
                    self.state, batches=self.state.batches + 1, rows=self.state.rows + size
                )
                new = self.rollout(tasks, f"step_{self.state.step}", before=episodes)
                rates = self.state.pass_rates | update_pass_rates(new, self.state.pass_rates)
                self.state = replace(self.state, pass_rates=rates)
                trainable, dropped = select_trainable(new, min_group, self.recipe.functions.filters)
                episodes = episodes + new
                kept = take_groups(kept + trainable, size)
                filtered.update(dropped)
        self.metrics |= compute_rollout_metrics(episodes, kept, self.state.step)
        self.metrics["rollout/prompt_batches"] = batches
        self.metrics |= {f"rollout/filtered/{name}": n for name, n in filtered.items()}
        if not kept:
            raise SkippedStep(describe_nothing_left(episodes, filtered))
        return kept

    def take_tasks(self) -> list[env.Task]:
        """Take the prompts of the next batch."""
        batch = self.state.batches + 1
        size = self.recipe.data.train_batch_size
        tasks = self.inputs.source.batch(batch, size, self.state.rows, self.state.pass_rates)
        if self.recipe.max_prompt_batches > 1:
            # `collect` drops surplus rows at the end of the batch, so mix those of all files
            random.Random(f"{self.recipe.data.seed} {batch}").shuffle(tasks)
        return tasks

    def rollout(
        self,
        tasks: Sequence[env.Task],
        name: str,
        validate: bool = False,
        before: Sequence[Episode] = (),
    ) -> list[Episode]:
        """Sample and verify episodes of tasks, and write rollouts/<name>.jsonl. Raises RunError."""
        batch_name = name if validate else str(self.state.batches)
        args = make_rollout_args(self.recipe, tasks, batch_name, validate)
        count = len(args.requests) + (len(tasks) if args.baselines else 0)
        on_done = self.run.stages.count_episodes(count)
        episodes = self.servers.rollout(args.requests, args.sampling, on_done, args.baselines)
        file_tasks = self.inputs.validation if validate else self.inputs.train
        assign_record_indices(episodes, file_tasks, before)
        self.run.files.write_episodes(name, episodes, file_tasks, before)
        check_failures(episodes, self.recipe.gym.max_failed_frac)
        return episodes

    def start_next_rollout(self) -> None:
        """With trainer.one_step_off, sample the next batch while this one is trained on."""
        if self.recipe.trainer.one_step_off and self.state.step < self.run.last:
            name = str(self.state.batches + 1)
            tasks = self.take_tasks()
            self.servers.start_rollout(*make_rollout_args(self.recipe, tasks, name, False))

    def shape_rewards(self, episodes: Sequence[Episode]) -> None:
        """Set `shaped_reward`: the verifier's reward, or what env.reward makes of the episode."""
        if self.workers.reward_model:
            with self.run.stage("reward_model"):
                model = self.workers.reward_model
                training.add_reward_model_scores(model, episodes, self.inputs, self.recipe)
            for name, mean in compute_component_means(episodes).items():
                self.metrics.setdefault(name, mean)  # the others are of all verified episodes
        unshaped = count_zero_variance_groups(episodes)
        for episode in episodes:
            episode.shaped_reward = self.recipe.functions.reward(episode)
        shaped = count_zero_variance_groups(episodes)
        self.metrics[ZERO_VARIANCE] = self.metrics.get(ZERO_VARIANCE, 0) + shaped - unshaped

    def compute_log_probs(self, batch: DataProto) -> None:
        """Add log-probs of trainer and reference, and values, each [B, R], before the update."""
        workers = self.workers
        if isinstance(self.servers, ReplayServers):  # the recorded policy may be pi_old
            with self.run.stage("old_log_prob"):
                replay = self.servers.replay
                self.metrics |= set_old_log_probs(
                    replay, self.state.step, workers.actor, batch, self.recipe
                )
        elif self.recipe.algorithm.rollout_correction.bypass_mode:  # the rollout engine is pi_old
            batch.batch[keys.OLD_LOG_PROBS] = batch.batch[keys.ROLLOUT_LOG_PROBS]
        elif not (self.updates_actor and self.recipe.is_on_policy):
            with self.run.stage("old_log_prob"):
                self.metrics |= training.add_old_log_probs(self.workers.actor, batch, self.recipe)
        if self.recipe.has_reference:
            with self.run.stage("ref"):
                log_probs = training.compute_ref_log_probs(workers, batch, self.recipe)
                batch.batch[keys.REF_LOG_PROBS] = log_probs
        if workers.critic:
            with self.run.stage("values"):
                values = training.compute_values(workers.critic, batch, self.recipe)
                batch.batch[keys.VALUES] = values
        self.raise_if_nonfinite(batch)

    def compute_advantages(self, batch: DataProto) -> None:
        """Turn rewards into advantages [B, R]: KL penalty, rollout correction, advantage.

        GRPO, the default: all tokens of response i of a group with rewards r_1, ..., r_n have
            A_i = (r_i - mean(r)) / (std(r) + 1e-6)
        """
        correction = self.recipe.algorithm.rollout_correction
        with self.run.stage("adv"):
            batch.batch[keys.REWARDS] = batch.batch[keys.SCORES]
            if self.recipe.algorithm.use_kl_in_reward:
                self.metrics |= training.apply_kl_penalty(batch, self.kl_controller, self.recipe)
                self.state = replace(self.state, kl_coef=float(self.kl_controller.value))
            # with bypass_mode, the loss applies the correction
            if keys.OLD_LOG_PROBS in batch.batch and not correction.bypass_mode:
                self.metrics |= training.apply_rollout_correction(batch, self.recipe)
            if not batch.batch[keys.RESPONSE_MASK].any():
                raise SkippedStep("algorithm.rollout_correction.rollout_rs rejected every token")
            training.compute_advantages(batch, self.recipe)
        self.raise_if_nonfinite(batch)

    def update(self, batch: DataProto) -> None:
        """Update critic and actor; in the first trainer.critic_warmup steps only the critic.

        If all advantages are 0, and the loss has no other term, the actor keeps its weights.
        """
        done = self.state.step - 1  # training steps before this one set the learning rate
        if self.workers.critic:
            training.set_schedule_position(batch, done)
            with self.run.stage("update_critic"):
                self.metrics |= training.update_critic(self.workers.critic, batch, self.recipe)
        has_signal = training.has_advantages(batch) or self.loss_has_other_terms
        if self.updates_actor and not has_signal:
            equal = int(self.metrics.get(ZERO_VARIANCE, 0))
            say(
                f"step {self.state.step} changes no weights: all advantages are 0 ({equal} groups "
                'have equal rewards). See docs/guides/diagnosis.md, "3. A flat reward".'
            )
        elif self.updates_actor:
            training.set_schedule_position(batch, done - self.recipe.trainer.critic_warmup)
            with self.run.stage("update_actor"):
                self.metrics |= training.update_actor(self.workers.actor, batch, self.recipe)
        self.saved_state = self.state
        # verl skips a mini-batch with a non-finite gradient, and only its metrics show that
        self.raise_if_nonfinite(batch, is_updated=True)

    def update_weights(self) -> None:
        """Send the trainer's weights to the rollout engine, which proves that it has them."""
        with self.run.stage("update_weights"):
            self.metrics |= self.servers.update_weights(self.state.step)

    # --- checks, checkpoints, evaluation, metrics ------------------------------------------------

    def compare_engines(self, batch: DataProto) -> None:
        """At the first step, raise RunError if the rollout engine and the trainer differ."""
        from kit.run import finite_check

        if self.is_compared or isinstance(self.servers, ReplayServers):
            return
        log_probs = batch.batch.get(keys.OLD_LOG_PROBS)  # [B, R]
        if log_probs is None or self.recipe.algorithm.rollout_correction.bypass_mode:
            with self.run.stage("compare_engines"):
                outputs = training.compute_log_probs(self.workers.actor, batch, self.recipe)
                log_probs = outputs["log_probs"]
        model_type = self.inputs.model.model_type
        finite_check.raise_if_engines_differ(batch, log_probs, model_type, self.recipe)
        self.is_compared = True

    def raise_if_nonfinite(self, batch: DataProto, is_updated: bool = False) -> None:
        """Raise NonFiniteStep for NaN, infinity, or samples from other weights."""
        from kit.run import finite_check

        if reason := finite_check.find_reason_to_skip(batch, self.metrics, self.recipe):
            raise NonFiniteStep(reason, batch, is_updated)

    def skip(self, skipped: SkippedStep) -> None:
        """End a step that failed. Raises RunError at the third non-finite one in a row."""
        self.saved_state = self.state
        reason = str(skipped)
        if isinstance(skipped, NonFiniteStep):
            reason = self.run.files.keep_nonfinite(self.state.step, reason, skipped.batch)
        else:
            self.run.files.nonfinite_steps = 0
        say(f"step {self.state.step} {skipped.outcome}: {reason}")
        self.metrics["training/skipped_nonfinite_steps"] = self.run.files.nonfinite_steps
        self.save_if_due()
        if self.servers.is_asleep:
            self.update_weights()
        self.log_step([])

    def save_if_due(self) -> None:
        """Save after every trainer.save_freq steps, and after the last one."""
        if self.run.is_due(self.state.step, self.recipe.trainer.save_freq):
            self.save()

    def save(self) -> Path | None:
        """Save the workers' weights if they are finite, and return the last checkpoint."""
        rates = name_rates(self.saved_state.pass_rates, self.inputs.train, self.run.files.functions)
        return self.run.files.save(self.workers, replace(self.saved_state, pass_rates=rates))

    def evaluate_if_due(self) -> None:
        """Evaluate after every trainer.test_freq steps, and after the last one."""
        if self.run.is_due(self.state.step, self.recipe.trainer.test_freq):
            self.evaluate()

    def evaluate(self) -> None:
        """Score the held-out rows, greedily unless rollout.val_kwargs says otherwise."""
        if not self.inputs.validation:
            return
        step = self.state.step
        with self.run.stage("testing"):
            episodes = self.rollout(self.inputs.validation, f"val_{step}", validate=True)
            n = self.recipe.rollout.val_kwargs.n
            self.scores = compute_validation_metrics(episodes, n)
            warn_about_failures(self.scores, say)
            self.run.log.write_evaluation(step, self.scores, episodes)
        timing = {"timing_s/testing": self.run.stages.timing["testing"]}
        self.run.log.write(step, self.scores | timing)
        self.run.files.report_if_due()

    def log_step(self, episodes: Sequence[Episode]) -> None:
        """Write the step's metrics to metrics.jsonl and the console."""
        step = self.state.step
        self.metrics |= self.run.stages.timings() | {"training/global_step": step}
        self.metrics["training/epoch"] = self.state.rows / self.inputs.per_epoch
        self.run.log.write(step, self.metrics)
        self.run.log.print_step(step, self.metrics, episodes)


@contextlib.contextmanager
def train(plan: cli.Plan) -> Iterator[Trainer]:
    """Yield a Trainer over started processes. After `fit`, export the model.

    On Ctrl-C, SIGTERM or an error, save the last complete update.
    """
    with Run(plan.recipe, plan.resume_from, plan.fingerprint, plan.features) as run:
        with contextlib.ExitStack() as stack:
            trainer = start_trainer(plan, run, stack)
            with run.stages.save_on_stop(trainer.save):
                yield trainer
        if run.stages.is_complete:
            run.files.export()
            run.log.print_result(trainer.scores)


def start_trainer(plan: cli.Plan, run: Run, stack: contextlib.ExitStack) -> Trainer:
    """Start all processes, load a checkpoint to resume from, send its weights to vLLM."""
    from kit.run import launch

    if plan.replay:  # the learning-rate schedule still has the length of the recorded run
        run.end_at(plan.replay.recording.last)
    workers, started = launch.start(run, plan.inputs, stack, samples=not plan.replay)
    servers = ReplayServers(plan.replay) if plan.replay else started
    assert workers and servers  # of the command `train`
    state = LoopState()
    with run.stage("sleep"):  # frees memory for the optimizer's state
        servers.sleep()
    if plan.resume_from:
        with run.stage("load_checkpoint"):
            state = checkpoints.load(workers, plan.resume_from)
            rates = place_rates(state.pass_rates, plan.inputs.train, run.files.functions)
            state = replace(state, pass_rates=rates)
        say(f"Resumed from {plan.resume_from}")
    trainer = Trainer(plan.recipe, plan.inputs, run, workers, servers, state)
    trainer.update_weights()
    return trainer


def run_command(plan: cli.Plan) -> None:
    """Run the command of a recipe that passed its checks."""
    if plan.recipe.command != "train":
        cli.run_other(plan)  # rollout, evaluate or sft
        return
    with train(plan) as trainer:
        trainer.fit()


if __name__ == "__main__":
    with cli.exit_on_errors():
        planned = cli.read_plan()  # parses the arguments, checks the recipe, prints its summary
        if planned:  # None: `show` or a dry run, which have printed all they do
            run_command(planned)
