"""The stack that tests share, and a loop that trains the tiny model with it.

The stack is Gym servers, Ray, an FSDP actor and vLLM, started on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.engine.inputs import RunInputs
from kit.engine.sampling import make_rollout_context
from kit.recipe.recipe import Recipe
from kit.run.checkpoints import LoopState
from tests.helpers.recipes import GYM_PYTHON, ROOT, load, metrics_of

SHOP = f"{{path: {ROOT / 'templates' / 'verifier'}, python: {GYM_PYTHON}}}"


OFFICE = f"{{server: workplace_assistant, agent: simple_agent, python: {GYM_PYTHON}}}"


JUDGED = f"{{server: abstention, python: {GYM_PYTHON}, config: {{judge_prompt_template: grade}}}}"


# The settings of the stack: the untied model (runs/test_cli.py uses the tied one), logical GPUs for
# further workers, and a context that is long enough for conversations.
SESSION = [
    "actor_rollout_ref.model.path=untied",
    "ray_kwargs.ray_init.num_gpus=16",
    "ray_kwargs.ray_init.num_cpus=96",
    "actor_rollout_ref.actor.optim.lr=0.005",
    "actor_rollout_ref.rollout.max_model_len=1024",
    "actor_rollout_ref.rollout.disable_log_stats=false",
    "gym.servers.counter.start.server=example_session_state_mgmt",
    f"gym.servers.counter.start.python={GYM_PYTHON}",
    "gym.servers.blackjack.kind=step",
    f"gym.servers.blackjack.start.python={GYM_PYTHON}",
    f"gym.servers.shop.start={SHOP}",
    f"gym.servers.office.start={OFFICE}",
    f"gym.servers.judged.start={JUDGED}",
    "gym.judges.genrm_model=policy",
    "env.train_files=[{path: train.jsonl, server: reasoning_gym}]",
    "env.val_files=[{path: val.jsonl, server: reasoning_gym}]",
]


@dataclass
class Stack:
    """The processes that tests share: Gym servers, Ray, an FSDP actor and vLLM."""

    recipe: Recipe
    inputs: RunInputs
    workspace: Path
    workers: Any  # training.Workers
    servers: Any  # inference.Servers
    fresh: Path  # a checkpoint of the actor's initial weights

    @contextlib.contextmanager
    def trainer(
        self,
        name: str,
        *changes: str,
        overlays: Sequence[str] = (),
        workers: Any = None,
        gym: Any = None,
        manager: Any = None,
    ):
        """Yield a Trainer for the tiny recipe with overlays and changes, in runs/<name>.

        It uses the stack's vLLM. workers: used instead of the stack's workers, which otherwise get
        their initial weights and the recipe's loss. gym: used instead of the stack's Gym servers.
        manager: of the rollout servers that `workers` sends to, instead of the stack's vLLM.
        """
        import inference
        import training
        from algorithm import Trainer
        from kit.recipe import user_functions
        from kit.run.run import Run
        from lab.report.metric_docs import find_metric

        recipe, inputs, features = load(
            self.workspace, f"trainer.experiment_name={name}", *SESSION, *changes, overlays=overlays
        )
        user_functions.register_in_verl(
            recipe.algorithm.adv_estimator, recipe.actor.policy_loss.loss_mode
        )
        if workers is None:
            workers = self.workers
            workers.actor.load_checkpoint(str(self.fresh))
        training.set_policy_loss(workers.actor, recipe)
        running = self.servers
        context = make_rollout_context(
            recipe,
            running.context.client,
            inputs,
            60.0,
            [part.after_episode for part in features.parts],
        )
        servers = inference.Servers(
            recipe,
            manager or running.manager,
            workers.actor,
            context,
            gym or running.gym,
            running.loop,
        )
        state = LoopState()
        shutil.rmtree(self.workspace / "runs" / name, ignore_errors=True)
        with Run(recipe, features=features) as run:
            trainer = Trainer(recipe, inputs, run, workers, servers, state)
            trainer.update_weights()
            with run.stages.save_on_stop(trainer.save):
                yield trainer
        lines = metrics_of(run.folder) if (run.folder / "metrics.jsonl").is_file() else []
        logged = set().union(*lines) - {"step", "time"}
        unknown = sorted(metric for metric in logged if not find_metric(metric))
        assert not unknown, f"lab/report/metric_docs.yaml does not describe {unknown}"


@contextlib.contextmanager
def with_verifiers(stack: Stack, *changes: str):
    """Yield a router of a recipe's Python verifiers and the stack's Gym servers."""
    from kit.verify.python_verifiers.pool import make_pools
    from kit.verify.verifiers import VerifierRouter

    recipe, inputs, _ = load(stack.workspace, *SESSION, *changes)
    pools = make_pools(recipe, inputs.verifiers.specs, stack.workspace)
    gym = VerifierRouter(stack.servers.gym.gym, pools)
    try:
        yield gym
    finally:
        for pool in gym.pools.values():
            stack.servers.loop.run(pool.close())


@contextlib.contextmanager
def session(workspace: Path, *changes: str) -> Iterator[Stack]:
    """Start a Stack with the models and rows of a folder, and change to that folder."""
    import algorithm  # noqa: F401  (imported first, as in a run)
    from kit.run import launch
    from kit.run.run import Run

    os.chdir(workspace)
    # With this, the actor also holds a reference. Recipes with a KL term need one.
    reference = "actor_rollout_ref.actor.use_kl_loss=true"
    name = "trainer.experiment_name=session"
    recipe, inputs, features = load(workspace, *SESSION, *changes, reference, name)
    with Run(recipe, features=features) as run, contextlib.ExitStack() as exits:
        workers, servers = launch.start(run, inputs, exits)
        assert workers and servers
        fresh = workspace / "fresh"
        workers.actor.save_checkpoint(str(fresh), None, 0, None)
        servers.sleep()
        servers.update_weights(0)
        yield Stack(recipe, inputs, workspace, workers, servers, fresh)


def with_values(stack, values, critic=True, reward_model=False):
    """Reset the stack's actor and the groups of `values` to their first weights. Return them."""
    import training

    stack.workers.actor.load_checkpoint(str(stack.fresh))
    values.critic.load_checkpoint(str(stack.workspace / "fresh_critic"))
    return training.Workers(
        stack.workers.actor,
        values.critic if critic else None,
        values.reward_model if reward_model else None,
    )


