"""The one record that goes through the kit, the one file format that it has, and what episodes are worth.

rollouts/step_<N>.jsonl, rollouts/val_<N>.jsonl, rollouts.jsonl and evaluation.jsonl hold an episode a line, as Gym's
own collector writes it: the row, `response` with its output items (token ids and log-probs on the last item of each
call of the model), `reward` and what else the verifier said, `_ng_task_index` and `_ng_rollout_index`. First in the
line stands `_episode`: what a person looks for, and what only the kit knows (with the row, where a function made it).
A failed episode has a status, and no reward. A replay of the update (--replay) needs nothing else.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

import gym_client
from env import Task
from gym_client import GymError
from kit.errors import ConfigError, RunError

IDS = (
    "prompt_token_ids",
    "generation_token_ids",
    "generation_log_probs",
)  # Gym's, on the last item of a call
KNOWN = (
    "row_id",
    "group_id",
    "server",
    "status",
    "error",
    "ended",
    "baseline",
    "turn_rewards",
    "timings",
)

FAILED_AS_0 = "_failed_as_0"  # ends the name of a score in which a failed episode counts as 0
ABORTED = ("aborted", "abort")  # so say vLLM and SGLang of a request that was ended

Version = tuple[int, int | None]  # so many tokens, sampled from the weights of that step
Versions = list[Version]


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No passes of the garbage collector meanwhile: each goes over all tokens that are there, of a large batch for a
    second, in which nobody gets an answer."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass
class Episode:
    """One conversation about one task. Lists are per response token unless a comment says otherwise."""

    row_id: str  # the task's file:line
    group_id: str  # episodes of one task in one step share it: the group of GRPO
    server: str  # the Gym server that verifies it
    prompt_ids: list[int]  # per prompt token
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(
        default_factory=list
    )  # 1 = sampled by the policy, 0 = observed
    log_probs: list[float] = field(
        default_factory=list
    )  # the sampler's, at the sampling temperature; 0 if observed
    turns: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # per turn: first token, end, end in `output`
    versions: Versions = field(default_factory=list)  # of the sampled tokens, in order
    output: list[dict[str, Any]] = field(
        default_factory=list
    )  # all that was said, as Responses items
    ended: str = ""  # stop | length | turns | terminated | truncated (the environment's own limit)
    reward: float | None = None
    turn_rewards: list[float] = field(
        default_factory=list
    )  # of each turn, where the environment pays turns
    reward_components: dict[str, float] = field(default_factory=dict)
    baseline: float | None = None  # reward of a greedy answer to the same prompt (remax)
    verdict: dict[str, Any] = field(default_factory=dict)  # what else the verifier said
    status: str = "ok"  # or the reason of the failure, as in gym_client
    error: str = ""
    lost: bool = False  # its Gym server went away in the middle
    timings: dict[str, float] = field(
        default_factory=dict
    )  # seconds: generate, tools, verify, verify_call
    row: dict[str, Any] = field(default_factory=dict)  # the task's, verbatim
    place: tuple[int, int] = (-1, -1)  # in its rollouts file: `_ng_task_index`, `_ng_rollout_index`

    @property
    def question(self) -> str:
        """The last thing that the row says to the model, as text; empty where the environment says it."""
        asked = self.row.get("responses_create_params", {}).get("input") or ""
        content = asked if isinstance(asked, str) else asked[-1].get("content") or ""
        return (
            content
            if isinstance(content, str)
            else "".join(part.get("text", "") for part in content)
        )

    @property
    def response(self) -> str:
        """What the policy said last, as text."""
        said = [item for item in self.output if item.get("role") == "assistant"]
        return "".join(part["text"] for part in said[-1]["content"]) if said else ""

    @property
    def transcript(self) -> str:
        """All that was said after the prompt, for people: text, calls, and what came back."""
        parts = []
        for item in self.output:
            if item["type"] == "function_call":
                parts.append(f"{item['name']}({item['arguments']})")
            elif item.get("role") == "assistant":
                parts.append("".join(part["text"] for part in item["content"]))
            elif item["type"] != "reasoning":
                parts.append(f"=> {item.get('output') or item.get('content')}")
        return " ".join(parts)


def append(
    episode: Episode,
    ids: list[int],
    log_probs: list[float] | None = None,
    versions: Sequence[Version] = (),
) -> None:
    """Tokens at the end of the response: sampled with log-probs, observed without."""
    begin = len(episode.response_ids)
    episode.response_ids += ids
    episode.response_mask += [int(log_probs is not None)] * len(ids)
    episode.log_probs += log_probs if log_probs is not None else [0.0] * len(ids)
    episode.versions += versions
    if log_probs is not None:
        episode.turns.append((begin, begin + len(ids), len(episode.output)))


def fill(episode: Episode, output: Sequence[Mapping[str, Any]]) -> None:
    """Fill `episode` from output items of which some carry their token ids (IDS).

    Each call's prompt must begin with all that came before it, id for id: then what is new in it was observed.
    Raises GymError('not_contiguous').
    """
    seen: list[int] = []
    for item in output:
        prompt, ids, log_probs = (list(item.get(key) or []) for key in IDS)
        episode.output.append(
            {key: value for key, value in item.items() if key not in IDS and value is not None}
        )
        if not ids:
            continue
        if not prompt or prompt[: len(seen)] != seen or len(log_probs) != len(ids):
            same = next(
                (i for i, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b),
                len(prompt),
            )
            why = f"call {len(episode.turns) + 1}: {len(prompt)} prompt ids part from the {len(seen)} before at {same}"
            raise GymError("not_contiguous", f"{why}; {len(ids)} ids, {len(log_probs)} log-probs")
        if seen:
            append(episode, prompt[len(seen) :])
        else:
            episode.prompt_ids = prompt
        append(episode, ids, log_probs)
        seen = prompt + ids


# --- as lines of JSON ----------------------------------------------------------------------------


def as_record(episode: Episode, task_index: int, rollout_index: int) -> dict[str, Any]:
    """An episode as a line of a rollouts file. The indices are Gym's: of the row among its files' rows, and of the
    episode among those of the row in this file."""
    text = {"prompt": episode.question, "answer": episode.transcript, "reward": episode.reward}
    lengths = {
        "prompt_tokens": len(episode.prompt_ids),
        "response_tokens": len(episode.response_ids),
    }
    known = {key: getattr(episode, key) for key in (*KNOWN, "versions")}
    output = [dict(item) for item in episode.output]
    for begin, end, last in episode.turns:
        seen, ids = (
            episode.prompt_ids + episode.response_ids[:begin],
            episode.response_ids[begin:end],
        )
        log_probs = np.array(
            episode.log_probs[begin:end], np.float32
        )  # as short in the file as 32 bits allow
        output[last - 1] |= dict(zip(IDS, (seen, ids, log_probs), strict=True))
    wanted = episode.reward_components or "reward_components" in episode.row
    parts = {"reward_components": episode.reward_components} if wanted else {}
    answer = {
        "response": gym_client.response(output),
        "reward": episode.reward,
        **parts,
        **episode.verdict,
    }
    places = {"_ng_task_index": task_index, "_ng_rollout_index": rollout_index}
    ours = {"_episode": {**text, **known, **lengths}}  # first, and whatever the row says
    return ours | without_images(episode.row) | answer | places | ours


def without_images(row: dict[str, Any]) -> dict[str, Any]:
    """A row with a hash in the place of each image that it holds itself: every episode of it is written."""
    params = row.get("responses_create_params") or {}
    said: list[dict[str, Any]] = params["input"] if isinstance(params.get("input"), list) else []

    def cut(part: Any) -> Any:
        held = str(part.get("image_url", "")) if isinstance(part, dict) else ""
        digest = hashlib.sha256(held.encode()).hexdigest()[:16]
        return {**part, "image_url": f"sha256 {digest}"} if held.startswith("data:") else part

    lists = (isinstance(item.get("content"), list) for item in said)
    shorter = [
        {**i, "content": [*map(cut, i["content"])]} if some else i
        for i, some in zip(said, lists, strict=True)
    ]
    return (
        row if shorter == said else {**row, "responses_create_params": {**params, "input": shorter}}
    )


def from_record(record: dict[str, Any], row: dict[str, Any]) -> Episode:
    """What `as_record` wrote, and the task's row -> the episode. Raises KeyError, TypeError for another format."""
    told = {
        "_episode",
        "response",
        "reward",
        "reward_components",
        "_ng_task_index",
        "_ng_rollout_index",
        *row,
    }
    known = {key: record["_episode"][key] for key in KNOWN}
    episode = Episode(prompt_ids=[], reward=record["reward"], row=row, **known)
    episode.reward_components = record.get("reward_components") or {}
    episode.verdict = {key: value for key, value in record.items() if key not in told}
    fill(episode, record["response"]["output"])
    episode.versions = [(count, step) for count, step in record["_episode"].get("versions", ())]
    episode.log_probs = np.array(episode.log_probs, np.float32).tolist()
    return episode


