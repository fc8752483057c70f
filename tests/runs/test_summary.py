"""Tests that the summary of a recipe has its custom functions and its warnings."""

import copy
from dataclasses import replace

import pytest

from kit.config.neutral_sampling import NEUTRAL_VALUES, requires_same_probs
from kit.data.processor import TextProcessor
from kit.rollout.chat_template import ChatTemplate
from kit.runs import summary
from tests.helpers.recipes import load
from tests.helpers.rollouts import CHATML
from tests.helpers.workers import changed


def test_the_summary_names_custom_functions(workspace):
    recipe, inputs = load(workspace)
    without_functions = summary.summarize(recipe, inputs).splitlines()
    with_functions = changed(
        recipe,
        "env.sampler=templates/samplers.py:by_pass_rate",
        "env.reward={function: templates/rewards.py:overlong, limit: 48}",
        "env.filters=[templates/filters.py:drop_uniform, {function: x.py:f, reasons: [length]}]",
    )
    (line,) = set(summary.summarize(with_functions, inputs).splitlines()) - set(without_functions)
    filters = "templates/filters.py:drop_uniform, x.py:f {reasons: [length]}"
    functions = f"templates/rewards.py:overlong {{limit: 48}}; filters {filters}"
    assert line == f"reward      {functions}; sampler templates/samplers.py:by_pass_rate"
    filtered = changed(recipe, "env.filters=[x.py:f]")
    assert "filters     x.py:f" in summary.summarize(filtered, inputs).splitlines()


def test_the_summary_names_the_models_besides_the_actor(workspace):
    recipe, inputs = load(workspace)
    assert "\nwith " not in summary.summarize(recipe, inputs)
    teacher = "distillation={enabled: true, teacher_models: {teacher_model: {model_path: t}}}"
    for changes, models in (
        (["algorithm.adv_estimator=gae"], "critic"),
        (["algorithm.use_kl_in_reward=true"], "reference model"),
        (["actor_rollout_ref.actor.use_kl_loss=true", teacher], "teacher"),
        (
            ["algorithm.adv_estimator=gae", "reward.reward_model.enable=true"],
            "critic, reward model",
        ),
    ):
        text = summary.summarize(recipe.change(*changes), inputs)
        assert f"with        {models}" in text.splitlines()


def use_template(inputs, source):
    """Give the inputs of a recipe another chat template."""
    tokenizer = copy.copy(inputs.tokenizer)
    tokenizer.chat_template = source
    template = ChatTemplate(TextProcessor(tokenizer), inputs.stop_ids)
    return replace(inputs, tokenizer=tokenizer, template=template)


@pytest.mark.parametrize(
    ("opening", "line", "warning"),
    [
        ("", "shows no markers, so thoughts count as answers", ""),
        ("<plan>", "between <plan> and </plan>, no part of the answer", ""),
        ("Sure: ", "shows no markers", "The generation prompt ends with 'Sure:'"),
    ],
)
def test_a_dry_run_says_what_counts_as_a_thought(workspace, opening, line, warning):
    recipe, inputs = load(workspace)
    header = "assistant\n{% endif"
    inputs = use_template(inputs, CHATML.replace(header, f"assistant\n{opening}{{% endif"))
    lines = summary.summarize(recipe, inputs, written={}).splitlines()
    (found,) = [each for each in lines if each.startswith("thoughts ")]
    assert line in found
    beginnings = [text.partition(",")[0] for text in summary.warn_of_answers(inputs.template)]
    found_warnings = [text for text in beginnings if text.startswith("The generation prompt")]
    assert found_warnings == ([warning] if warning else [])


def test_the_summary_warns_of_a_template_without_past_answers(workspace):
    _, inputs = load(workspace)
    template = use_template(inputs, "{{ messages[0].content }}").template
    (warning,) = summary.warn_of_answers(template)
    assert warning.startswith("The chat template writes no past answers (it does not show the")


def test_the_summary_warns_of_a_server_that_runs_the_models_code(workspace):
    recipe, inputs = load(workspace)
    assert "SANDBOX" not in summary.summarize(recipe, inputs)
    recipe = changed(recipe, "gym.servers.reasoning_gym.start.server=code_gen")
    text = summary.summarize(recipe, inputs)
    warning = "reasoning_gym RUNS THE MODEL'S CODE on this machine, as your user, WITHOUT A SANDBOX"
    assert f"WARNING     {warning}" in text


CHANGED_VALUES = {  # of parameters with which the engine samples from other probabilities
    "top_p": "0.9",
    "top_k": "20",
    "repetition_penalty": "1.2",
    "logprobs_mode": "raw_logprobs",
    "engine_kwargs.vllm.logprobs_mode": "raw_logits",
    "engine_kwargs.vllm.logits_processors": "[my.py:Ban]",
    "engine_kwargs.sglang.enable_custom_logit_processor": "true",
}


@pytest.mark.parametrize("key", NEUTRAL_VALUES)
def test_the_summary_warns_of_each_parameter_that_changes_only_the_engines_probabilities(
    workspace, key
):
    """The same parameters turn off the check of these probabilities."""
    recipe, inputs = load(workspace)
    assert requires_same_probs(recipe)
    assert "the rollout engine's log-probs" not in summary.summarize(recipe, inputs)
    recipe = changed(recipe, f"actor_rollout_ref.rollout.{key}={CHANGED_VALUES[key]}")
    assert not requires_same_probs(recipe)
    lines = summary.summarize(recipe, inputs).splitlines()
    [line] = [line for line in lines if "the rollout engine's log-probs are of" in line]
    assert line.startswith(f"WARNING     rollout.{key}=")
    assert "log-probs are of" not in summary.summarize(replace(recipe, command="evaluate"), inputs)


def test_neutral_values_are_no_reason_for_a_warning(workspace):
    recipe = load(workspace)[0]
    changes = ["top_k=0", "top_p=1.0", "repetition_penalty=1", "temperature=0.7"]
    changes += ["engine_kwargs.vllm.logits_processors=[]", "logprobs_mode=null"]
    assert requires_same_probs(
        changed(recipe, *[f"actor_rollout_ref.rollout.{change}" for change in changes])
    )
    assert not requires_same_probs(changed(recipe, "trainer.one_step_off=1"))
