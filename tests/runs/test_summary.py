"""Tests that the summary of a recipe has its custom functions and its warnings."""

from conftest import load

from kit.runs import summary


def test_the_summary_names_custom_functions(workspace):
    config, inputs = load(workspace)
    without_functions = summary.summarize(config, inputs, "train").splitlines()
    config.env.sampler = "templates/samplers.py:by_pass_rate"
    config.env.reward = {"function": "templates/rewards.py:overlong", "limit": 48}
    config.env.filters = [
        "templates/filters.py:drop_uniform",
        {"function": "x.py:f", "reasons": ["length"]},
    ]
    (line,) = set(summary.summarize(config, inputs, "train").splitlines()) - set(without_functions)
    filters = "templates/filters.py:drop_uniform, x.py:f {reasons: [length]}"
    functions = f"templates/rewards.py:overlong {{limit: 48}}; filters {filters}"
    assert line == f"reward      {functions}; sampler templates/samplers.py:by_pass_rate"
    config.env.reward = config.env.sampler = None
    config.env.filters = ["x.py:f"]
    assert "filters     x.py:f" in summary.summarize(config, inputs, "train").splitlines()


def test_the_summary_warns_of_a_server_that_runs_the_models_code(workspace):
    config, inputs = load(workspace)
    assert "SANDBOX" not in summary.summarize(config, inputs, "train")
    config.gym.servers.reasoning_gym.start = {"server": "code_gen"}
    text = summary.summarize(config, inputs, "train")
    warning = "reasoning_gym RUNS THE MODEL'S CODE on this machine, as your user, WITHOUT A SANDBOX"
    assert f"WARNING     {warning}" in text
