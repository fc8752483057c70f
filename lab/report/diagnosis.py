"""Find the problems of a run from its metrics, its recipe and its episodes.

Each rule takes a run and yields findings: the problem with numbers, the evidence, the next step.
`RULES` lists them so that a cause comes before its effects. The thresholds are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from kit.data.metrics import describe_interval
from kit.data.reward_scale import are_equal
from kit.run.console import count_nouns
from lab.report.metric_docs import find_status
from lab.run_folder import RunFolder, is_accuracy

FAILED_FRAC = 0.02  # of all episodes
TRUNCATED_FRAC = 0.25  # of the responses: a problem if complete ones earn more
NEARLY_ALL = 0.9  # of the responses: a problem in any case, since hardly any are complete
ZERO_VARIANCE_FRAC = 0.7  # of the groups: the others are too small a batch to learn from
SIGMAS = 2.5  # two parts of a run differ if they are this many standard errors apart
ENTROPY_FACTOR = 4.0  # change of the entropy that counts as a collapse if the reward does not rise
LOW_ENTROPY = 0.05  # nats: nearly always the same response
MIN_STEPS = 12  # for a trend
RANGE_SHARE = 0.1  # of the reward range: a smaller change of a mean does not count
PROBS_DIFF = 0.05  # of the two engines' probabilities; rounding to bf16 gives up to 0.02
GROUP_RELATIVE = {  # verl's advantages that are 0 if all rewards of a group are equal
    "grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo",
    "reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline",
}  # fmt: skip
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


class Finding(NamedTuple):
    """A problem of a run: what is wrong, the metrics or files that show it, what to do next."""

    problem: str
    evidence: list[str]
    next_step: str


def find_problems(run: RunFolder) -> list[Finding]:
    """Apply all rules to a run: causes first."""
    findings: list[Finding] = []
    for rule in RULES:
        findings += rule(run)
    return findings


# --- rules ---------------------------------------------------------------------------------------


def find_failures(run: RunFolder) -> Iterator[Finding]:
    """Find failed episodes: how many, for which reasons, in which steps."""
    episodes = run.get_metric("rollout/episodes")
    failed = run.get_metric("rollout/failed_frac") * episodes
    if not episodes.sum() or failed.sum() < FAILED_FRAC * episodes.sum():
        return
    counts = run.steps.filter(like="rollout/failed/").sum().sort_values(ascending=False)
    names = [name.removeprefix("rollout/failed/") for name in counts.index]
    pairs = list(zip(names, counts, strict=True))
    reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in pairs[:4])
    reason = names[0] if names else ""
    steps = run.steps.index[failed > 0]
    status = find_status(reason)
    yield Finding(
        f"{failed.sum() / episodes.sum():.0%} of the episodes failed ({reasons}), in "
        f"{count_nouns(len(steps), 'step')} from {steps[0]} to {steps[-1]}. "
        f"They have no reward and are not trained on. {reason}: {status.cause}.",
        [f"rollout/failed/{reason}", "rollout/*/failed_frac", "failures.jsonl"],
        status.fix,
    )


def find_reward_hacking(run: RunFolder) -> Iterator[Finding]:
    """Find a reward that rises faster than the shadow reward, which is never trained on."""
    gap = get_sampled_metric(run, "rollout/shadow_gap/mean")
    if len(gap) < MIN_STEPS:
        return
    reward = measure_trend(get_sampled_metric(run, "rollout/reward/mean").reindex(gap.index))
    shadow = measure_trend(get_sampled_metric(run, "rollout/shadow_reward/mean"))
    trend = measure_trend(gap)
    growth = trend.last - trend.first
    is_clear = growth > max(SIGMAS * trend.error, RANGE_SHARE * compute_reward_range(run))
    if is_clear and reward.last > reward.first:
        yield Finding(
            f"Reward hacking: the reward rose from {reward.first:.3g} to {reward.last:.3g}, the "
            f"shadow reward went from {shadow.first:.3g} to {shadow.last:.3g}. "
            f"The gap grew from {trend.first:.3g} to {trend.last:.3g}.",
            ["rollout/shadow_gap/mean", "rollout/shadow_reward/mean", "rollout/reward/mean"],
            "read the responses of the last steps with a high reward and a low shadow_reward (in "
            "`measures` of rollouts/), then correct the verifier. Look for further holes with "
            '`python algorithm.py probe`. See docs/guides/probe.md, "A shadow verifier".',
        )


def find_policy_collapse(run: RunFolder) -> Iterator[Finding]:
    """Find a policy that collapsed: a reward that does not rise, and an entropy near 0 or far up.

    If rows get harder, a policy that becomes more certain may only keep its reward.
    """
    entropy = get_sampled_metric(run, "actor/entropy")
    reward = get_sampled_metric(run, "rollout/reward/mean")
    if len(entropy) < 3 or len(reward) < 3:
        return
    first = max(entropy.iloc[0], 1e-6)
    late = take_last_third(entropy).median()
    is_random = late > ENTROPY_FACTOR * first
    is_certain = late < min(LOW_ENTROPY, first / ENTROPY_FACTOR) and not has_curriculum(run)
    trend = measure_trend(reward)
    if has_risen(trend, run) or not (is_random or is_certain):
        return
    meaning = "it writes nearly random text" if is_random else "it repeats the same response"
    yield Finding(
        f"Policy collapse: {meaning}, and its reward does not rise: entropy "
        f"{entropy.iloc[0]:.3g} -> {late:.3g} nats, reward {trend.first:.3g} -> {trend.last:.3g}. "
        "The learning rate is too high, or nothing limits the policy.",
        ["actor/entropy", "rollout/reward/mean", "actor/grad_norm"],
        f"divide {ACTOR}.optim.lr by 10, and start again from the beginning. To continue from an "
        "earlier checkpoint without its optimizer state, set "
        f"{ACTOR}.checkpoint.load_contents=[model]. If the policy collapses again, set "
        f'{ACTOR}.use_kl_loss=true. See docs/guides/diagnosis.md, "5. Entropy".',
    )


def find_truncated_responses(run: RunFolder) -> Iterator[Finding]:
    """Find responses that reach the length limit and earn less than complete ones."""
    truncated = get_sampled_metric(run, "rollout/ended/length_frac", fill=0.0)
    frac = take_last_third(truncated).mean()
    if not frac > TRUNCATED_FRAC:
        return
    episodes = select_trained_episodes(run)
    rewards = episodes.groupby(episodes.ended == "length")["reward"].agg(["mean", "sem"])
    comparison = ""
    earns_less = False
    if len(rewards) == 2:
        of_truncated = rewards["mean"][True]
        of_complete = rewards["mean"][False]
        earns_less = of_complete - of_truncated > SIGMAS * rewards["sem"].max()
        comparison = f" They earn {of_truncated:.3g} on average, complete ones {of_complete:.3g}."
    if frac < NEARLY_ALL and not earns_less:
        return
    limit = run.get_setting("data.max_response_length")
    yield Finding(
        f"{frac:.0%} of the responses are truncated at data.max_response_length={limit}."
        f"{comparison}",
        ["rollout/ended/length_frac", "response_length/mean"],
        f"raise data.max_response_length (now {limit}), ask for shorter responses in the "
        "prompt, or remove truncated ones with a filter (templates/filters.py)",
    )


def find_zero_variance_groups(run: RunFolder) -> Iterator[Finding]:
    """Find groups in which all responses earn the same: no advantage, no gradient."""
    equal = get_sampled_metric(run, "rollout/zero_variance_groups", fill=0.0)
    group_size = run.get_setting(f"{ROLLOUT}.n") or 1
    if not len(equal) or group_size < 2 or not is_group_relative(run):
        return
    steps = run.sampled_steps
    verified = steps["rollout/episodes"] * (1 - steps["rollout/failed_frac"])
    frac = take_last_third((equal / (verified / group_size).clip(lower=1)).clip(upper=1))
    if not frac.mean() > ZERO_VARIANCE_FRAC:
        return
    episodes = select_trained_episodes(run)
    late = episodes[episodes.step >= frac.index[0]]
    groups = late.reward.groupby(late.group).agg(list)
    rewards = groups[groups.map(are_equal)].map(min)  # of each group without variance
    usual = rewards.mode().iloc[0] if len(rewards) else float("nan")
    if episodes.is_right[episodes.reward == usual].any():
        cause = "The task is solved or too easy"
        next_step = "use harder rows, or stop here"
    else:
        cause = "The task is too hard for this policy, or most responses earn the same"
        next_step = (
            "start with easier rows, train on examples first (`--config sft`), reward partial "
            f"progress, or sample more responses per prompt ({ROLLOUT}.n)"
        )
    if not run.get_setting("algorithm.filter_groups.enable"):
        next_step += (
            ". algorithm.filter_groups.enable=true (`--config dapo`) samples more prompts until "
            "the batch is full"
        )
    yield Finding(
        f"In {frac.mean():.0%} of the groups all responses earn the same reward, "
        f"mostly {usual:.3g}: no advantage, nothing to learn. {cause}.",
        ["rollout/zero_variance_groups", "rollout/reward/mean", "actor/entropy"],
        f'{next_step}. See docs/guides/diagnosis.md, "3. A flat reward, and zero-variance groups".',
    )


def find_reward_trend(run: RunFolder) -> Iterator[Finding]:
    """Find a reward that does not rise, without another cause or a curriculum."""
    metric = "critic/rewards/mean" if is_reward_shaped(run) else "rollout/reward/mean"
    reward = get_sampled_metric(run, metric)
    causes = (find_zero_variance_groups, find_policy_collapse)
    has_cause = any(list(rule(run)) for rule in causes)
    if len(reward) < MIN_STEPS or has_cause or has_curriculum(run):
        return
    trend = measure_trend(reward)
    if not has_risen(trend, run):
        yield Finding(
            f"The reward is flat or falls: {trend.first:.3g} at first, {trend.last:.3g} now, over "
            f"{len(reward)} steps",
            [metric, "actor/grad_norm", "actor/lr"],
            f"if it is flat and actor/grad_norm is steady, multiply {ACTOR}.optim.lr by 3; if it "
            "falls, divide it by 3. Read the best and worst responses: does the reward separate "
            'them? See docs/guides/diagnosis.md, "3. A flat reward, and zero-variance groups".',
        )


def find_rollout_mismatch(run: RunFolder) -> Iterator[Finding]:
    """Find a rollout engine whose probabilities differ from the trainer's."""
    diff = take_last_third(get_sampled_metric(run, "training/rollout_probs_diff_mean")).mean()
    if not diff > PROBS_DIFF:
        return
    yield Finding(
        f"Rollout engine and trainer disagree by {diff:.3g} in the probability of a token "
        "(rounding to bf16: below 0.02)",
        ["training/rollout_probs_diff_mean", "rollout_corr/kl"],
        "with trainer.one_step_off or a quantized rollout engine, add "
        "`--config rollout_correction`. Remove rollout.top_k, top_p and repetition_penalty, which "
        "change only the engine's probabilities. Otherwise vLLM does not have the trainer's "
        "weights: report it as a bug (CONTRIBUTING.md). "
        'See docs/guides/diagnosis.md, "7. Rollout engine against trainer".',
    )


