"""Tests the numbers of `explain` without workers, and the errors of the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.errors import ConfigError
from kit.runs import checkpoints
from lab.explain import command
from lab.explain.explanation import (
    Explanation,
    Gradient,
    describe_tokens,
    explain_episode,
    find_bad,
    find_causes,
    find_outlier_group,
    measure_signal,
)
from tests.helpers.workers import make_episode


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=4))
def test_halving_finds_all_bad_rows_in_few_calls(count, bad):
    bad = {row for row in bad if row < count}
    calls = []

    def is_bad(rows):
        calls.append(rows)
        return bool(bad & set(rows))

    assert find_bad(range(count), is_bad) == sorted(bad)
    assert len(calls) <= 1 + 2 * len(bad) * math.ceil(math.log2(count) if count > 1 else 0)


@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_the_noise_is_that_of_the_groups_covariance(n, seed):
    """From the norms only. The direct computation uses the vectors."""
    gradients = np.random.default_rng(seed).normal(0.3, 1.0, (n, 6))  # of the groups
    total = gradients.sum(axis=0)
    norms = np.linalg.norm(gradients, axis=1).tolist()
    trace = np.cov(n * gradients.T).trace()
    expected = np.linalg.norm(total) / np.sqrt(trace / n)
    assert measure_signal(norms, np.linalg.norm(total)) == pytest.approx(expected, rel=1e-6)


def test_one_group_has_no_noise():
    assert measure_signal([2.0], 2.0) is None
    assert measure_signal([1.63, 0.0, 0.0, 0.0], 1.63 * (1 + 1e-9)) == pytest.approx(1.0)


def test_cosines_and_shares_of_parts():
    g = np.array([3.0, 4.0])
    parts = [Gradient(float(np.linalg.norm(v)), float(v @ g)) for v in np.diag(g)]
    assert sum(part.share(5.0) for part in parts) == pytest.approx(1.0)
    assert parts[0].cosine(5.0) == pytest.approx(0.6)
    assert Gradient(0.0, 0.0).cosine(5.0) is None and Gradient(1.0, 0.0).share(0.0) == 0.0


def test_an_outlier_is_ten_times_the_median_of_the_other_groups():
    assert find_outlier_group({"a": 1.0, "b": 2.0, "c": 15.1}) == "c"
    assert find_outlier_group({"a": 1.0, "b": 2.0, "c": 14.9}) == ""
    assert find_outlier_group({"a": 1.0, "b": 0.0, "c": 11.0}) == "c"  # two groups are enough
    assert find_outlier_group({"a": 0.0, "c": 1e9}) == ""  # nothing to compare with


class Letters:
    """A tokenizer whose id k is the k-th letter."""

    def decode(self, ids):
        return "".join(chr(97 + k) for k in ids)


def test_the_tokens_that_move_most_have_their_context():
    episodes = [make_episode([5], [1, 2, 3]), make_episode([5], [4, 5, 6])]
    log_probs = torch.tensor([[0.9, 0.5, 0.5], [0.99, 0.9, 0.5]]).log()
    advantages = torch.tensor([[1.0, 1.0, 9.0], [-3.0, -3.0, math.nan]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    tokens = describe_tokens(episodes, log_probs, advantages, mask, Letters())
    assert [t["token"] for t in tokens] == ["c", "f", "b", "e"]
    assert tokens[0]["size"] == pytest.approx(0.5)
    assert (tokens[0]["before"], tokens[0]["after"]) == ("b", "d")


def test_the_blame_names_what_is_not_finite_or_far_off():
    episodes = [make_episode([5], [1, 2]) for _ in range(3)]
    for episode in episodes:
        episode.reward = 1.0
    episodes[1].reward = 1e6
    tensors = {
        "mask": torch.ones(3, 2),
        "behavior": torch.tensor([[-1.0, -1.0], [-1.0, -40.0], [math.nan, -1.0]]),
        "log_probs": torch.full((3, 2), -1.0),
        "advantages": torch.ones(3, 2),
    }
    described = explain_episode(1, episodes, tensors, Letters())
    assert "its reward is 1e+06, the median 1" in described["reasons"]
    assert described["token"] == "c" and "recorded as -40" in described["reasons"][-1]
    bad = explain_episode(2, episodes, tensors, Letters())
    assert bad["reasons"][0] == "1 of its recorded log-probs are NaN or infinite"
    tensors["advantages"][0] = math.nan  # by the bad number of another one of its group
    assert find_causes([0, 2], episodes, tensors) == [2]
    assert find_causes([0], episodes, tensors) == [0]


# --- the command ---------------------------------------------------------------------------------


def make_run(folder: Path, steps=(1, 2, 3), saved=(2,)) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("trainer: {default_local_dir: null}\n")
    for step in steps:
        (folder / "rollouts" / f"step_{step}.jsonl").write_text("")
    for step in saved:
        checkpoint = folder / "checkpoints" / f"global_step_{step}"
        checkpoint.mkdir(parents=True)
        checkpoints.write_manifest(checkpoint)
    return folder


@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        ("nothing", 1, r"config.yaml does not exist. Name the folder of a run"),
        ("run", 9, r"step_9.jsonl does not exist. .* and a step whose episodes it has\."),
        ("run", 3, "explain needs the recipe of the run. Add --config"),
        ("run", 2, r"no complete checkpoint of it. Choose step 1 .*, or train with .*save_freq"),
    ],
)
def test_a_step_that_cannot_be_explained_is_an_error_of_one_line(tmp_path, name, step, message):
    make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=message) as caught:
        command.main([str(tmp_path / name), str(step), *(["--config=math"] if step == 2 else [])])
    assert "\n" not in str(caught.value)


def test_a_step_starts_from_the_checkpoint_before_it(tmp_path):
    folder = make_run(tmp_path / "run")
    path = f"{folder}/checkpoints/global_step_2"
    assert command.find_start(folder, 3)[1] == f"trainer.resume_from_path={path}"
    assert command.find_start(folder, 1) == ["trainer.resume_mode=auto"]


def make_plan(engine: str, changes: list[str]) -> Any:
    recipe = SimpleNamespace(get={"model_engine": engine}.get)
    return SimpleNamespace(recipe=recipe, replay=SimpleNamespace(changes=changes))


def test_another_recipe_is_named_and_megatron_is_refused(capsys):
    command.check_recipe(make_plan("dp", []))
    assert not capsys.readouterr().out
    command.check_recipe(make_plan("dp", ["algorithm.adv_estimator grpo -> rloo"]))
    assert "This is not the recorded step" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"Megatron's \(model_engine\)\. Name a run with FSDP"):
        command.check_recipe(make_plan("megatron", []))


def test_numbers_that_are_not_finite_become_null(tmp_path):
    explanation = Explanation(3, "", groups=[{"norm": math.inf}], importance={"kl": 1.5})
    content = json.loads(command.write(explanation, tmp_path).read_text())
    assert (content["gradient_norm"], content["groups"]) == (None, [{"norm": None}])
    assert content["importance"] == {"kl": 1.5}
