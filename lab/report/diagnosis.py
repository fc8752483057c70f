"""Find the problems of a run from its metrics, its recipe and its episodes.

Each rule takes a run and yields findings: the problem with numbers, the evidence, the next step.
`RULES` lists them so that a cause comes before its effects. The thresholds are constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd

from kit.config.neutral_sampling import find_distortions
from kit.data.metrics import describe_interval
from kit.data.reward_scale import are_equal
from kit.runs.console import count_nouns
from kit.runs.drift import METRIC
from lab.report.metric_docs import find_status
from lab.report.run_data import RunData, is_accuracy

FAILED_FRAC = 0.02  # of all episodes
TRUNCATED_FRAC = 0.25  # of the responses: a problem if complete ones earn more
NEARLY_ALL = 0.9  # of the responses: a problem in any case, since hardly any are complete
ZERO_VARIANCE_FRAC = 0.7  # of the groups: the others are too small a batch to learn from
MANY_UNSOLVED = 0.1  # of the groups without variance: if more earn less, the task is not solved
SIGMAS = 2.5  # two parts of a run differ if they are this many standard errors apart
ENTROPY_FACTOR = 4.0  # change of the entropy that counts as a collapse if the reward does not rise
MIN_GAPS = 9  # steps with a shadow reward
GAP_SHARE = 0.1  # of the reward range: a smaller growth of the gap does not count
PROBS_DIFF = 0.05  # of the two engines' probabilities; rounding to bf16 gives up to 0.02
GROUP_RELATIVE = {  # verl's advantages that are 0 if all rewards of a group are equal
    "grpo", "grpo_passk", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "gdpo",
    "reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline",
}  # fmt: skip
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


class Finding(NamedTuple):
    """A problem of a run.

    problem: what is wrong, with numbers. evidence: metrics or files that show it.
    next_step: what to do next.
    """

    problem: str
    evidence: list[str]
    next_step: str


def find_problems(run: RunData) -> list[Finding]:
    """Apply all rules to a run: causes first."""
    findings: list[Finding] = []
    for rule in RULES:
        findings += rule(run)
    return findings


# --- rules: data and failures --------------------------------------------------------------------


def find_unreadable_files(run: RunData) -> Iterator[Finding]:
    """Find files that a kill left incomplete. A resumed run writes them again."""
    has_data = len(run.steps) + len(run.records) > 0  # this reads the files
    if has_data and run.unreadable:
        yield Finding(
            f"Some data could not be read: {'; '.join(run.unreadable[:3])}",
            run.unreadable[:1],
            "read on: the report shows the rest of the data",
        )


def find_failures(run: RunData) -> Iterator[Finding]:
    """Find failed episodes: how many, for which reasons, on which server, in which steps."""
    episodes = run.get_metric("rollout/episodes")
    failed = run.get_metric("rollout/failed_frac") * episodes
    if not episodes.sum() or failed.sum() < FAILED_FRAC * episodes.sum():
        return
    counts = run.steps.filter(like="rollout/failed/").sum().sort_values(ascending=False)
    names = [name.removeprefix("rollout/failed/") for name in counts.index]
    pairs = list(zip(names, counts, strict=True))
    reasons = ", ".join(f"{count:.0f} {reason}" for reason, count in pairs[:4])
    reason = names[0] if names else ""
    by_server = run.steps.filter(regex="^rollout/[^/]+/failed_frac$").mean()
    server = ""
    if len(by_server) and by_server.max() > 0:
        server = f", most on server {str(by_server.idxmax()).split('/')[1]}"
    failing = list(run.steps.index[failed / episodes > FAILED_FRAC])
    when = f"in {format_steps(failing)}" if failing else "spread over all steps"
    status = find_status(reason)
    yield Finding(
        f"{failed.sum() / episodes.sum():.0%} of the episodes failed ({reasons}){server}, {when}. "
        f"They have no reward and are not trained on. {reason}: {status.cause}.",
        [f"rollout/failed/{reason}", "rollout/*/failed_frac", "failures.jsonl"],
        status.fix,
    )


def find_nonfinite_steps(run: RunData) -> Iterator[Finding]:
    """Find steps that were skipped because a number was not finite."""
    is_nonfinite = run.get_metric("training/skipped_nonfinite_steps") > 0
    steps = list(run.steps.index[is_nonfinite])
    if not steps:
        return
    yield Finding(
        f"{count_nouns(len(steps), 'step')} had non-finite numbers, so the update was skipped: "
        f"{format_steps(steps)}",
        ["training/skipped_nonfinite_steps", "nonfinite/"],
        f"lower {ACTOR}.optim.lr or {ACTOR}.optim.clip_grad. "
        "With half precision, use another precision",
    )


def find_skipped_steps(run: RunData) -> Iterator[Finding]:
    """Find steps that had nothing to train on.

    A step whose advantages are all 0 was not skipped: its groups have no variance.
    """
    names = ("actor/loss", "actor/grad_norm", "critic/advantages/max")
    has_update = pd.concat([run.get_metric(name) for name in names], axis=1).notna().any(axis=1)
    is_known = has_update | (run.get_metric("training/skipped_nonfinite_steps") > 0)
    skipped = [step for step in run.sampled_steps.index if not is_known[step]]
    if skipped and has_update.any():  # otherwise the training engine logs none of these metrics
        yield Finding(
            f"{len(skipped)} of {len(run.sampled_steps)} steps were skipped, "
            f"{format_steps(skipped)}: no group was left to train on",
            ["rollout/groups_dropped", "rollout/filtered/*", "rollout/failed_frac"],
            "find out whether failures, filters or rollout_correction removed the groups",
        )


# --- rules: the policy ---------------------------------------------------------------------------


class Trend(NamedTuple):
    """Reward over a run.

    first, last: means of the first and the last third. best: the highest smoothed value.
    error: standard error of the difference between two thirds.
    """

    first: float
    best: float
    last: float
    error: float


def measure_trend(reward: pd.Series) -> Trend:
    """Measure the trend of a reward."""
    first_third = take_first_third(reward)
    return Trend(
        first=first_third.mean(),
        best=smooth(reward).max(),
        last=take_last_third(reward).mean(),
        error=estimate_noise(reward) * np.sqrt(2 / len(first_third)),
    )


def find_policy_collapse(run: RunData) -> Iterator[Finding]:
    """Find a policy that collapsed: its entropy left its range, or its reward dropped."""
    entropy = get_sampled_metric(run, "actor/entropy")
    reward = get_sampled_metric(run, "rollout/reward/mean")
    if len(entropy) < 3 or len(reward) < 3:
        return
    trend = measure_trend(reward)
    if not is_collapsed(run, entropy, trend):
        return
    gradient = get_sampled_metric(run, "actor/grad_norm")
    norm = f", gradient norm up to {gradient.max():.3g} before clipping" if len(gradient) else ""
    rate = get_number(run, f"{ACTOR}.optim.lr")
    yield Finding(
        f"Policy collapse: entropy {entropy.iloc[0]:.3g} -> "
        f"{take_last_third(entropy).median():.3g} nats, reward {trend.first:.3g} -> "
        f"{trend.last:.3g} (best {trend.best:.3g}){norm}. "
        f"The learning rate ({rate:.3g}) is too high, or nothing limits the policy.",
        ["actor/entropy", "rollout/reward/mean", "actor/grad_norm"],
        f"divide {ACTOR}.optim.lr by 10, and start again from the beginning. To continue from an "
        "earlier checkpoint without its optimizer state, set "
        f"{ACTOR}.checkpoint.load_contents=[model]. If the policy collapses again, set "
        f'{ACTOR}.use_kl_loss=true. See docs/guides/diagnosis.md, "5. Entropy".',
    )


def is_collapsed(run: RunData, entropy: pd.Series, trend: Trend) -> bool:
    """Whether the entropy changed without a gain in reward, the reward dropped, or both.

    An abrupt change of the entropy counts even while the reward rises, unless the reward is high.
    """
    ratio = max(take_last_third(entropy).median(), 1e-6) / max(entropy.iloc[0], 1e-6)
    change = max(ratio, 1 / ratio)
    is_reward_high = trend.last > compute_high_reward(run)
    gains = is_reward_high or trend.last > trend.first + SIGMAS * trend.error
    # If rows get harder, a policy that becomes more certain may only keep its reward.
    is_curriculum = has_curriculum(run)
    if change > ENTROPY_FACTOR and not gains and not (is_curriculum and ratio < 1):
        return True
    lost = trend.best - trend.last > max(0.3 * compute_reward_range(run), SIGMAS * trend.error)
    if change > 2 and lost and not is_curriculum:
        return True
    within_two_steps = np.log(entropy.clip(lower=1e-6)).diff(2)
    is_usual = entropy.shift(2) > entropy.iloc[0] / 2  # changes of low values do not count
    is_abrupt = within_two_steps.where(is_usual).abs().max() > np.log(ENTROPY_FACTOR)
    return bool(is_abrupt) and not is_reward_high


def find_rollout_mismatch(run: RunData) -> Iterator[Finding]:
    """Find a rollout engine whose probabilities differ from the trainer's."""
    diff = take_last_third(get_sampled_metric(run, METRIC)).mean()
    if not diff > PROBS_DIFF:
        return
    distortions = find_distortions(run.get_setting(ROLLOUT) or {})
    next_step = (
        "with trainer.one_step_off or a quantized rollout engine, add "
        "`--config rollout_correction`. Otherwise vLLM does not have the trainer's weights: "
        "report it as a bug (CONTRIBUTING.md)"
    )
    if distortions:
        names = ", ".join(f"rollout.{key}" for key in distortions)
        next_step = (
            f"the recipe sets {names}, with which the rollout engine samples from other "
            "probabilities than the trainer computes: remove that"
        )
    yield Finding(
        f"Rollout engine and trainer disagree by {diff:.3g} in the probability of a token "
        "(rounding to bf16: below 0.02)",
        [METRIC, "rollout_corr/kl"],
        f'{next_step}. See docs/guides/diagnosis.md, "7. Rollout engine against trainer".',
    )