RULES: list[Callable[[RunFolder], Iterator[Finding]]] = [
    find_failures,
    find_reward_hacking,
    find_policy_collapse,
    find_truncated_responses,
    find_zero_variance_groups,
    find_reward_trend,
    find_rollout_mismatch,
]


# --- summary -------------------------------------------------------------------------------------


def summarize(run: RunFolder) -> str:
    """Summarize a run in one line: steps, minutes, reward and held-out scores, first to last."""
    steps = run.sampled_steps[run.sampled_steps.index > 0]
    if not len(steps):
        steps = run.steps[run.get_metric("actor/loss").notna()]  # supervised training
    parts = []
    if len(steps):
        total = run.get_setting("trainer.total_training_steps")
        seconds = run.get_metric("time").diff()
        minutes = seconds[seconds <= 20 * seconds.median()].sum() / 60  # no pause before a resume
        count = f"{steps.index[-1]}/{total}" if total else f"{steps.index[-1]}"
        parts.append(f"{count} steps, {minutes:.1f} min training")
    reward = get_sampled_metric(run, "rollout/reward/mean")
    if len(steps) and len(reward):
        last = take_last_third(reward)
        name = "verifier's reward" if is_reward_shaped(run) else "reward"
        digits = 2 if reward.abs().max() < 10 else 3  # a step's reward is noisy
        change = f"{reward.iloc[0]:.{digits}g} -> {last.mean():.{digits}g}"
        parts.append(f"{name} {change} (mean of the last {len(last)})")
    for name in run.steps:
        if is_accuracy(name) or name == "val/loss":
            parts += summarize_score(run, name)
    return "; ".join(parts) or "no steps yet"


