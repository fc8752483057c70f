"""Compute the metrics of rollouts, by server, and of evaluations, by test set.

Protects: scores, from episodes that failed, copies of rows, and chance (intervals).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from env import Json
from kit.data.episode import Episode, list_rows
from kit.data.fingerprint import name_problem
from kit.data.reward_scale import are_equal
from kit.data.selection import group_episodes

FAILED_AS_0 = "_failed_as_0"  # suffix of the scores in which a failed episode counts as 0
LOW = "_low95"  # suffixes of the ends of a score's 95% interval
HIGH = "_high95"
ZERO_VARIANCE = "rollout/zero_variance_groups"  # of a step: by the rewards to train on
ALL_TOKENS = "rollout/tokens"  # of a step: all of its episodes, prompts included
Z95 = 1.959964  # the 0.975 quantile of the standard normal distribution


def mean(values: Iterable[float]) -> float:
    """Compute the mean of a list that is not empty, as a Python float."""
    return float(np.mean(list(values)))


def select_verified(episodes: Sequence[Episode]) -> list[Episode]:
    """Select the episodes that did not fail."""
    return [episode for episode in episodes if episode.status == "ok"]


def average(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Compute the mean of each name over the mappings that have it, sorted by name."""
    values: dict[str, list[float]] = defaultdict(list)
    for part in parts:
        for name, value in part.items():
            values[name].append(value)
    return {name: mean(values[name]) for name in sorted(values)}


# --- evaluation -----------------------------------------------------------------------------------


def compute_validation_metrics(episodes: Sequence[Episode], n: int) -> dict[str, float]:
    """Compute the scores of each test set. n: how many episodes each row should have.

    The scores of `compute_scores` use verified episodes only. Those of
    `compute_scores_with_failures` use all.
    """
    metrics = {"val-aux/failed_frac": mean(e.status != "ok" for e in episodes)}
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[name_test_set(episode.row, episode.server)].append(episode)
    for name, members in sorted(groups.items()):
        metrics |= compute_scores_with_failures(members, n, name)
        verified = select_verified(members)
        if verified:
            metrics |= compute_scores(verified, n, name)
            metrics |= compute_measures(verified, f"val-aux/{name}")
            metrics[f"val-aux/{name}/response_length/mean"] = compute_mean_length(verified)
    return metrics


def name_test_set(row: Json, server: str) -> str:
    """Return the name under which a row is scored: verl's data_source, or the server's name.

    A row of Gym names its agent server in `agent_ref`. It is scored under the server's name, even
    if it has a column data_source.
    """
    source = row.get("data_source")
    is_verl_row = isinstance(source, str) and source.strip() and "agent_ref" not in row
    return str(source) if is_verl_row else server


def read_test_set(metric: str) -> str:
    """Return the test set or server in the name of a score. Its name may have slashes.

    >>> read_test_set("val-core/openai/gsm8k/acc/mean@1")
    'openai/gsm8k'
    """
    return metric.partition("/")[2].rsplit("/", 2)[0]


def compute_scores(
    episodes: Sequence[Episode], n: int, name: str, prefix: str = "val-core"
) -> dict[str, float]:
    """Compute mean@n of the reward and of acc (the full reward), and pass@k of acc.

    k is 1, 2, 4, ... n. The episodes are the verified ones of one test set or server, and each row
    should have n of them. pass@k is the chance that at least one of k responses is correct, by the
    unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1). Rows with fewer than k
    episodes do not count for pass@k.
    """
    rewards = []  # (problem, the scores of one row)
    right = []
    for group in group_episodes(episodes, "row_id").values():
        problem = name_problem(group[0].row, group[0].row_id)
        rewards.append((problem, [float(e.reward or 0.0) for e in group]))
        right.append((problem, [float(e.is_right) for e in group]))
    scores = {f"acc/mean@{n}": right, f"reward/mean@{n}": rewards}
    for k in sorted({n, *(2**exponent for exponent in range(n.bit_length()))}):
        rows = [(problem, [compute_pass_at_k(row, k)]) for problem, row in right if len(row) >= k]
        if rows:
            scores[f"acc/pass@{k}"] = rows
    metrics = {}
    other = prefix.replace("val-core", "val-aux")
    for score, rows in scores.items():
        merged: dict[str, list[float]] = defaultdict(list)  # copies of a problem are one row
        for problem, row in rows:
            merged[problem] += row
        metrics[f"{prefix}/{name}/{score}"] = mean(chain(*(row for _, row in rows)))
        for end, value in compute_score_interval(list(merged.values())).items():
            metrics[f"{other}/{name}/{score}{end}"] = value
    return metrics


