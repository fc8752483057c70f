# annealed.py
from algorithm import train
from kit.run.cli import plan

with train(plan(["math_cpu", "cpu"], ["trainer.experiment_name=annealed"])) as trainer:
    import training  # not before `plan`, which sets the environment that verl reads

    while trainer.state.step < trainer.run.last:
        coefficient = 0.01 * 0.9**trainer.state.step
        change = f"actor_rollout_ref.actor.entropy_coeff={coefficient}"
        trainer.recipe = trainer.recipe.change(change)
        training.set_policy_loss(trainer.workers.actor, trainer.recipe)
        metrics = trainer.step_or_skip()
        trainer.evaluate_if_due()
    trainer.run.mark_complete()