def write(out: IO[bytes], record: dict[str, Any]) -> None:
    """One line of a file that `open_records` opened; half of a surrogate pair, as no UTF-8 has, as JSON's own escape.

    By orjson, in a tenth of json's time, but for what it refuses, as such a half, or makes null of: NaN, infinity.
    """
    sums = [
        float(item[IDS[2]].sum())
        for item in record.get("response", {}).get("output", ())
        if IDS[2] in item
    ]
    try:
        if not math.isfinite(sum(sums, record.get("reward") or 0.0)):
            raise TypeError("not finite")
        line = orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        line = json.dumps(record, ensure_ascii=False, default=short).encode(
            errors="backslashreplace"
        )
    out.write(line + b"\n")


def short(numbers: Any) -> list[float]:
    """An array of 32-bit floats, each as the float with the fewest digits that is it: 0.1, not 0.10000000149."""
    return [float(str(number)) for number in numbers]


def open_records(path: Path, mode: str) -> IO[bytes]:
    """To write records into. mode: w or a."""
    return path.open(f"{mode}b")


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of a rollouts file. Raises ConfigError for a line of another format."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            record = parse(line)
            record["_episode"]["row_id"], record["response"]["output"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            older = "; it is of an older format of the kit's" * (
                b'"tokens"' in line or b"_ng_task_index" in line
            )
            why = f"no episode of a rollouts file ({error!r}){older}"
            raise ConfigError(
                f"{path}:{number}: {why}; give another trainer.experiment_name, or file"
            ) from None
        yield number, record


def parse(line: bytes) -> dict[str, Any]:
    """A line that `write` wrote: by orjson, but for what it refuses (there). Raises ValueError."""
    try:
        return dict(orjson.loads(line))
    except orjson.JSONDecodeError:
        return dict(json.loads(line))


def load_replay(path: Path, tasks: Sequence[Task]) -> list[list[Episode]]:
    """The episodes of a rollouts file by batch of prompts, in the order in which they were sampled.

    Their rows come from the recipe's own files, by row id; those made on the fly from the record. Raises ConfigError.
    """
    rows = {task.row_id: task.row for task in tasks}
    batches: dict[str, list[Episode]] = {}
    if not path.is_file():
        raise ConfigError(f"--replay {path}: no such file; give one of runs/<name>/rollouts")
    for number, record in read_records(path):
        row_id = record["_episode"]["row_id"]
        if not (row := record["_episode"].get("row") or rows.get(row_id)):
            raise ConfigError(
                f"{path}:{number}: env.train_files have no row {row_id}; give the same recipe"
            )
        try:
            episode = from_record(record, row)
        except (KeyError, TypeError, GymError) as error:
            why = f"no episode of rollouts/step_<N>.jsonl ({error!r}); give it as it was written"
            raise ConfigError(f"--replay {path}:{number}: {why}") from None
        batches.setdefault(episode.group_id.rpartition("/")[0], []).append(episode)
    if not batches:
        raise ConfigError(f"--replay {path}: holds no episode; give the file of another step")
    return list(batches.values())


class Recorded:
    """In the place of inference.Servers: episodes that were sampled before, by batch of prompts (load_replay)."""

    asleep = False

    def __init__(self, batches: Sequence[list[Episode]]):
        self.batches = list(batches)

    def rollout(self, *_: Any, **__: Any) -> list[Episode]:
        """The next batch, whatever is asked."""
        return self.batches.pop(0) if self.batches else []

    def sleep(self) -> None:
        """Nobody is awake."""

    def publish(self, step: int) -> None:
        """Nobody samples."""


# --- which of them are trained on ----------------------------------------------------------------


def groups(episodes: Sequence[Any], by: str = "group_id") -> dict[str, list[Any]]:
    """{group id, or what else `by` names: its episodes}, in order of appearance."""
    members = defaultdict(list)
    for episode in episodes:
        members[getattr(episode, by)].append(episode)
    return dict(members)


def keep(
    episodes: Sequence[Any],
    members: int = 2,
    filters: Sequence[Callable[[list[Any]], list[Any]]] = (),
) -> tuple[list[Any], dict[str, int]]:
    """(the episodes that may be trained on: verified, past the filters, in groups of at least `members`; how many each
    filter dropped or masked, by its name).

    verl's group estimators sum rewards without a mask and give a group of one its raw reward as advantage, so a
    failed episode, or a group left with one, must be gone before the advantage. Estimators that compare no answers
    (GAE, REINFORCE++) take groups of one. Where the filters masked every token, nothing is left.
    """
    kept = [e for e in episodes if e.status == "ok"]
    dropped: dict[str, int] = {}
    for function in (list, *filters):
        new = function(kept)
        if function is not list:
            name = getattr(function, "__name__", "filter")
            gone = sum(any(e.response_mask) for e in kept) - sum(any(e.response_mask) for e in new)
            dropped[name] = dropped.get(name, 0) + gone
        kept = [e for group in groups(new).values() if len(group) >= members for e in group]
    return (kept if any(any(e.response_mask) for e in kept) else []), dropped


def first_groups(episodes: Sequence[Any], count: int) -> list[Any]:
    """The episodes of the first `count` groups."""
    return [e for group in list(groups(episodes).values())[:count] for e in group]


def check_failures(episodes: Sequence[Episode], max_failed_frac: float) -> None:
    """Raises RunError when too many episodes failed: what is left is not a sample of the task any more."""
    failed = [e for e in episodes if e.status != "ok"]
    if len(failed) > max_failed_frac * len(episodes):
        reasons = ", ".join(
            f"{count} {status}" for status, count in Counter(e.status for e in failed).most_common()
        )
        why = f"{len(failed)} of {len(episodes)} episodes failed ({reasons}), over gym.{max_failed_frac=:g}"
        raise RunError(
            f"{why}; see failures.jsonl of the run; the first: {failed[0].row_id}: {failed[0].error}"
        )


# --- metrics -------------------------------------------------------------------------------------


def scores(
    episodes: Sequence[Episode], n: int, server: str, prefix: str = "val-core"
) -> dict[str, float]:
    """mean@n of the reward and of acc (a reward of 1 or more), and pass@k for k = 1, 2, 4, ... n: some of k are right.

    Over the verified episodes of one server, of which each row should have n. pass@k is unbiased (Chen et al. 2021,
    arXiv:2107.03374, equation 1); rows with fewer than k episodes do not count for it.
    """
    rewards = [[float(e.reward or 0.0) for e in row] for row in groups(episodes, "row_id").values()]
    flat = [r for row in rewards for r in row]
    metrics = {
        f"{prefix}/{server}/acc/mean@{n}": float(np.mean([r >= 1.0 for r in flat])),
        f"{prefix}/{server}/reward/mean@{n}": float(np.mean(flat)),
    }
    for k in sorted({2**p for p in range(n.bit_length())} | {n}):
        rows = [(len(row), sum(r >= 1.0 for r in row)) for row in rewards if len(row) >= k]
        if rows:
            chances = [1 - math.comb(m - right, k) / math.comb(m, k) for m, right in rows]
            metrics[f"{prefix}/{server}/acc/pass@{k}"] = float(np.mean(chances))
    return metrics


def scores_with_failures(episodes: Sequence[Episode], n: int, server: str) -> dict[str, float]:
    """mean@n of the reward and of acc as in `scores`, but over all episodes: a failed one counts as 0.

    If the wrong answers are those that break the verifier, `scores` is too high, and this is what it should be.
    """
    rewards = [float(e.reward or 0.0) if e.status == "ok" else 0.0 for e in episodes]
    return {
        f"val-aux/{server}/acc/mean@{n}{FAILED_AS_0}": float(np.mean([r >= 1.0 for r in rewards])),
        f"val-aux/{server}/reward/mean@{n}{FAILED_AS_0}": float(np.mean(rewards)),
    }


def warn_of_failures(metrics: Mapping[str, float], say: Callable[[str], None]) -> None:
    """Print a warning for each score of an evaluation that failed episodes change. say: prints a line."""
    for name, lower in metrics.items():
        if not name.endswith(FAILED_AS_0):
            continue
        core = name.replace("val-aux/", "val-core/", 1).removesuffix(FAILED_AS_0)
        if core not in metrics:
            say(f"WARNING     {core}: no answer was verified; see failures.jsonl of the run")
        elif metrics[core] != lower:
            both = f"{core} is {metrics[core]:.3f} over verified answers, {lower:.3f} if a failed one counts as 0"
            say(f"WARNING     {both}; see failures.jsonl of the run")


def validation_metrics(episodes: Sequence[Episode], n: int) -> dict[str, float]:
    """`scores` of n episodes for each row, over verified ones only, by server; and `scores_with_failures`."""
    metrics = {"val-aux/failed_frac": float(np.mean([e.status != "ok" for e in episodes]))}
    for server, mine in sorted(groups(episodes, "server").items()):
        metrics |= scores_with_failures(mine, n, server)
        if ok := [e for e in mine if e.status == "ok"]:
            metrics |= scores(ok, n, server)
            metrics[f"val-aux/{server}/response_length/mean"] = float(
                np.mean([len(e.response_ids) for e in ok])
            )
    return metrics


def rollout_metrics(
    episodes: Sequence[Episode], kept: Sequence[Episode], step: int = 0
) -> dict[str, float]:
    """What verl's metrics do not know: failures by reason, groups not kept, groups whose answers all earn the same, how
    episodes ended, all by server; steps between the weights that sampled a kept token and those that `step` trains."""
    failed = Counter(e.status for e in episodes if e.status != "ok")
    ok = [e for e in episodes if e.status == "ok"]
    gone = len(groups(episodes)) - len(groups(kept))
    uniform = sum(len({e.reward for e in group}) == 1 < len(group) for group in groups(ok).values())
    metrics = {"rollout/episodes": float(len(episodes)), "rollout/kept": float(len(kept))}
    metrics |= {
        "rollout/failed_frac": 1 - len(ok) / len(episodes),
        "rollout/groups_dropped": float(gone),
    }
    metrics["rollout/zero_variance_groups"] = float(uniform)
    metrics |= {f"rollout/failed/{status}": float(count) for status, count in failed.items()}
    if ages := [
        (step - 1 - version, count)
        for e in kept
        for count, version in e.versions
        if version is not None
    ]:
        metrics["rollout/staleness/mean"] = sum(age * count for age, count in ages) / sum(
            count for _, count in ages
        )
        metrics["rollout/staleness/max"] = float(max(age for age, _ in ages))
    if ok:
        ended = Counter(e.ended for e in ok)
        metrics |= {f"rollout/ended/{why}_frac": count / len(ok) for why, count in ended.items()}
        metrics["rollout/turns/mean"] = float(np.mean([len(e.turns) for e in ok]))
        metrics["rollout/reward/mean"] = float(np.mean([e.reward for e in ok]))
    if latency := [e.timings["verify_call"] for e in ok if "verify_call" in e.timings]:
        metrics |= {f"verify/latency_s/p{p}": float(np.percentile(latency, p)) for p in (50, 95)}
    for server, some in sorted(groups(episodes, "server").items()):
        mine = [e for e in some if e.status == "ok"]
        metrics[f"rollout/{server}/failed_frac"] = 1 - len(mine) / len(some)
        if mine:
            metrics[f"reward/{server}/mean"] = float(np.mean([e.reward for e in mine]))
            metrics[f"rollout/{server}/response_length/mean"] = float(
                np.mean([len(e.response_ids) for e in mine])
            )
    return metrics | component_means(ok)


def component_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """The mean of every named part of the reward, by server."""
    parts: dict[str, list[float]] = defaultdict(list)
    for e in episodes:
        for name, value in e.reward_components.items():
            parts[f"reward/{e.server}/{name}/mean"].append(value)
    return {name: float(np.mean(parts[name])) for name in sorted(parts)}


def pass_rates(episodes: Sequence[Episode], before: Mapping[str, float]) -> dict[str, float]:
    """{row id: fraction of its verified episodes with a reward of 1 or more}, halfway from what it was before."""
    rows = groups([e for e in episodes if e.status == "ok"], "row_id")
    rates = {
        row: float(np.mean([(e.reward or 0.0) >= 1.0 for e in some])) for row, some in rows.items()
    }
    return {row: 0.5 * before.get(row, rate) + 0.5 * rate for row, rate in rates.items()}
