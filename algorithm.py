"""RL on NeMo Gym tasks with verl and vLLM: the loop, and the command.

    python algorithm.py --config configs/math.yaml [--config more.yaml] [key=value ...] [--dry-run]
    python algorithm.py --config configs/math.yaml rollout      # collect episodes, as Gym's own collector does
    python algorithm.py --config configs/math.yaml evaluate     # mean@k and pass@k on the held-out rows
    python algorithm.py --config configs/math.yaml --config sft sft 'env.train_files=[chats.jsonl]'
    python algorithm.py --config configs/math.yaml --replay runs/math/rollouts/step_12.jsonl    # that update again
    python algorithm.py show runs/math                          # what became of it (and runs/math/report.html)

One step of GRPO, in the order of `Trainer.step` (Shao et al. 2024, arXiv:2402.03300, section 4.1):

 1. take the next `data.train_batch_size` prompts (env.py);
 2. sample `rollout.n` answers to each from vLLM, with the log-prob of every token (inference.py): in one
    turn, or in many with the tools and observations of the row's Gym server;
 3. as each answer ends, its Gym server says the reward (gym_client.py);
 4. drop failed episodes and groups of fewer than two: a failure is never a reward; then what `env.filters` drop;
    with `algorithm.filter_groups`, sample more prompts until the batch is full again (DAPO);
 5. recompute the log-probs with the trainer (`old_log_probs`), unless the update's own pass gives them, since it is at
    the same weights (one optimiser step a batch: the ratio is 1); and the reference's if a KL term is on;
 6. shape the rewards (`env.reward`), weigh or reject tokens on which trainer and sampler differ
    (`algorithm.rollout_correction`); advantage of an answer = its reward - the mean of its group, over the group's
    standard deviation (`algorithm.adv_estimator`);
 7. PPO's clipped loss on the answer's tokens, `ppo_epochs` over mini-batches, AdamW (training.py);
 8. a checkpoint if one is due, while vLLM still sleeps; then the new weights go to vLLM.

Departures from the paper: no KL term unless configured (`actor.use_kl_loss`); the loss is averaged over all tokens of a
mini-batch (verl's `loss_agg_mode: token-mean`, DAPO's choice), not per answer first. Other algorithms differ in 4 to 7
and are overlays of a few lines over any recipe (docs/algorithms.md): advantages and losses are verl's
(verl.trainer.ppo.core_algos), picked by verl's own keys.

Where to change what. Without an edit, by a function of your own that the recipe names (templates/ has some to copy):
  the sampler of rows    env.sampler                                     called in `collect`
  the verifier           env.verifier, in the place of a Gym server      called in `collect`
  what is dropped        env.filters                                     called in `collect`
  the reward             env.reward                                      called in `reward`
  the baseline           algorithm.adv_estimator                         called in `credit`
  the loss               actor_rollout_ref.actor.policy_loss.loss_mode   called in the workers, by `learn`
By an edit: tasks in env.py, turns in `inference.play`, the order of things in `Trainer.step`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import env
from kit import later
from kit.data.episodes import (
    Episode,
    Recorded,
    check_failures,
    component_means,
    first_groups,
    keep,
    pass_rates,
    rollout_metrics,
    validation_metrics,
    warn_of_failures,
)
from kit.errors import DamagedStep, SkippedStep
from kit.runs import checkpoints, cli, preparation
from kit.runs.run_dir import Run

# verl and vLLM take 10 s to import, after the recipe was found to be in order
inference, training = later("inference"), later("training")
start, damage, images = (
    later("kit.runs.launch"),
    later("kit.runs.finite_check"),
    later("kit.extras.images"),
)


# --- the loop ------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """The loop over a running stack. `train` opens one; `fit` is the whole run, `advance` a step of it."""

    config: DictConfig
    data: preparation.Data
    run: Run
    workers: Any  # training.Workers
    servers: Any  # inference.Servers, kit.extras.one_step_off.Servers or Recorded
    # all that the driver has to remember; batches: of prompts, so far; pass_rates: of rows, by id
    state: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)  # of the step under way
    scores: dict[str, float] = field(default_factory=dict)  # of the last evaluation

    def __post_init__(self) -> None:
        refill = self.config.algorithm.filter_groups
        self.rounds = (
            refill.max_num_gen_batches if refill.enable else 1
        )  # batches of prompts for a step, at most
        self.kl_ctrl = training.kl_controller(self.config, self.state["kl_coef"])
        self.learned = dict(self.state)  # the state that goes with the weights in the workers

    def fit(self) -> None:
        """Train to the last step, evaluating and saving as the recipe says."""
        if self.config.trainer.val_before_train:
            self.evaluate()
        self.run.log(self.state["step"], self.run.timings())
        while self.state["step"] < self.run.last:
            self.advance()
        if not self.scores:  # of a run that was stopped after its last step
            self.evaluate()
        self.finish()

    def advance(self) -> dict[str, float]:
        """The next step, told and counted also if it cannot be trained on; an evaluation if one is due. Its metrics."""
        try:
            self.step()
        except SkippedStep as why:
            self.skip(why)
        if self.run.due(self.state["step"], self.config.trainer.test_freq):
            self.evaluate()
        return self.metrics

    def step(self) -> None:
        """The next step, 1 to 8 of the header. Raises SkippedStep, DamagedStep."""
        self.state["step"], self.metrics = self.state["step"] + 1, {}
        self.run.begin(self.state["step"])
        with self.run.stage("step"):
            kept = self.collect()  # 1 to 4
            with self.run.stage("sleep"):
                self.servers.sleep()
            self.sample_ahead()
            self.reward(kept)
            pad, temperature = (
                self.data.tokenizer.pad_token_id,
                self.config.actor_rollout_ref.rollout.temperature,
            )
            batch = training.to_batch(kept, pad, temperature)
            images.add(batch, kept, self.data.tokenizer)
            self.measure(batch)  # 5
            self.credit(batch)  # 6
            self.run.write_advantages(self.state["step"], kept, batch.batch)
            self.learn(batch)  # 7
            self.save_if_due()
            self.publish()  # 8
        self.metrics |= training.step_metrics(batch, self.run.timing, self.config)
        self.run.damaged = 0
        self.report(kept)

    def collect(self) -> list[Episode]:
        """Episodes to train on: of one batch of prompts, or of as many as fill one after the filters."""
        size = self.config.data.train_batch_size
        members = 2 if training.asks_for(self.config, "index") else 1  # that a group needs
        episodes: list[Episode] = []
        kept: list[Episode] = []
        batches, filtered = 0, dict[str, int]()
        with self.run.stage("gen"):
            while len({e.group_id for e in kept}) < size and batches < self.rounds:
                batches, self.state["batches"] = batches + 1, self.state["batches"] + 1
                fresh = self.rollout(
                    self.tasks(self.state["batches"]), f"step_{self.state['step']}", before=episodes
                )
                before = self.state["pass_rates"]
                self.state["pass_rates"] = before | pass_rates(
                    fresh, before
                )  # a new one: `learned` has the other
                passed, dropped = keep(fresh, members, self.data.filters)
                episodes, kept = episodes + fresh, first_groups(kept + passed, size)
                filtered = {name: filtered.get(name, 0) + count for name, count in dropped.items()}
        self.metrics |= rollout_metrics(episodes, kept, self.state["step"]) | {
            "rollout/prompt_batches": batches
        }
        self.metrics |= {f"rollout/filtered/{name}": count for name, count in filtered.items()}
        if not kept:
            where = f"{self.run.folder}/rollouts/step_{self.state['step']}.jsonl"
            raise SkippedStep(f"no group left to train on; see {where}")
        return kept

    def sample_ahead(self) -> None:
        """With trainer.one_step_off the next batch of prompts is begun, while this one is trained on."""
        if self.config.trainer.one_step_off and self.state["step"] < self.run.last:
            batch = self.state["batches"] + 1
            self.servers.begin(*self.asked(self.tasks(batch), str(batch)))

    def asked(
        self, tasks: Sequence[env.Task], name: str, validate: bool = False
    ) -> tuple[Any, dict[str, Any], bool]:
        """Of the servers: episodes (`name` is of no other batch), how to sample, one more greedy answer per prompt?"""
        rollout = self.config.actor_rollout_ref.rollout
        requests = inference.in_groups(tasks, rollout.val_kwargs.n if validate else rollout.n, name)
        greedy = not validate and training.asks_for(self.config, "reward_baselines")
        return requests, inference.sampling_params(self.config, validate), greedy

    def tasks(self, batch: int) -> list[env.Task]:
        """The prompts of a batch, by its number."""
        data, seed = self.data, self.config.data.seed
        picked = data.sampler(
            data.train, self.config.data.train_batch_size, batch, seed, self.state["pass_rates"]
        )
        if self.rounds > 1:  # what is over is cut off the end, whatever file it came from
            random.Random(f"{seed} {batch}").shuffle(picked)
        return picked

    def rollout(
        self,
        tasks: Sequence[env.Task],
        name: str,
        validate: bool = False,
        before: Sequence[Episode] = (),
    ) -> list[Episode]:
        """Episodes for each task at the servers' present weights, also written to rollouts/<name>.jsonl."""
        requests, sampling, greedy = self.asked(
            tasks, name if validate else str(self.state["batches"]), validate
        )
        count = self.run.counter(len(requests) + greedy * len(tasks))
        episodes = self.servers.rollout(requests, sampling, count, baselines=greedy)
        self.run.write_episodes(
            name, episodes, self.data.validation if validate else self.data.train, before
        )
        check_failures(episodes, self.config.gym.max_failed_frac)
        return episodes

    def reward(self, kept: Sequence[Episode]) -> None:
        """What each episode is worth: the verifier's word, or what a reward model and env.reward make of it."""
        if self.workers.reward_model:
            with self.run.stage("reward_model"):
                pad = self.data.tokenizer.pad_token_id
                training.add_reward_model(self.workers.reward_model, kept, pad, self.config)
            self.metrics |= {
                k: v for k, v in component_means(kept).items() if k not in self.metrics
            }
        for episode in kept:
            episode.reward = self.data.reward(episode)

    def measure(self, batch: Any) -> None:
        """Log-probs of the trainer and of the reference, values, all [B, R], at the weights that sampled the batch."""
        learns = self.state["step"] > self.config.trainer.critic_warmup
        if self.config.algorithm.rollout_correction.bypass_mode:  # the sampler is the old policy
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        elif not (learns and training.one_pass(self.config)):  # else they come with the update
            with self.run.stage("old_log_prob"):
                self.metrics |= training.old_log_probs(self.workers.actor, batch, self.config)
        if training.needs_reference(self.config):
            with self.run.stage("ref"):
                batch.batch["ref_log_prob"] = training.ref_log_probs(
                    self.workers, batch, self.config
                )
        if self.workers.critic:
            with self.run.stage("values"):
                batch.batch["values"] = training.values(self.workers.critic, batch, self.config)
        self.check(batch)

    def credit(self, batch: Any) -> None:
        """From rewards to advantages [B, R]: KL penalty, correction between sampler and trainer, baseline."""
        with self.run.stage("adv"):
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            if self.config.algorithm.use_kl_in_reward:
                self.metrics |= training.apply_kl(batch, self.kl_ctrl, self.config)
                self.state["kl_coef"] = float(self.kl_ctrl.value)
            bypass = (
                self.config.algorithm.rollout_correction.bypass_mode
            )  # there the loss corrects as it goes
            if "old_log_probs" in batch.batch and not bypass:
                self.metrics |= training.correct(batch, self.config)
            if not batch.batch["response_mask"].any():
                raise SkippedStep("algorithm.rollout_correction.rollout_rs rejected every token")
            training.advantages(batch, self.config)
        self.check(batch)

    def learn(self, batch: Any) -> None:
        """ppo_epochs of critic and actor; in the first trainer.critic_warmup steps of the critic alone."""
        if self.workers.critic:
            with self.run.stage("update_critic"):
                self.metrics |= training.update_critic(self.workers.critic, batch, self.config)
        if self.state["step"] > self.config.trainer.critic_warmup:
            with self.run.stage("update_actor"):
                self.metrics |= training.update_actor(self.workers.actor, batch, self.config)
        self.learned = dict(self.state)
        self.check(
            batch
        )  # verl leaves out a mini-batch whose gradient is not finite, and says so only in its metrics

    def check(self, batch: Any) -> None:
        """Raises DamagedStep where numbers are not finite, or the sampler is not the trainer."""
        if found := damage.damage(batch, self.metrics, self.config):
            raise DamagedStep(found, batch)

    def skip(self, why: SkippedStep) -> None:
        """The end of a step that could not be trained on. Raises RunError at the third damaged one in a row."""
        self.learned = dict(self.state)
        told = str(why)
        if isinstance(why, DamagedStep):
            told = self.run.keep_damaged(self.state["step"], told, why.batch)
        else:
            self.run.damaged = 0
        self.run.say(f"step {self.state['step']} skipped: {told}")
        self.metrics["training/skipped_nonfinite_steps"] = self.run.damaged
        self.save_if_due()
        if self.servers.asleep:
            self.publish()
        self.report([])

    def publish(self) -> None:
        """From now on vLLM samples from the trainer's weights."""
        with self.run.stage("update_weights"):
            self.servers.publish(self.state["step"])

    def save_if_due(self) -> None:
        """A checkpoint after every trainer.save_freq steps, and after the last."""
        if self.run.due(self.state["step"], self.config.trainer.save_freq):
            self.save()

    def save(self) -> Path | None:
        """A checkpoint of the weights in the workers, if they are finite. The last one."""
        return self.run.save(self.workers, self.learned)

    def evaluate(self) -> None:
        """The held-out rows, greedily unless rollout.val_kwargs says otherwise."""
        if not self.data.validation:
            return
        with self.run.stage("testing"):
            episodes = self.rollout(
                self.data.validation, f"val_{self.state['step']}", validate=True
            )
            self.scores = validation_metrics(
                episodes, self.config.actor_rollout_ref.rollout.val_kwargs.n
            )
            warn_of_failures(self.scores, self.run.say)
            self.run.log_answers(self.state["step"], episodes)
        self.run.log(
            self.state["step"], self.scores | {"timing_s/testing": self.run.timing["testing"]}
        )
        self.run.report_if_due()

    def report(self, kept: Sequence[Episode]) -> None:
        """The step's metrics, into metrics.jsonl and onto the console."""
        step, size = self.state["step"], self.config.data.train_batch_size
        epoch = self.state["batches"] * size / self.data.per_epoch
        self.metrics |= self.run.timings() | {"training/global_step": step, "training/epoch": epoch}
        self.run.log(step, self.metrics)
        self.run.report(step, self.metrics, kept)

    def finish(self) -> None:
        """Have `train` export the model once the processes are gone, with their memory, and tell the result."""
        self.run.guard.owed = "the same command exports the model"