# --- rules: responses and rewards ----------------------------------------------------------------


def find_truncated_responses(run: RunData) -> Iterator[Finding]:
    """Find responses that reach the length limit and earn less than complete ones."""
    truncated = get_sampled_metric(run, "rollout/ended/length_frac", fill=0.0)
    if not len(truncated):
        return
    frac = take_last_third(truncated).mean()
    if frac <= TRUNCATED_FRAC:
        return
    episodes = select_trained_episodes(run)
    is_truncated = episodes.ended == "length"
    rewards = episodes.groupby(is_truncated)["reward"].agg(["mean", "sem"])
    has_both = len(rewards) == 2 and not rewards.isna().any(axis=None)
    comparison = ""
    earns_less = False
    if has_both:
        of_truncated = rewards["mean"][True]
        of_complete = rewards["mean"][False]
        earns_less = of_complete - of_truncated > SIGMAS * rewards["sem"].max()
        comparison = f" They earn {of_truncated:.3g} on average, complete ones {of_complete:.3g}."
    if frac < NEARLY_ALL and not earns_less:
        return
    limit = get_number(run, "data.max_response_length")
    yield Finding(
        f"{frac:.0%} of the responses are truncated at data.max_response_length={limit:g}."
        f"{comparison}",
        ["rollout/ended/length_frac", "response_length/mean"],
        f"raise data.max_response_length (now {limit:g}), ask for shorter responses in the "
        "prompt, or remove truncated ones with a filter (templates/filters.py)",
    )


