"""The estimate of a run's price, on planted metrics and rollouts with known answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kit import features
from kit.config import resources
from kit.config.load import ACTOR, ROLLOUT, load_config
from kit.config.redaction import redacted
from kit.data.episode import Episode, append_tokens
from kit.data.rollout_files import to_record, write_record
from kit.errors import ConfigError
from kit.extras.run_price import Price, StepCounter, command, estimate, waste
from kit.extras.run_price.estimate import Range, Schedule
from tests.helpers.recipes import row

START = {"step": 0, "timing_s/start": 24.0}
GPU = ["trainer.device=cuda", "trainer.n_gpus_per_node=4", "trainer.nnodes=2"]


def step(number: int, seconds: float, **others: float) -> dict[str, float]:
    """The metrics of a step."""
    named = {name.replace("__", "/"): value for name, value in others.items()}
    tokens = {"perf/total_num_tokens": 1000.0} if "tokens" not in named else {}
    named.pop("tokens", None)
    return {"step": number, "timing_s/step": seconds, "rollout/episodes": 4, **tokens, **named}


def plant(folder: Path, lines: list[dict[str, float]], *changes: str) -> Path:
    """Write a run with these lines of metrics.jsonl."""
    folder.mkdir(parents=True)
    config, _ = load_config(["math_cpu", "cpu"], ["trainer.total_training_steps=20", *changes])
    OmegaConf.save(redacted(config), folder / "config.yaml")
    write_metrics(folder, lines)
    return folder


def write_metrics(folder: Path, lines: list[dict[str, float]]) -> None:
    text = "".join(json.dumps({"time": 1.7e9, **line}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)


def test_the_estimate_adds_steps_evaluations_and_checkpoints(tmp_path):
    """Left: 15 steps, evaluations after 10 and 20, checkpoints after 8, 12, 16 and 20."""
    lines = [START, {"step": 0, "timing_s/testing": 30.0}, step(1, 90)]
    lines += [step(n, 10) for n in (2, 3)]
    lines += [step(4, 14, timing_s__save_checkpoint=4.0), step(5, 10)]
    changes = ["trainer.save_freq=4", "trainer.test_freq=10"]
    folder = plant(tmp_path / "r", lines, *changes, *GPU)
    measured = estimate.measure(folder)
    config = estimate.read_config(folder)
    assert (measured.steps, measured.step.size, measured.warm_up) == (5, 4, 90)
    assert measured.step.typical == Range(10, 10, 10)
    rest = estimate.estimate_rest(measured, estimate.read_schedule(config), 5)
    assert (rest.steps, rest.evaluations, rest.checkpoints) == (15, 2, 4)
    assert rest.seconds == Range(*[15 * 10 + 2 * 30 + 4 * 4] * 3) and rest.missing == ()
    assert rest.tokens == 15_000
    output = "\n".join(command.describe(folder, rate=3600.0))
    assert "so far      2.73 min, 0.364 device-hours on 8 GPUs, money 1312.00" in output
    assert "to the end  3.77 min (3.77 min to 3.77 min), 0.502 device-hours on 8 GPUs" in output
    assert "money 1808.00 (1808.00 to 1808.00)" in output and "15,000 tokens" in output
    assert "24 s to start" in output


def test_the_estimate_takes_the_mean_and_the_step_shows_quartiles(tmp_path):
    seconds = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    lines = [step(n + 1, s) for n, s in enumerate(seconds)]
    measured = estimate.measure_lines(lines, "r")
    assert measured.step.typical == Range(3, 5, 7)  # the first is not slower, so it counts
    assert measured.test is None and measured.save is None
    rest = estimate.estimate_rest(measured, Schedule(19, 5, -1, True, True), 9)
    error = (7.5 * (10 + 10**2 / 9)) ** 0.5  # ten more steps of variance 7.5, a mean of nine
    at_last_pace = 10 * 9
    assert rest.seconds == pytest.approx((50 - 2 * error, 50, at_last_pace))
    assert rest.missing == ("3 evaluations", "1 checkpoint")  # after 10, 15, 19


def test_the_rest_of_most_runs_is_in_the_range():
    """Steps whose times have a long tail, as those of episodes with tools."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        times = rng.lognormal(3, 0.6, 100)
        lines = [step(n + 1, s) for n, s in enumerate(times[:20])]
        rest = estimate.estimate_rest(
            estimate.measure_lines(lines, "r"), Schedule(100, -1, -1, False, False), 20
        )
        inside += rest.seconds.low <= times[20:].sum() <= rest.seconds.high
    assert inside / 300 > 0.85


