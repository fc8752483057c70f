"""Episodes without training, and what episodes are worth: the `rollout` and `evaluate` commands, and metrics.

    python algorithm.py --config X rollout     rollout.n episodes of each row of env.train_files, sampled as in
                                               training -> runs/<name>/rollouts.jsonl
    python algorithm.py --config X evaluate    rollout.val_kwargs.n episodes of each row of env.val_files
                                               -> runs/<name>/evaluation.jsonl, mean@k and pass@k by server

One line per verified episode, as Gym's own collector writes it: the row, `response` with its output items
(token ids and log-probs on the last item of each model call), `reward` and what else the verifier said,
`_ng_task_index` and `_ng_rollout_index`. What failed goes to failures.jsonl. The same command again goes on
where it stopped, and tries again what failed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

import env
import inference
import pieces
from config import ConfigError, Data, RunError
from episodes import Episode, as_gym_record


def run_command(command: str, config: DictConfig, run: Any, data: Data) -> None:
    """Collect what is missing of the episodes, and for `evaluate` say what they are worth.

    Raises ConfigError for a file of other rows, RunError when too many episodes failed.
    """
    settings, validate = config.actor_rollout_ref.rollout, command == "evaluate"
    tasks, n = (data.validation, settings.val_kwargs.n) if validate else (data.train, settings.n)
    path = run.folder / ("evaluation.jsonl" if validate else "rollouts.jsonl")
    records = read_records(path, tasks)
    missing = [(i, k) for i in range(len(tasks)) for k in range(n) if (i, k) not in records]
    run.say(f"{len(tasks) * n - len(missing)} of {len(tasks) * n} episodes are in {path}")
    with contextlib.ExitStack() as stack:
        loop, gym, policy, *_ = run.start(stack, data)
        policy.sampling, count = inference.sampling_params(config, validate), run.counter(len(missing))
        out = stack.enter_context(path.open("a", encoding="utf-8"))
        failures = stack.enter_context((run.folder / "failures.jsonl").open("a", encoding="utf-8"))

        def write(index: int, episode: Episode) -> None:
            place = dict(zip(("_ng_task_index", "_ng_rollout_index"), missing[index], strict=True))
            if episode.status == "ok":
                record = as_gym_record(episode, tasks[missing[index][0]], place)
                records[missing[index]] = light(record)
                out.write(json.dumps(record, ensure_ascii=False) + "\n")
                out.flush()
            else:
                line = {"rollout": command, **place, "row_id": episode.row_id}
                line |= {"status": episode.status, "error": episode.error}
                failures.write(json.dumps(line, ensure_ascii=False) + "\n")
            count(index, episode)

        with run.stage("gen"):
            requests = [(tasks[i], f"{i}/{k}") for i, k in missing]
            episodes = loop.run(inference.rollout(requests, policy, gym, write))
        metrics = {f"timing_s/{stage}": seconds for stage, seconds in run.timing.items()}
        if episodes:
            metrics |= rollout_metrics(episodes, pieces.keep(episodes, members=1))
        for server in sorted({tasks[i].server for i, _ in records}):
            mine = {key: records[key] for key in sorted(records) if tasks[key[0]].server == server}
            found = scores(mine, n, server)
            if validate:
                theirs = loop.run(gym.aggregate(server, list(mine.values()))) or {}
                found |= plain_numbers(theirs.get("agent_metrics") or {}, f"val-gym/{server}/")
            for name, value in found.items():
                run.say(f"    {name}: {value:.4g}")
            metrics |= found
        run.log(0, metrics)
    run.say(f"{len(records)} of {len(tasks) * n} episodes are in {path}")
    check_failures(episodes, config.gym.max_failed_frac)


def light(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the conversation: what /aggregate_metrics gets, as from Gym's own collector."""
    return {key: value for key, value in record.items() if key not in ("response", "responses_create_params")}


def read_records(path: Path, tasks: Sequence[env.Task]) -> dict[tuple[int, int], dict[str, Any]]:
    """{(task index, rollout index): light record} of an earlier run of these rows. Raises ConfigError for others."""
    records: dict[tuple[int, int], dict[str, Any]] = {}
    if not path.is_file():
        return records
    whole = path.read_bytes().rpartition(b"\n")[0]
    os.truncate(path, len(whole) + 1 if whole else 0)  # a line that a kill cut short is collected again
    for line in whole.splitlines():
        record = json.loads(line)
        i, k = record["_ng_task_index"], record["_ng_rollout_index"]
        if i >= len(tasks) or record["responses_create_params"] != tasks[i].row["responses_create_params"]:
            raise ConfigError(f"{path} holds episodes of other rows; give another trainer.experiment_name")
        records[i, k] = light(record)
    return records