def find_zero_variance_groups(run: RunData) -> Iterator[Finding]:
    """Find groups in which all responses earn the same: no advantage, no gradient."""
    groups = get_sampled_metric(run, "rollout/zero_variance_groups", fill=0.0)
    group_size = get_number(run, f"{ROLLOUT}.n")
    if not len(groups) or not group_size >= 2 or not is_group_relative(run):
        return
    steps = run.sampled_steps
    verified = steps["rollout/episodes"] * (1 - steps["rollout/failed_frac"])
    frac = (groups / (verified / group_size).clip(lower=1)).clip(upper=1)
    late_frac = take_last_third(frac)
    if not late_frac.mean() > ZERO_VARIANCE_FRAC:
        return
    episodes = select_trained_episodes(run)
    late = episodes[episodes.step >= late_frac.index[0]]
    groups = late.reward.groupby(late.group).agg(list)
    rewards = groups[groups.map(are_equal)].map(min)  # of each group without variance
    usual = rewards.mode().iloc[0] if len(rewards) else float("nan")
    cause, next_step = explain_zero_variance(episodes, rewards, usual)
    if not run.get_setting("algorithm.filter_groups.enable"):
        next_step += (
            ". algorithm.filter_groups.enable=true (`--config dapo`) samples more prompts until "
            "the batch is full"
        )
    yield Finding(
        f"In {late_frac.mean():.0%} of the groups all responses earn the same reward, "
        f"mostly {usual:.3g}: no advantage, nothing to learn. {cause}.",
        ["rollout/zero_variance_groups", "rollout/reward/mean", "actor/entropy"],
        f'{next_step}. See docs/guides/diagnosis.md, "3. A flat reward, and zero-variance groups".',
    )