def kill_workers(workers) -> None:
    """Kill worker groups that a test started, and release their logical CPUs and GPUs."""
    import ray

    for group in filter(None, workers):
        for worker in group.workers:
            ray.kill(worker)
        pool = getattr(group, "resource_pool", None)  # groups that share processes have none
        for placement in pool.pgs if pool else ():
            ray.util.remove_placement_group(placement)


AGREE = 1e-3  # bound on the difference of vLLM's and the trainer's probabilities, in float32
UNTRAINED = 0.1  # a mean reward above that of a random model
PATIENCE = 100  # steps; most tests need fewer than 40
COUNTING = "env.train_files=[{path: tools.jsonl, server: counter}]"
NO_EVALUATION = "env.val_files=[]"


def train_until(trainer, bound: float, over: int = 3) -> list[float]:
    """Train until the mean reward of the last `over` steps reaches `bound`. Return all of them."""
    rewards: list[float] = []
    while len(rewards) < PATIENCE:
        if len(rewards) >= over and sum(rewards[-over:]) / over >= bound:
            break
        metrics = trainer.step_or_skip()
        assert metrics["training/rollout_probs_diff_max"] < AGREE
        assert metrics["training/weights_proved"] == 1
        assert metrics["rollout/failed_frac"] == 0
        rewards.append(metrics["rollout/reward/mean"])
    print("rewards", [round(r, 2) for r in rewards])
    return rewards
