"""Episodes without training: the `rollout` and `evaluate` commands.

    python algorithm.py --config X rollout     rollout.n episodes of each row of env.train_files, sampled as in
                                               training -> runs/<name>/rollouts.jsonl
    python algorithm.py --config X evaluate    rollout.val_kwargs.n episodes of each row of env.val_files
                                               -> runs/<name>/evaluation.jsonl, mean@k and pass@k by server

One line per verified episode (kit/data/episodes.py). What failed goes to failures.jsonl. The same command again goes on
where it stopped, and tries again what failed.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import env
from kit import later
from kit.data import episodes
from kit.data.episodes import Episode
from kit.errors import ConfigError
from kit.runs.preparation import Data
from kit.runs.run_dir import Run

inference, start = later("inference"), later("kit.runs.launch")

# an episode by its place (of the row among the files' rows, of the episode among those of its row), with its record
Done = dict[tuple[int, int], tuple[Episode, dict[str, Any]]]


def run_command(config: DictConfig, run: Run, data: Data) -> None:
    """Collect what is missing of the episodes, and say what they are worth.

    Raises ConfigError for a file of other rows, RunError when too many episodes failed.
    """
    settings, validate = config.actor_rollout_ref.rollout, run.command == "evaluate"
    tasks, n = (data.validation, settings.val_kwargs.n) if validate else (data.train, settings.n)
    path = run.folder / ("evaluation.jsonl" if validate else "rollouts.jsonl")
    done = read_done(path, tasks)
    missing = [(i, k) for i in range(len(tasks)) for k in range(n) if (i, k) not in done]
    run.say(f"{len(tasks) * n - len(missing)} of {len(tasks) * n} episodes are in {path}")
    with contextlib.ExitStack() as stack:
        _, servers = start.start(run, data, stack)
        count = run.counter(len(missing))
        out = stack.enter_context(episodes.open_records(path, "a"))
        failures = stack.enter_context(episodes.open_records(run.folder / "failures.jsonl", "a"))

        def save(index: int, episode: Episode) -> None:
            record = episodes.as_record(episode, *missing[index])
            if episode.status == "ok":
                done[missing[index]] = episode, light(record)
                episodes.write(out, record)
                out.flush()
            else:
                episodes.write(failures, {"rollout": run.command, **record["_episode"]})
            count(index, episode)

        with run.stage("gen"):
            requests = [(tasks[i], f"{i}/{k}") for i, k in missing]
            fresh = servers.rollout(requests, inference.sampling_params(config, validate), save)
        metrics = run.timings()
        if fresh:
            metrics |= episodes.rollout_metrics(fresh, episodes.keep(fresh, members=1)[0])
        failed = [e for e in fresh if e.status != "ok"]
        for server in sorted({e.server for e in [*failed, *(e for e, _ in done.values())]}):
            mine = [done[place] for place in sorted(done) if done[place][0].server == server]
            found = scores_of(
                [e for e, _ in mine], [e for e in failed if e.server == server], n, validate
            )
            if validate and mine:
                theirs = (
                    servers.loop.run(servers.gym.aggregate(server, [record for _, record in mine]))
                    or {}
                )
                found |= plain_numbers(theirs.get("agent_metrics") or {}, f"val-gym/{server}/")
            for name, value in found.items():
                run.say(f"    {name}: {value:.4g}")
            metrics |= found
        episodes.warn_of_failures(metrics, run.say)
        run.log(0, metrics)
    run.say_examples([e for e, _ in done.values()], 3)
    run.say(f"{len(done)} of {len(tasks) * n} episodes are in {path}")
    episodes.check_failures(fresh, config.gym.max_failed_frac)


def scores_of(
    verified: Sequence[Episode], failed: Sequence[Episode], n: int, validate: bool
) -> dict[str, float]:
    """The scores of one server, which has episodes of at least one kind; of an evaluation also those in which a failed
    episode counts as 0."""
    server = (*verified, *failed)[0].server
    found = (
        episodes.scores(verified, n, server, "val-core" if validate else "rollout")
        if verified
        else {}
    )
    return found | (
        episodes.scores_with_failures([*verified, *failed], n, server) if validate else {}
    )


def light(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the conversation: what /aggregate_metrics gets, as from Gym's own collector."""
    return {
        k: v
        for k, v in record.items()
        if k not in ("_episode", "response", "responses_create_params")
    }


def read_done(path: Path, tasks: Sequence[env.Task]) -> Done:
    """What an earlier run of these rows collected, with light records. Raises ConfigError for a file of other rows."""
    done: Done = {}
    if not path.is_file():
        return done
    whole = path.read_bytes().rpartition(b"\n")[0]
    os.truncate(
        path, len(whole) + 1 if whole else 0
    )  # a line that a kill cut short is collected again
    for _, record in episodes.read_records(path):
        i, k = (record.get(name, -1) for name in ("_ng_task_index", "_ng_rollout_index"))
        asked = record.get("responses_create_params")
        if (
            not 0 <= i < len(tasks)
            or asked != episodes.without_images(tasks[i].row)["responses_create_params"]
        ):
            raise ConfigError(
                f"{path} holds episodes of other rows; give another trainer.experiment_name"
            )
        done[i, k] = episodes.from_record(record, tasks[i].row), light(record)
    return done


def plain_numbers(tree: dict[str, Any], prefix: str) -> dict[str, float]:
    """The finite numbers of a nested mapping, by path."""
    flat: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= plain_numbers(value, f"{prefix}{name}/")
        elif (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ):
            flat[prefix + name] = float(value)
    return flat