def summarize_score(run: RunFolder, name: str) -> list[str]:
    """Summarize a score from its first to its last value; an empty list if there is none."""
    scores = run.steps[name].dropna()
    if not len(scores):
        return []
    last = run.steps.loc[scores.index[-1]].dropna().to_dict()
    change = f"{last[name]:.3g}{describe_interval(name, last)}"
    if len(scores) > 1:
        change = f"{scores.iloc[0]:.3g} -> {change}"
    kind, _, short_name = name.partition("/")
    prefix = "held-out " if kind.startswith("val") else ""
    return [f"{prefix}{short_name} {change}"]


# --- numbers of a run ----------------------------------------------------------------------------


class Trend(NamedTuple):
    """Means of the first and the last third. error: standard error of their difference."""

    first: float
    last: float
    error: float


def measure_trend(values: pd.Series) -> Trend:
    """Measure the trend of a metric. Its noise is that of the differences between neighbors."""
    count = max(1, len(values) // 3)
    noise = float(values.diff().std() / np.sqrt(2)) if len(values) > 3 else 0.0
    first = values.iloc[:count].mean()
    return Trend(first, take_last_third(values).mean(), noise * np.sqrt(2 / count))


def get_sampled_metric(run: RunFolder, name: str, fill: float | None = None) -> pd.Series:
    """Return a metric over the steps that sampled episodes.

    Steps without the metric are dropped, or filled if other steps have it and `fill` is set.
    """
    values = run.get_metric(name).reindex(run.sampled_steps.index)
    if fill is None or values.isna().all():
        return values.dropna()
    return values.fillna(fill)


def select_trained_episodes(run: RunFolder) -> pd.DataFrame:
    """Select the episodes of training steps that did not fail, else those of `rollout`."""
    episodes = run.episodes[run.episodes.status == "ok"]
    trained = episodes[episodes.file.str.startswith("step")]
    if len(trained):
        return trained
    return episodes[episodes.file == "rollouts"].assign(step=0)  # as in metrics.jsonl


def is_reward_shaped(run: RunFolder) -> bool:
    """Return whether the policy is trained on something other than the verifier's reward."""
    keys = (
        "env.reward",
        "reward.reward_model.enable",
        "distillation.enabled",
        "algorithm.use_kl_in_reward",
    )
    return any(run.get_setting(key) for key in keys)


def is_group_relative(run: RunFolder) -> bool:
    """Return whether the advantage only compares the verifier's rewards within a group."""
    estimator = str(run.get_setting("algorithm.adv_estimator") or "grpo")
    return not is_reward_shaped(run) and estimator in GROUP_RELATIVE


def has_curriculum(run: RunFolder) -> bool:
    """Return whether rows may get harder during the run."""
    files = run.get_setting("env.train_files") or []
    has_generator = any(isinstance(file, dict) and "function" in file for file in files)
    return has_generator or bool(run.get_setting("env.sampler"))


def has_risen(reward: Trend, run: RunFolder) -> bool:
    """Return whether a reward is high, or rose by more than its noise or a tenth of its range."""
    enough = min(SIGMAS * reward.error, RANGE_SHARE * compute_reward_range(run))
    gain = reward.last - reward.first
    return bool(gain > max(enough, 1e-9) or reward.last > compute_high_reward(run))


def compute_reward_range(run: RunFolder) -> float:
    """Return the difference between the highest and the lowest reward; 1 without episodes."""
    rewards = run.episodes.reward.dropna()
    return float(rewards.max() - rewards.min()) if len(rewards) else 1.0


def compute_high_reward(run: RunFolder) -> float:
    """Return the reward at which the top tenth of the reward range begins."""
    rewards = run.episodes.reward.dropna()
    return float(rewards.max()) - 0.1 * compute_reward_range(run) if len(rewards) else 0.9


def take_last_third(series: pd.Series) -> pd.Series:
    """Return the last third of the values; at least one."""
    return series.iloc[-max(1, len(series) // 3) :]
