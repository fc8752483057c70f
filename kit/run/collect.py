"""Episodes without training: the commands `rollout` and `evaluate`.

    rollout     rollout.n episodes of each row of env.train_files -> runs/<name>/rollouts.jsonl
    evaluate    rollout.val_kwargs.n of each row of env.val_files -> runs/<name>/evaluation.jsonl

If you rerun the same command, it samples only the episodes that are missing or failed. It must then
have the same model, template, sampling settings and verifier, by their content.
rollouts.settings.json and evaluation.settings.json hold those of the first run.

Protects: scores, from episodes of another policy, verifier or row in one file.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import env
from env import Json
from kit.data import metrics as episode_metrics
from kit.data import rollout_files
from kit.data.episode import Episode, RecordIndex
from kit.data.fingerprint import Fingerprint, hash_row
from kit.data.selection import check_failures, group_episodes, select_trainable
from kit.engine.inputs import RunInputs
from kit.engine.sampling import EpisodeRequest, build_sampling_params, request_group
from kit.errors import ConfigError
from kit.recipe.keys import ROLLOUT, is_below
from kit.recipe.recipe import Recipe
from kit.run import identity
from kit.run.console import print_examples, say
from kit.run.run import Run

if TYPE_CHECKING:
    from inference import Servers

PRINTED_EXAMPLES = 3  # best and worst episodes
MAX_SERVER_SCORES = 1000  # of one server's metrics: each name is kept for the whole run
# large fields of a record, which Gym's /aggregate_metrics does not get
LARGE_FIELDS = ("_episode", rollout_files.BRANCHES, "response", "responses_create_params")


class Collected(NamedTuple):
    """A verified episode, and its record without LARGE_FIELDS."""

    episode: Episode
    record: Json

    @classmethod
    def of(cls, episode: Episode, record: Json) -> Collected:
        """Keep what Gym's /aggregate_metrics gets of a record."""
        kept = {name: value for name, value in record.items() if name not in LARGE_FIELDS}
        return cls(episode, kept)


class Collector:
    """Samples the episodes that a file does not hold yet.

    validate: True for `evaluate`, False for `rollout`.
    """

    def __init__(self, recipe: Recipe, run: Run, inputs: RunInputs[env.Task], validate: bool):
        rollout = recipe.rollout
        self.recipe = recipe
        self.run = run
        self.validate = validate
        self.tasks = inputs.validation if validate else inputs.train
        self.n = rollout.val_kwargs.n if validate else rollout.n
        name = "evaluation" if validate else "rollouts"
        self.path = run.folder / f"{name}.jsonl"
        self.done = read_collected(self.path, self.tasks)
        settings = describe_settings(recipe, run.files.fingerprint, validate)
        check_settings(self.path, settings, bool(self.done))
        pairs = itertools.product(range(len(self.tasks)), range(self.n))
        indices = itertools.starmap(RecordIndex, pairs)
        self.missing = [index for index in indices if index not in self.done]

    def report_count(self) -> None:
        """Print how many episodes the file holds."""
        say(f"{len(self.done)} of {len(self.tasks) * self.n} episodes are in {self.path}")

    def sample(self, servers: Servers) -> list[Episode]:
        """Sample the missing episodes, and write each when it ends."""
        on_done = self.run.stages.count_episodes(len(self.missing))
        requests: list[EpisodeRequest] = []
        for row, indices in itertools.groupby(self.missing, lambda index: index.task):
            group = request_group(self.tasks[row], f"{self.recipe.command}/{row}", self.n)
            requests += [group[index.rollout] for index in indices]
        sampling = build_sampling_params(self.recipe, self.validate)
        failures_path = self.run.folder / "failures.jsonl"
        with self.path.open("ab") as out, failures_path.open("ab") as failures:

            def save(number: int, episode: Episode) -> None:
                index = self.missing[number]
                record = rollout_files.to_record(episode, *index)
                if episode.status == "ok":
                    self.done[index] = Collected.of(episode, record)
                    rollout_files.write_record(out, record)
                    out.flush()
                else:
                    summary = {"rollout": self.recipe.command, **record["_episode"]}
                    rollout_files.write_record(failures, summary)
                on_done(number, episode)

            with self.run.stage("gen"):
                return servers.rollout(requests, sampling, save)

    def score(self, servers: Servers, failed: Sequence[Episode]) -> dict[str, float]:
        """Compute the scores of each test set and of each server, and print them."""
        collected = [self.done[index] for index in sorted(self.done)]
        verified = [item.episode for item in collected]
        scores: dict[str, float] = {}
        if self.validate:
            scores |= episode_metrics.compute_validation_metrics([*verified, *failed], self.n)
        for server, episodes in sorted(group_episodes(verified, "server").items()):
            if self.validate:
                scores |= self.aggregate(servers, server, collected)
            else:
                scores |= episode_metrics.compute_scores(episodes, self.n, server, "rollout")
        for name in scores:
            if not name.endswith((episode_metrics.LOW, episode_metrics.HIGH)):
                say(f"    {name}: {episode_metrics.describe_score(name, scores)}")
        return scores

    def aggregate(
        self, servers: Servers, server: str, collected: Sequence[Collected]
    ) -> dict[str, float]:
        """Return the scores that a Gym server computes from its episodes."""
        records = [item.record for item in collected if item.episode.server == server]
        aggregated = servers.loop.run(servers.gym.aggregate(server, records)) or {}
        agent_metrics = aggregated.get("agent_metrics") or {}
        numbers = flatten_numbers(agent_metrics, f"val-gym/{server}/")
        return dict(itertools.islice(numbers.items(), MAX_SERVER_SCORES))