@contextlib.contextmanager
def train(plan: cli.Plan) -> Iterator[Trainer]:
    """A Trainer over a stack that runs until the end of the block. Ctrl-C, SIGTERM and errors save what was learned."""
    with Run(plan.config, "train", plan.resume_from) as run:
        with contextlib.ExitStack() as stack:
            trainer = begin(plan, run, stack)
            with run.saving(trainer.save):
                yield trainer
        if run.guard.owed:
            run.export()
            run.finish(trainer.scores)


def begin(plan: cli.Plan, run: Run, stack: contextlib.ExitStack) -> Trainer:
    """Start what a run needs, load the checkpoint that it goes on from, and give vLLM the weights."""
    if plan.recorded:  # that step alone; the schedule keeps the run's length
        run.last = 1 + (checkpoints.step_of(plan.resume_from) if plan.resume_from else 0)
    workers, servers = start.start(run, plan.data, stack, sample=not plan.recorded)
    servers = servers or Recorded(plan.recorded)
    state: dict[str, Any] = {
        "command": "train",
        "step": 0,
        "batches": 0,
        "pass_rates": {},
        "kl_coef": 0.0,
    }
    with run.stage("sleep"):  # before the optimiser's state takes its place
        servers.sleep()
    if plan.resume_from:
        with run.stage("load_checkpoint"):
            state = checkpoints.load(workers, plan.resume_from)
        run.say(f"resumed from {plan.resume_from}")
    trainer = Trainer(plan.config, plan.data, run, workers, servers, state)
    trainer.publish()
    return trainer


if __name__ == "__main__":
    cli.main(train)