def explain_zero_variance(
    episodes: pd.DataFrame, rewards: pd.Series, usual: float
) -> tuple[str, str]:
    """Return the cause of groups without variance, and the next step.

    rewards: of these groups; most of them earn `usual`.
    """
    is_solved = episodes.is_right[episodes.reward == usual].any()
    if usual < episodes.reward.max() or not is_solved:
        cause = "The verifier gives most responses the same reward"
        if usual <= episodes.reward.min():
            cause = "The task is too hard for this policy"
        return cause, (
            "start with easier rows, train on examples first (`--config sft`), reward partial "
            f"progress, or sample more responses per prompt ({ROLLOUT}.n)"
        )
    unsolved = (rewards < usual).mean()
    if unsolved > MANY_UNSOLVED:
        cause = (
            f"But in {unsolved:.0%} of these groups all responses earn less: each time, the policy "
            "gives nearly the same response"
        )
        return cause, (
            f"keep the responses different with {ACTOR}.clip_ratio_high=0.28 (DAPO) or "
            f"{ACTOR}.entropy_coeff=0.001, or use rows that the policy sometimes solves"
        )
    return "The task is solved or too easy", "use harder rows, or stop here"


def find_reward_trend(run: RunData) -> Iterator[Finding]:
    """Find a reward that is flat or falls. With a curriculum a fall is not a problem."""
    is_shaped = is_reward_shaped(run)
    metric = "critic/rewards/mean" if is_shaped else "rollout/reward/mean"
    reward = get_sampled_metric(run, metric)
    if len(reward) < 12:
        return
    if has_finding(find_zero_variance_groups, run) or has_finding(find_policy_collapse, run):
        return
    trend = measure_trend(reward)
    error = SIGMAS * max(trend.error, 1e-9)
    change = f"{trend.first:.3g} at first, {trend.last:.3g} now, over {len(reward)} steps"
    if is_shaped:
        change += " (of the reward that is trained on, not the verifier's)"
    rate = get_number(run, f"{ACTOR}.optim.lr")
    hint = (
        "Read the best and worst responses: does the reward separate them? "
        'See docs/guides/diagnosis.md, "3. A flat reward, and zero-variance groups".'
    )
    if trend.last < trend.first - error and not has_curriculum(run):
        yield Finding(
            f"The reward falls: {change}",
            [metric, "actor/entropy", "response_length/mean"],
            f"lower {ACTOR}.optim.lr (now {rate:.3g}). {hint}",
        )
    elif abs(trend.last - trend.first) < error and trend.last < compute_high_reward(run):
        yield Finding(
            f"The reward is flat: {change}",
            [metric, "actor/grad_norm", "actor/lr"],
            f"if actor/grad_norm is steady, multiply {ACTOR}.optim.lr (now {rate:.3g}) by 3. "
            f"{hint}",
        )