def run_command(recipe: Recipe, run: Run, inputs: RunInputs[env.Task]) -> None:
    """Collect the missing episodes and print their scores.

    Raises ConfigError if the file holds episodes of other rows or of another policy, and RunError
    if too many episodes failed.
    """
    from kit.run import launch

    collector = Collector(recipe, run, inputs, validate=recipe.command == "evaluate")
    collector.report_count()
    with contextlib.ExitStack() as stack:
        servers = launch.start(run, inputs, stack).servers
        assert servers
        episodes = collector.sample(servers)
        metrics = run.stages.timings()
        if episodes:
            kept, _ = select_trainable(episodes, 1)
            metrics |= episode_metrics.compute_rollout_metrics(episodes, kept)
        failed = [episode for episode in episodes if episode.status != "ok"]
        metrics |= collector.score(servers, failed)
        episode_metrics.warn_about_failures(metrics, say)
        run.log.write(0, metrics)
    for output in run.features.outputs:
        for line in output.describe_episodes([item.episode for item in collector.done.values()]):
            say(line)
    print_examples([item.episode for item in collector.done.values()], PRINTED_EXAMPLES)
    collector.report_count()
    check_failures(episodes, recipe.gym.max_failed_frac)


def read_collected(path: Path, tasks: Sequence[env.Task]) -> dict[RecordIndex, Collected]:
    """Read the episodes that an earlier run collected, whose rows may have moved in their files.

    Raises ConfigError for other rows.
    """
    collected: dict[RecordIndex, Collected] = {}
    if not path.is_file():
        return collected
    copies: defaultdict[str, list[int]] = defaultdict(list)  # {digest of a row: its indices}
    for number, task in enumerate(tasks):
        copies[hash_row(task.row)].append(number)
    rows: dict[tuple[str, int], int] = {}  # {digest and index of a row in the file: its index now}
    for _, record in rollout_files.read_records(path):
        place = (record["_episode"].get("content", ""), record.get("_ng_task_index", -1))
        if place not in rows:
            if not copies[place[0]]:
                raise ConfigError(
                    f"{path} holds episodes of other rows: {record['_episode']['row_id']} is not "
                    "among the present ones with this content. Set another "
                    "trainer.experiment_name."
                )
            rows[place] = copies[place[0]].pop(0)
        task = tasks[rows[place]]
        index = RecordIndex(rows[place], record.get("_ng_rollout_index", -1))
        record["_ng_task_index"] = index.task
        episode = rollout_files.from_record(record, task.row)
        episode.row_id = task.row_id
        collected[index] = Collected.of(episode, record)
    return collected


def describe_settings(recipe: Recipe, run: Fingerprint, validate: bool) -> Fingerprint:
    """Return what all episodes of a file share. run: the fingerprint of the run."""
    section = f"{ROLLOUT}.val_kwargs" if validate else ROLLOUT
    sampling = build_sampling_params(recipe, validate)

    def is_shared(key: str) -> bool:
        return is_below(key, *identity.POLICY_KEYS) or identity.verifies(key)

    settings = run.select(is_shared)
    values = {f"{section}.{name}": value for name, value in sampling.items()}
    return replace(settings, values=settings.values | values)


def check_settings(path: Path, settings: Fingerprint, has_episodes: bool) -> None:
    """Check that the episodes of `path` have these settings, or record them for new episodes.

    Raises ConfigError.
    """
    settings_path = path.with_suffix(".settings.json")
    if has_episodes and settings_path.is_file():
        changes = settings.list_changes(identity.read_fingerprint(settings_path))
        for key, change in sorted(changes.items()):
            problem = "holds episodes of another policy"
            if identity.verifies(key):
                problem = "holds rewards of another verifier"
            raise ConfigError(
                f"{path} {problem}: {change}. Set another trainer.experiment_name, "
                f"or delete {path}."
            )
    identity.write_fingerprint(settings_path, settings)


def flatten_numbers(tree: Json, prefix: str) -> dict[str, float]:
    """Return the finite numbers of a nested mapping, by path."""
    numbers: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            numbers |= flatten_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[prefix + name] = float(value)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