def test_work_that_was_never_measured_is_named(tmp_path):
    folder = plant(tmp_path / "r", [START, *[step(n, 10) for n in (1, 2, 3)]])
    (line,) = estimate.describe_running(folder, estimate.read_config(folder), "train", 20)
    cores = resources.cores()
    assert line.startswith("price       to step 20: 2.83 min (2.83 min to 2.83 min), ")
    assert f"{170 / 3600 * cores:.3g} CPU hours on {cores} cores, plus" in line
    assert line.endswith("evaluations and 1 checkpoint, not measured yet")


def test_a_resumed_run_counts_each_step_once_and_no_start(tmp_path):
    """It stopped after step 4, and trained steps 3 and 4 again. Both first steps are slow."""
    lines = [START, step(1, 50), *[step(n, 10) for n in (2, 3, 4)]]
    lines += [{"step": 2, "timing_s/start": 26.0}, step(3, 40), *[step(n, 12) for n in (4, 5, 6)]]
    folder = plant(tmp_path / "r", lines)
    measured = estimate.measure(folder)
    assert (measured.steps, measured.step.size, measured.warm_up) == (6, 4, 90)
    assert measured.step.typical.middle == 12 and measured.spent == 50 + 10 + 40 + 3 * 12
    assert measured.start == 50


def test_a_skipped_step_takes_time_and_has_no_tokens(tmp_path):
    lines = [step(n, 10) for n in (1, 2, 3)]
    lines.append(step(4, 6, tokens=0, training__skipped_nonfinite_steps=1))
    measured = estimate.measure_lines(lines, "r")
    assert measured.step.size == 4 and measured.spent == 36
    assert measured.tokens.typical == Range(1000, 1000, 1000) and measured.tokens_per_s == 100


def test_sft_has_its_time_in_the_update(tmp_path):
    lines = [{"step": n, "timing_s/update_actor": 5.0} for n in range(1, 5)]
    lines[1] |= {"timing_s/save_checkpoint": 3.0, "timing_s/testing": 2.0}
    measured = estimate.measure_lines(lines, "r")
    assert measured.step.typical.middle == 5 and measured.spent == 4 * 5 + 3 + 2
    assert measured.tokens is None


def test_an_evaluation_with_two_lines_counts_once():
    testing = {"step": 0, "timing_s/testing": 30.0}
    measured = estimate.measure_lines([testing, START | testing, *map(quick, (1, 2, 3))], "r")
    assert measured.spent == 33


def quick(number: int) -> dict[str, float]:
    return step(number, 1)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_steps_are_one_line(tmp_path, count):
    folder = plant(tmp_path / "r", [START, *map(quick, range(1, count + 1))])
    message = f"has {count} training steps, and an estimate needs 3. Let it"
    with pytest.raises(ConfigError, match=message):
        list(command.describe(folder))


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is no run: it has no metrics.jsonl"):
        command.main([str(tmp_path / "nowhere")])
    folder = plant(tmp_path / "r", [*map(quick, range(1, 6))])
    with pytest.raises(ConfigError, match="--steps 5 is not after step 5"):
        command.main([str(folder), "--steps", "5"])
    for rate in ("-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=r"--rate .* is no price"):
            command.main([str(folder), f"--rate={rate}"])
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"r is no training run: it has no readable config.yaml"):
        features.run_tool("price", [str(folder)])


def test_the_estimate_may_be_for_another_number_of_steps(tmp_path, capsys):
    folder = plant(tmp_path / "r", [*map(quick, range(1, 6))], "env.val_files=[]")
    command.main([str(folder), "--steps", "105"])
    output = capsys.readouterr().out
    assert "step 5 of 105" in output and "to the end  1.67 min" in output
    assert "unused      not known: no rollouts files of steps are left" in output


# --- properties ----------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0.1, 1e4), min_size=3, max_size=30),
    st.integers(1, 200),
    st.integers(-1, 20),
    st.integers(-1, 20),
)
def test_the_rest_of_a_longer_run_takes_longer(seconds, more, test_freq, save_freq):
    lines = [step(n + 1, s, timing_s__save_checkpoint=0.05) for n, s in enumerate(seconds)]
    measured = estimate.measure_lines([START | {"timing_s/testing": 1.0}, *lines], "r")
    done = len(seconds)
    rest, longer = (
        estimate.estimate_rest(measured, Schedule(total, test_freq, save_freq, True, True), done)
        for total in (done + more, done + 2 * more)
    )
    assert longer.seconds.middle > rest.seconds.middle
    for times in (measured.step.typical, rest.seconds):
        assert times.low <= times.middle <= times.high
    assert measured.spent == pytest.approx(sum(seconds) + 1.0)
    assert (
        min(seconds) - 0.06
        <= measured.step.typical.low
        <= measured.step.typical.high
        <= max(seconds)
    )


