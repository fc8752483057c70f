"""Tests that the summary of a recipe has its custom functions and its warnings."""

import pytest

from kit.engine.inputs import Trial
from kit.recipe.neutral_sampling import requires_same_probs
from kit.run import summary
from tests.helpers.recipes import load


def test_the_summary_warns_of_a_server_that_runs_the_models_code(workspace):
    recipe, inputs, _ = load(workspace)
    assert "SANDBOX" not in summary.summarize(recipe, inputs)
    recipe = recipe.change("gym.servers.reasoning_gym.start.server=code_gen")
    text = summary.summarize(recipe, inputs)
    warning = "reasoning_gym RUNS THE MODEL'S CODE on this machine, as your user, WITHOUT A SANDBOX"
    assert f"WARNING     {warning}" in text


def test_the_summary_has_what_verifiers_paid_in_their_trial_and_its_warnings(workspace):
    recipe, inputs, _ = load(workspace)
    inputs.trials = [Trial("on row a:1: reward 0", "Row a:1: earns at most 0"), Trial("", "2 rows")]
    lines = summary.summarize(recipe, inputs).splitlines()
    assert [line for line in lines if line.startswith("tried")] == [
        "tried       on row a:1: reward 0"
    ]
    assert {"WARNING     Row a:1: earns at most 0", "WARNING     2 rows"} <= set(lines)


@pytest.mark.parametrize(
    "change", ["top_p=0.9", "engine_kwargs.vllm.logits_processors=[my.py:Ban]"]
)
def test_the_summary_warns_of_a_parameter_that_changes_only_the_engines_probabilities(
    workspace, change
):
    """The same parameters turn off the check of these probabilities. The temperature is not one."""
    recipe, inputs, _ = load(workspace, "actor_rollout_ref.rollout.temperature=0.9")
    assert requires_same_probs(recipe)
    assert "the rollout engine's log-probs" not in summary.summarize(recipe, inputs)
    recipe = recipe.change(f"actor_rollout_ref.rollout.{change}")
    assert not requires_same_probs(recipe)
    lines = summary.summarize(recipe, inputs).splitlines()
    [line] = [line for line in lines if "the rollout engine's log-probs are of" in line]
    assert line.startswith(f"WARNING     rollout.{change.partition('=')[0]}=")
    assert "log-probs are of" not in summary.summarize(
        recipe.model_copy(update={"command": "evaluate"}), inputs
    )