def check_failures(episodes: Sequence[Episode], max_failed_frac: float) -> None:
    """Raises RunError when too many episodes failed: what is left is not a sample of the task any more."""
    failed = [e for e in episodes if e.status != "ok"]
    if len(failed) > max_failed_frac * len(episodes):
        reasons = ", ".join(f"{count} {status}" for status, count in Counter(e.status for e in failed).most_common())
        raise RunError(
            f"{len(failed)} of {len(episodes)} episodes failed ({reasons}), over gym.max_failed_frac="
            f"{max_failed_frac:g}; see failures.jsonl of the run; the first: {failed[0].row_id}: {failed[0].error}"
        )


# --- metrics -------------------------------------------------------------------------------------


def scores(records: dict[tuple[int, int], dict[str, Any]], n: int, server: str) -> dict[str, float]:
    """mean@n of the reward and, for k = 1, 2, 4, ... n, pass@k: some of k episodes earns 1 or more.

    pass@k is unbiased over the episodes that a row has (Chen et al. 2021, arXiv:2107.03374, equation 1); rows
    with fewer than k verified episodes do not count for it.
    """
    rewards: dict[int, list[float]] = defaultdict(list)
    for (i, _), record in records.items():
        rewards[i].append(record["reward"])
    metrics = {f"val-core/{server}/reward/mean@{n}": float(np.mean([r for row in rewards.values() for r in row]))}
    for k in sorted({2**p for p in range(n.bit_length()) if 2**p <= n} | {n}):
        rows = [(len(row), sum(r >= 1.0 for r in row)) for row in rewards.values() if len(row) >= k]
        if rows:
            chances = [1 - math.comb(m - right, k) / math.comb(m, k) for m, right in rows]
            metrics[f"val-core/{server}/acc/pass@{k}"] = float(np.mean(chances))
    return metrics


def plain_numbers(tree: dict[str, Any], prefix: str) -> dict[str, float]:
    """The finite numbers of a nested mapping, by path."""
    flat: dict[str, float] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= plain_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            flat[prefix + name] = float(value)
    return flat


def rollout_metrics(episodes: Sequence[Episode], kept: Sequence[Episode]) -> dict[str, float]:
    """What verl's metrics do not know: failures by reason, groups not kept, how episodes ended, all by server."""
    failed = Counter(e.status for e in episodes if e.status != "ok")
    ok = [e for e in episodes if e.status == "ok"]
    groups = len({e.group_id for e in episodes}) - len({e.group_id for e in kept})
    metrics = {"rollout/failed_frac": 1 - len(ok) / len(episodes), "rollout/groups_dropped": float(groups)}
    metrics |= {f"rollout/failed/{status}": float(count) for status, count in failed.items()}
    if ok:
        ended = Counter(e.ended for e in ok)
        metrics |= {f"rollout/ended/{why}_frac": count / len(ok) for why, count in ended.items()}
        metrics["rollout/turns/mean"] = float(np.mean([len(e.turns) for e in ok]))
    latency = [e.timings["verify_call"] for e in ok if "verify_call" in e.timings]
    if latency:
        metrics |= {f"verify/latency_s/p{p}": float(np.percentile(latency, p)) for p in (50, 95)}
    for server in sorted({e.server for e in episodes}):
        mine = [e for e in ok if e.server == server]
        total = sum(e.server == server for e in episodes)
        metrics[f"rollout/{server}/failed_frac"] = 1 - len(mine) / total
        if mine:
            metrics[f"reward/{server}/mean"] = float(np.mean([e.reward for e in mine]))
            metrics[f"rollout/{server}/response_length/mean"] = float(np.mean([len(e.response_ids) for e in mine]))
        for part in sorted({name for e in mine for name in e.reward_components}):
            values = [e.reward_components[part] for e in mine if part in e.reward_components]
            metrics[f"reward/{server}/{part}/mean"] = float(np.mean(values))
    return metrics


def pass_rates(episodes: Sequence[Episode], before: dict[str, float]) -> dict[str, float]:
    """{row id: fraction of its verified episodes with a reward of 1 or more}, halfway from what it was before."""
    results: dict[str, list[float]] = defaultdict(list)
    for e in episodes:
        if e.status == "ok":
            results[e.row_id].append(float((e.reward or 0.0) >= 1.0))
    return {row: 0.5 * before.get(row, float(np.mean(r))) + 0.5 * float(np.mean(r)) for row, r in results.items()}


def validation_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over verified episodes only, by server: the reward, and acc, the fraction with a reward of 1 or more."""
    per_row = Counter(e.row_id for e in episodes).most_common(1)[0][1]
    metrics = {"val-aux/failed_frac": float(np.mean([e.status != "ok" for e in episodes]))}
    for server in sorted({e.server for e in episodes}):
        ok = [e for e in episodes if e.server == server and e.status == "ok"]
        if ok:
            metrics[f"val-core/{server}/acc/mean@{per_row}"] = float(np.mean([(e.reward or 0.0) >= 1.0 for e in ok]))
            metrics[f"val-core/{server}/reward/mean@{per_row}"] = float(np.mean([e.reward for e in ok]))
            metrics[f"val-aux/{server}/response_length/mean"] = float(np.mean([len(e.response_ids) for e in ok]))
    return metrics