@given(st.integers(0, 50), st.integers(1, 50), st.integers(-1, 12))
def test_what_is_due_over_two_parts_is_due_over_the_whole(first, second, freq):
    total = first + second
    schedule = Schedule(total, freq, freq, True, False)
    until_first = sum(1 for n in range(1, first + 1) if freq > 0 and n % freq == 0)
    assert schedule.count_due(freq, 0) == until_first + schedule.count_due(freq, first)
    assert schedule.count_due(freq, total) == 0 < schedule.count_due(freq, total - 1)


# --- what nothing was learned from ---------------------------------------------------------------


def write_step(
    folder: Path,
    number: int,
    groups: list[list[float | None]],
    advantages: dict[tuple[int, int], list[float]] | None = None,
) -> None:
    """Write the episodes of a step. groups: the rewards of each; None is a failure.

    An episode has as many tokens as its place in the group, from 1. advantages: of the episodes
    that were trained on, {(group, place): advantages}.
    """
    for name in ("rollouts", "advantages"):
        (folder / name).mkdir(exist_ok=True)
    with (folder / "rollouts" / f"step_{number}.jsonl").open("wb") as out:
        for group, rewards in enumerate(groups):
            for place, reward in enumerate(rewards):
                task_row = row(f"question {group}")
                episode = Episode(f"r:{group}", f"1/{group}", "s", [5], row=task_row, reward=reward)
                append_tokens(episode, [7] * (place + 1), [-0.5] * (place + 1))
                episode.output.append({"type": "message", "content": []})
                turn = episode.turns[0]
                episode.turns[0] = turn._replace(output_end=1)
                if reward is None:
                    episode.status = "timeout"
                write_record(out, to_record(episode, group, place))
    if advantages is not None:
        np.savez(
            folder / "advantages" / f"step_{number}.npz",
            record_index=list(advantages),
            lengths=[len(values) for values in advantages.values()],
            values=np.concatenate(list(advantages.values())),
        )


def test_each_episode_counts_for_the_first_reason_that_holds(tmp_path):
    """Group 0 learns, except one masked; 1 is constant; 2 was dropped, except its failure.

    Group 3 is constant and was dropped, as by dynamic sampling.
    """
    lines = [step(1, 1, rollout__filtered__drop=2.0)]
    folder = plant(tmp_path / "r", lines)
    groups = [[0.0, 1.0, 1.0, 0.5], [1.0, 1.0], [0.0, None, 1.0], [0.0, 0.0]]
    learned = {(0, 0): [-1.0], (0, 1): [1.0, 0.0], (0, 2): [0.0], (0, 3): [-0.2]}
    learned |= {(1, 0): [0.0], (1, 1): [0.0]}
    write_step(folder, 1, groups, learned)
    found = waste.measure_waste(folder)
    assert found.steps == 1 and found.all == (11, 10 + 3 + 6 + 3)
    assert found.by_kind == {
        "failed": (1, 2),
        "skipped step": (0, 0),
        "zero variance": (4, 6),
        "filtered": (2, 1 + 3),
        "masked": (1, 3),
    }


def test_without_filters_a_reward_of_the_mean_is_not_masked(tmp_path):
    folder = plant(tmp_path / "r", [step(1, 1), step(2, 1, rollout__filtered__drop=1.0)])
    for number in (1, 2):
        advantages = {(0, 0): [-1.0], (0, 1): [0.0], (0, 2): [1.0]}
        write_step(folder, number, [[0.0, 0.5, 1.0]], advantages)
    found = waste.measure_waste(folder)
    assert found.steps == 2 and set(found.by_kind.values()) == {(0, 0)}


def test_a_critic_learns_from_groups_with_equal_rewards(tmp_path):
    folder = plant(tmp_path / "r", [step(1, 1)])
    write_step(folder, 1, [[1.0, 1.0]], {(0, 0): [0.3], (0, 1): [0.0, -0.1]})
    assert set(waste.measure_waste(folder).by_kind.values()) == {(0, 0)}


def test_a_skipped_step_taught_nothing(tmp_path):
    folder = plant(tmp_path / "r", [step(1, 1, training__skipped_nonfinite_steps=1)])
    write_step(folder, 1, [[0.0, 1.0, None]])
    by_kind = waste.measure_waste(folder).by_kind
    assert by_kind["skipped step"] == (2, 3) and by_kind["failed"] == (1, 3)