def find_reward_hacking(run: RunData) -> Iterator[Finding]:
    """Find a reward that rises faster than the shadow reward, which is never trained on."""
    gap = get_sampled_metric(run, "rollout/shadow_gap/mean")
    reward = get_sampled_metric(run, "rollout/reward/mean").reindex(gap.index)
    shadow = get_sampled_metric(run, "rollout/shadow_reward/mean").reindex(gap.index)
    if len(gap) < MIN_GAPS:
        return
    trend = measure_trend(gap)
    growth = trend.last - trend.first
    is_clear = growth > max(SIGMAS * trend.error, GAP_SHARE * compute_reward_range(run))
    if not is_clear or take_last_third(reward).mean() <= take_first_third(reward).mean():
        return
    yield Finding(
        f"Reward hacking: the reward rose from {take_first_third(reward).mean():.3g} to "
        f"{take_last_third(reward).mean():.3g}, the shadow reward went from "
        f"{take_first_third(shadow).mean():.3g} to {take_last_third(shadow).mean():.3g}. "
        f"The gap grew from {trend.first:.3g} to {trend.last:.3g}.",
        ["rollout/shadow_gap/mean", "rollout/shadow_reward/mean", "rollout/reward/mean"],
        "read the responses of the last steps with a high reward and a low shadow_reward (in "
        "`measures` of rollouts/), then correct the verifier. Look for further holes with "
        '`python algorithm.py probe`. See docs/guides/probe.md, "A shadow verifier".',
    )


RULES: list[Callable[[RunData], Iterator[Finding]]] = [
    find_unreadable_files,
    find_failures,
    find_nonfinite_steps,
    find_skipped_steps,
    find_reward_hacking,
    find_policy_collapse,
    find_truncated_responses,
    find_zero_variance_groups,
    find_reward_trend,
    find_rollout_mismatch,
]


def has_finding(rule: Callable[[RunData], Iterator[Finding]], run: RunData) -> bool:
    """Whether a rule finds a problem."""
    return next(rule(run), None) is not None


# --- summary -------------------------------------------------------------------------------------


def summarize(run: RunData) -> str:
    """Summarize a run in one line: steps, minutes, reward and held-out scores, first to last."""
    steps = run.sampled_steps[run.sampled_steps.index > 0]
    if not len(steps):
        steps = run.steps[run.get_metric("actor/loss").notna()]  # supervised training
    parts = []
    if len(steps):
        seconds = run.get_metric("time").diff()
        minutes = seconds[seconds <= 20 * seconds.median()].sum() / 60  # no pause before a resume
        parts.append(f"{count_steps(run, steps)}, {minutes:.1f} min training")
        reward = get_sampled_metric(run, "rollout/reward/mean")
        if len(reward):
            last = take_last_third(reward)
            change = f"{format_reward(reward.iloc[0])} -> {format_reward(last.mean())}"
            name = "verifier's reward" if is_reward_shaped(run) else "reward"
            parts.append(f"{name} {change} (mean of the last {len(last)})")
    for name in run.steps:
        if is_accuracy(name) or name == "val/loss":
            parts += summarize_score(run, name)
    return "; ".join(parts) or "no steps yet"


def count_steps(run: RunData, steps: pd.DataFrame) -> str:
    """Format the number of steps: "5/20 steps", and how many of them are recorded if not all."""
    last = steps.index[-1]
    total = run.get_setting("trainer.total_training_steps")
    text = f"{last}/{total} steps" if total else f"{last} steps"
    if len(steps) < last:
        text += f" ({len(steps)} recorded)"
    return text


