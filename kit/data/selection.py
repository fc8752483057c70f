"""Select the episodes to train on, group by group.

Protects: advantages, from failed episodes and incomplete groups.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from kit.data.episode import Episode
from kit.data.reward_scale import are_equal
from kit.errors import RunError

Filter = Callable[[list[Episode]], list[Episode]]


def select_trainable(
    episodes: Sequence[Episode],
    min_group_size: int = 2,
    filters: Sequence[Filter] = (),
) -> tuple[list[Episode], dict[str, int]]:
    """Select the verified episodes that pass all filters, in groups of at least `min_group_size`.

    Returns the selected episodes, and how many each filter dropped or masked, by its name. If the
    filters masked every token, no episode is selected.

    verl's group estimators sum rewards without a mask, and the advantage of a group of one is its
    raw reward. So failed episodes and small groups are dropped before the advantage is computed.
    Estimators that do not compare responses (GAE, REINFORCE++) accept groups of one.
    """
    verified = [episode for episode in episodes if episode.status == "ok"]
    selected = drop_small_groups(verified, min_group_size)
    dropped: dict[str, int] = {}
    for function in filters:
        before = count_unmasked(selected)  # the function may mask episodes in place
        passed = function(selected)
        name = getattr(function, "__name__", "filter")
        dropped[name] = dropped.get(name, 0) + before - count_unmasked(passed)
        selected = drop_small_groups(passed, min_group_size)
    if not count_unmasked(selected):
        selected = []
    return selected, dropped


def drop_small_groups(episodes: Sequence[Episode], min_size: int) -> list[Episode]:
    """Drop the episodes whose group has fewer than `min_size`. Those of a group become adjacent."""
    groups = group_episodes(episodes).values()
    return list(chain.from_iterable(group for group in groups if len(group) >= min_size))


def count_unmasked(episodes: Sequence[Episode]) -> int:
    """Count the episodes that have a token to train on."""
    return sum(any(any(row.response_mask) for row in episode.rows) for episode in episodes)


def group_episodes(episodes: Sequence[Episode], by: str = "group_id") -> dict[str, list[Episode]]:
    """Group episodes by one of their attributes, in order of appearance."""
    groups: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        groups[getattr(episode, by)].append(episode)
    return dict(groups)


def has_equal_values(values: Sequence[float]) -> bool:
    """Return whether the values of a group differ at most by rounding errors: no variance."""
    return are_equal(values)


def take_groups(episodes: Sequence[Episode], count: int) -> list[Episode]:
    """Take the episodes of the first `count` groups."""
    groups = list(group_episodes(episodes).values())
    return list(chain.from_iterable(groups[:count]))


def describe_nothing_left(episodes: Sequence[Episode], filtered: Mapping[str, int]) -> str:
    """Describe why no group is left. filtered: {filter: episodes that it dropped or masked}."""
    failed = sum(episode.status != "ok" for episode in episodes)
    reasons = [f"{failed} failed"] if failed else []
    reasons += [f"{count} dropped by {name}" for name, count in filtered.items() if count]
    alone = len(episodes) - failed - sum(filtered.values())
    if alone > 0:
        reasons.append(f"{alone} alone in their groups")
    advice = "Use rows of which the policy solves some."
    if failed * 2 > len(episodes):
        advice = "Correct the verifier."
    return f"of {len(episodes)} responses {', '.join(reasons)}, so the weights stay. {advice}"


def check_failures(episodes: Sequence[Episode], max_failed_frac: float) -> None:
    """Check that few enough episodes failed, so that the others represent the task.

    Raises RunError.
    """
    failed = [episode for episode in episodes if episode.status != "ok"]
    if len(failed) <= max_failed_frac * len(episodes):
        return
    counts = Counter(episode.status for episode in failed)
    reasons = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    raise RunError(
        f"{len(failed)} of {len(episodes)} episodes failed ({reasons}), "
        f"over gym.{max_failed_frac=:g}. See failures.jsonl of the run. The first failure is "
        f"{failed[0].row_id}: {failed[0].error.rstrip('.')}. "
        'See docs/reference.md, "How an episode fails".'
    )