def test_the_newest_steps_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(waste, "MAX_STEPS", 2)
    folder = plant(tmp_path / "r", [*map(quick, range(1, 12))])
    write_step(folder, 9, [[None, None]])
    for number in (10, 11):
        write_step(folder, number, [[0.0, 0.0]], {(0, 0): [0.0], (0, 1): [0.0]})
    output = "\n".join(command.describe(folder))
    assert "of 2 steps:" in output
    assert "            failed           0.0%   0.0%" in output
    assert "            zero variance  100.0% 100.0%" in output


# --- in a run and in a dry run -------------------------------------------------------------------


def test_a_run_prints_one_line_after_its_third_step(tmp_path, capsys):
    folder = plant(tmp_path / "r", [START])
    recipe = SimpleNamespace(verl=estimate.read_config(folder), command="train")
    run: Any = SimpleNamespace(recipe=recipe, folder=folder, last=20)
    counter = StepCounter(run)
    lines = [START, step(1, 60), {"step": 1, "timing_s/testing": 5.0}]
    lines += [step(n, 10) for n in range(2, 7)]
    for count, line in enumerate(lines, 1):
        write_metrics(folder, lines[:count])
        counter.record(int(line["step"]), line)
    printed = capsys.readouterr().out.strip().splitlines()
    assert len(printed) == 1 and printed[0].startswith("price       to step 20: ")


def dry_run(folder: Path, *changes: str) -> list[str]:
    config, _ = load_config(["math_cpu", "cpu"], ["trainer.total_training_steps=20", *changes])
    return estimate.describe_earlier(config, "train", folder)


def test_a_dry_run_finds_an_earlier_run_of_the_same_work(tmp_path):
    lines = [START | {"timing_s/testing": 5.0}, step(1, 60), *[step(n, 10) for n in range(2, 7)]]
    assert dry_run(tmp_path) == []
    plant(tmp_path / "a", lines)
    idle = ["data.seed=9", "trainer.total_training_steps=50", f"{ACTOR}.optim.lr=1e-5"]
    (line,) = dry_run(tmp_path, *idle, f"{ROLLOUT}.temperature=0.7", "trainer.test_freq=3")
    assert f"by 5 steps of {tmp_path / 'a'}" in line
    work = ["data.train_batch_size=16", f"{ROLLOUT}.n=4", "env.val_files=[]"]
    work += [f"{ROLLOUT}.multi_turn.max_assistant_turns=20", "trainer.nnodes=2"]
    work += [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.ppo_max_token_len_per_gpu=9000"]
    for change in work:
        assert dry_run(tmp_path, change) == []
    plant(tmp_path / "mine", [step(n, 70) for n in (1, 2, 3)])
    plant(tmp_path / "new", lines)
    (line,) = dry_run(tmp_path, "trainer.experiment_name=mine")
    assert f"by 3 steps of {tmp_path / 'mine'}" in line
    (line,) = dry_run(tmp_path)
    assert f"by 5 steps of {tmp_path / 'new'}" in line
    plant(tmp_path / "sweep" / "base-seed1", [step(n, 70) for n in (1, 2, 3, 4)])
    (line,) = dry_run(tmp_path, "trainer.experiment_name=sweep/base-seed1")
    assert f"by 4 steps of {tmp_path / 'sweep' / 'base-seed1'}" in line


def test_a_dry_run_estimates_the_whole_run(tmp_path):
    """20 steps of 10 s, and evaluations of 5 s before them, after 10 and after 20."""
    lines = [START | {"timing_s/testing": 5.0}, step(1, 60), *[step(n, 10) for n in range(2, 7)]]
    plant(tmp_path / "a", lines, "trainer.test_freq=10")
    (line,) = dry_run(tmp_path, "trainer.test_freq=10")
    assert line.startswith("price       3.58 min (3.58 min to 3.58 min), ")
    assert "plus 1 checkpoint, not measured yet, by 5 steps" in line


def test_a_folder_that_is_no_run_is_passed_over(tmp_path):
    plant(tmp_path / "two", [step(n, 70) for n in (1, 2)])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("not json\n")
    (tmp_path / "broken").mkdir()
    write_metrics(tmp_path / "broken", [*map(quick, range(1, 5))])
    (tmp_path / "broken" / "config.yaml").write_text("a: [")
    assert dry_run(tmp_path) == []


def test_the_feature_reads_the_folder_of_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [step(n, 10) for n in (1, 2, 3)]
    plant(tmp_path / "runs" / "a", lines)
    recipe: Any = SimpleNamespace(verl=estimate.read_config(tmp_path / "runs" / "a"))
    inputs: Any = None
    (line,) = Price(recipe.verl, "train").dry_run_lines(recipe, inputs)
    assert line.startswith("price ") and "runs/a" in line