def compute_score_interval(rows: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the 95% interval of a mean, for other rows of the same kind: {LOW: ..., HIGH: ...}.

    rows: the scores of each row, with those of its copies. They depend on each other, so the rows
    are the unit: the variance is that of a cluster sample (Cochran 1977, equation 11.30).
    """
    count = sum(len(row) for row in rows)
    estimate = sum(chain(*rows)) / count
    sums = [sum(row) - estimate * len(row) for row in rows]
    variance = sum(difference**2 for difference in sums) / count**2
    if min(chain(*rows)) < 0 or max(chain(*rows)) > 1:
        half = Z95 * math.sqrt(variance)
        return {LOW: estimate - half, HIGH: estimate + half}
    low, high = compute_wilson_interval(estimate, variance, len(rows), Z95)
    return {LOW: low, HIGH: high}


def compute_wilson_interval(
    estimate: float, variance: float, rows: int, quantile: float
) -> tuple[float, float]:
    """Return Wilson's interval (1927) of a mean of scores between 0 and 1, which stays there.

    variance: of the estimate. It gives the number of independent right or wrong answers that would
    be as precise. If it is 0, each of the rows counts as one answer, so the interval has a width.
    """
    is_zero = variance < 1e-20  # sums of equal scores such as 0.1 are not exact
    size = float(rows) if is_zero else estimate * (1 - estimate) / variance
    shrink = 1 + quantile**2 / size
    center = (estimate + quantile**2 / (2 * size)) / shrink
    half = math.sqrt(max(estimate * (1 - estimate), 0.0) / size + (quantile / 2 / size) ** 2)
    half *= quantile / shrink
    return max(center - half, 0.0), min(center + half, 1.0)


def describe_score(name: str, scores: Mapping[str, float]) -> str:
    """Return a score with its interval: 0.680 [0.595, 0.754]. name: one of `scores`."""
    return f"{scores[name]:.3f}{describe_interval(name, scores)}"


def describe_interval(name: str, scores: Mapping[str, float]) -> str:
    """Return the interval of a score, with a space before it, or "". name: one of `scores`."""
    ends = name_interval(name)
    low = scores.get(ends[LOW])
    high = scores.get(ends[HIGH])
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def name_interval(name: str) -> dict[str, str]:
    """Return {LOW, HIGH: the metric with this end of a score's interval}."""
    other = name.replace("val-core/", "val-aux/", 1)
    return {LOW: other + LOW, HIGH: other + HIGH}


def compute_pass_at_k(right: Sequence[float], k: int) -> float:
    """Compute the chance that k of these responses, drawn at random, include a correct one.

    right: 1 for each correct response, 0 for the others.
    """
    count = len(right)
    correct = round(sum(right))
    return 1 - math.comb(count - correct, k) / math.comb(count, k)


def compute_scores_with_failures(
    episodes: Sequence[Episode], n: int, name: str
) -> dict[str, float]:
    """Compute mean@n of the reward and of acc over all episodes. A failed one counts as wrong.

    Its reward is then what the verifier pays for a wrong answer, 0 if this is not known. If the
    verifier fails mainly on wrong responses, the scores of `compute_scores` are too high. Then use
    these scores.
    """
    rewards = [float(e.reward or 0.0) if e.status == "ok" else e.scale.nothing for e in episodes]
    return {
        f"val-aux/{name}/acc/mean@{n}{FAILED_AS_0}": mean(e.is_right for e in episodes),
        f"val-aux/{name}/reward/mean@{n}{FAILED_AS_0}": mean(rewards),
    }


def warn_about_failures(metrics: Mapping[str, float], say: Callable[[str], None]) -> None:
    """Print a warning for each score that failed episodes change. say: prints a line."""
    for name, lower in metrics.items():
        score = name.replace("val-aux/", "val-core/", 1).removesuffix(FAILED_AS_0)
        if not name.endswith(FAILED_AS_0) or metrics.get(score) == lower:
            continue
        reason = ": no response was verified."
        if score in metrics:
            reason = f" is {metrics[score]:.3f} over verified responses, {lower:.3f} if a failed "
            reason += "one counts as 0."
        hint = 'See failures.jsonl of the run. See docs/reference.md, "How an episode fails".'
        say(f"WARNING     {score}{reason} {hint}")


# --- rollouts of a training step ------------------------------------------------------------------


def compute_rollout_metrics(
    episodes: Sequence[Episode], kept: Sequence[Episode], step: int = 0
) -> dict[str, float]:
    """Compute the metrics of a step's episodes that verl's own metrics do not have.

    kept: the episodes to train on. step: the training step that uses them.
    """
    verified = select_verified(episodes)
    kept_groups = {episode.group_id for episode in kept}
    dropped = [episode for episode in verified if episode.group_id not in kept_groups]
    groups_dropped = len(group_episodes(episodes)) - len(group_episodes(kept))
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in list_rows(episodes))
    metrics = {
        "rollout/episodes": float(len(episodes)),
        "rollout/kept": float(len(kept)),
        ALL_TOKENS: float(tokens),
        "rollout/failed_frac": 1 - len(verified) / len(episodes),
        "rollout/groups_dropped": float(groups_dropped),
        ZERO_VARIANCE: float(count_zero_variance_groups([*kept, *dropped])),
    }
    failures = Counter(episode.status for episode in episodes if episode.status != "ok")
    metrics |= {f"rollout/failed/{status}": float(count) for status, count in failures.items()}
    metrics |= compute_staleness(kept, step)
    if any(episode.branches for episode in kept):
        metrics["agents/rows_per_episode"] = mean(len(episode.rows) for episode in kept)
    ignored = max((e.measures.get("agent_ignored_fields", 0.0) for e in kept), default=0.0)
    if ignored:
        metrics["agents/ignored_fields"] = ignored
    if verified:
        turns = sum(len(row.turns) for row in list_rows(verified))
        endings = Counter(length=0)  # without a 0, Prometheus would keep the last step's fraction
        endings.update(episode.ended for episode in verified)
        for reason, count in endings.items():
            metrics[f"rollout/ended/{reason}_frac"] = count / len(verified)
        metrics["rollout/turns/mean"] = turns / len(verified)
        items = chain.from_iterable(episode.output for episode in verified)
        calls = sum(item["type"] == "function_call" for item in items)
        metrics["rollout/tool_calls/mean"] = calls / len(verified)
        metrics["rollout/reward/mean"] = mean(e.reward or 0.0 for e in verified)
        metrics |= compute_measures(verified, "rollout")
    latencies = [e.timings["verify_call"] for e in verified if "verify_call" in e.timings]
    for percent in (50, 95) if latencies else ():  # seconds that the verifier took
        metrics[f"verify/latency_s/p{percent}"] = float(np.percentile(latencies, percent))
    for server, server_episodes in sorted(group_episodes(episodes, "server").items()):
        metrics |= compute_server_metrics(server, server_episodes)
    return metrics | compute_component_means(verified)


def compute_mean_length(episodes: Sequence[Episode]) -> float:
    """Compute the mean number of response tokens of an episode, in all of its rows."""
    return sum(len(row.response_ids) for row in list_rows(episodes)) / len(episodes)


def count_zero_variance_groups(episodes: Sequence[Episode]) -> int:
    """Count the groups of two or more episodes whose rewards to train on are all equal."""
    count = 0
    for group in group_episodes(episodes).values():
        rewards = [episode.trained_reward or 0.0 for episode in group]
        count += len(group) > 1 and are_equal(rewards, group[0].scale.spread)
    return count


def compute_staleness(kept: Sequence[Episode], step: int) -> dict[str, float]:
    """Compute the age of tokens in steps: from the weights that sampled them to those they update.

    Example: step 5 updates the weights of step 4, so a token sampled by the weights of step 4 has
    age 0. The mean is over tokens. Tokens of unknown version do not count.
    """
    counts: Counter[int] = Counter()  # {age: tokens}
    for row in list_rows(kept):
        for token_count, version in row.policy_versions:
            if version is not None:
                counts[step - 1 - version] += token_count
    if not counts:
        return {}
    total_age = sum(age * count for age, count in counts.items())
    return {
        "rollout/staleness/mean": total_age / counts.total(),
        "rollout/staleness/max": float(max(counts)),
    }


def compute_server_metrics(server: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute the failures, mean reward and mean length of one server's episodes."""
    verified = select_verified(episodes)
    metrics = {f"rollout/{server}/failed_frac": 1 - len(verified) / len(episodes)}
    if verified:
        metrics[f"reward/{server}/mean"] = mean(e.reward or 0.0 for e in verified)
        metrics[f"rollout/{server}/response_length/mean"] = compute_mean_length(verified)
    return metrics


def compute_component_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute the mean of each reward component, by server."""
    means = {}
    for server, members in sorted(group_episodes(episodes, "server").items()):
        for name, value in average(e.reward_components for e in members).items():
            means[f"reward/{server}/{name}/mean"] = value
    return means


def compute_measures(verified: Sequence[Episode], prefix: str) -> dict[str, float]:
    """Compute the mean of each measure over the episodes that have it."""
    means = average(episode.measures for episode in verified)
    return {f"{prefix}/{name}/mean": value for name, value in means.items()}


def update_pass_rates(episodes: Sequence[Episode], before: Mapping[str, float]) -> dict[str, float]:
    """Compute the pass rate of each row: the mean of its old rate and that of the new episodes.

    A pass is a full reward. A row without an old rate gets the new one. Returns only rows that have
    a verified episode. before: the old rates, by row id.
    """
    pass_rates = {}
    for row_id, episodes_of_row in group_episodes(select_verified(episodes), "row_id").items():
        rate = mean(episode.is_right for episode in episodes_of_row)
        pass_rates[row_id] = 0.5 * before.get(row_id, rate) + 0.5 * rate
    return pass_rates