def summarize_score(run: RunData, name: str) -> list[str]:
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


def format_reward(value: float) -> str:
    """Format a reward: a step's reward is too noisy for more than two digits."""
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.3g}"


# --- numbers of a run ----------------------------------------------------------------------------


def get_sampled_metric(run: RunData, name: str, fill: float | None = None) -> pd.Series:
    """Return a metric over the steps that sampled episodes.

    Steps without the metric are dropped, or filled if other steps have it and `fill` is set.
    """
    values = run.get_metric(name).reindex(run.sampled_steps.index)
    if fill is None or values.isna().all():
        return values.dropna()
    return values.fillna(fill)


def get_number(run: RunData, key: str) -> float:
    """Return a number of the recipe; NaN if the key is missing or not a number."""
    value = run.get_setting(key)
    return float(value) if isinstance(value, (int, float)) else float("nan")


def select_trained_episodes(run: RunData) -> pd.DataFrame:
    """Select the episodes of training steps that did not fail."""
    episodes = run.episodes
    return episodes[(episodes.status == "ok") & episodes.file.str.startswith("step")]


def is_reward_shaped(run: RunData) -> bool:
    """Whether the policy is trained on something other than the verifier's reward."""
    keys = (
        "env.reward",
        "reward.reward_model.enable",
        "distillation.enabled",
        "algorithm.use_kl_in_reward",
    )
    return any(run.get_setting(key) for key in keys)


def is_group_relative(run: RunData) -> bool:
    """Whether the advantage only compares the verifier rewards of one prompt's responses."""
    estimator = str(run.get_setting("algorithm.adv_estimator") or "grpo")
    return not is_reward_shaped(run) and estimator in GROUP_RELATIVE


def has_curriculum(run: RunData) -> bool:
    """Whether rows may get harder during the run."""
    files = run.get_setting("env.train_files") or []
    has_generator = any(isinstance(file, dict) and "function" in file for file in files)
    return has_generator or bool(run.get_setting("env.sampler"))


def compute_reward_range(run: RunData) -> float:
    """Return the difference between the highest and the lowest reward; 1 without episodes."""
    rewards = run.episodes.reward.dropna()
    return float(rewards.max() - rewards.min()) if len(rewards) else 1.0


def compute_high_reward(run: RunData) -> float:
    """Return the reward at which the top tenth of the reward range begins."""
    rewards = run.episodes.reward.dropna()
    return float(rewards.max()) - 0.1 * compute_reward_range(run) if len(rewards) else 0.9


def take_first_third(series: pd.Series) -> pd.Series:
    """Return the first third of the values; at least one."""
    return series.iloc[: max(1, len(series) // 3)]


def take_last_third(series: pd.Series) -> pd.Series:
    """Return the last third of the values; at least one."""
    return series.iloc[-max(1, len(series) // 3) :]


def smooth(series: pd.Series) -> pd.Series:
    """Return the mean of each value and its two neighbors."""
    return series.rolling(3, min_periods=1, center=True).mean()


def estimate_noise(series: pd.Series) -> float:
    """Estimate the standard deviation of one value from the differences between neighbors.

    A trend hardly changes these differences.
    """
    if len(series) < 2:
        return float("inf")
    if len(series) <= 3:
        return 0.0
    return float(series.diff().std() / np.sqrt(2))


def format_steps(steps: list[int]) -> str:
    """Format a sorted list of steps: [1, 2, 3, 7] -> "steps 1 to 3, 7"."""
    ranges: list[list[int]] = []  # [first, last]
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    parts = [f"{first} to {last}" if first < last else f"{first}" for first, last in ranges[:4]]
    if len(ranges) > 4:
        parts.append("more")
    noun = "step" if len(steps) == 1 else "steps"
    return f"{noun} {', '.join(parts)}"
