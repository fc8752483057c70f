"""A run's folder as pandas frames: its steps, its episodes, and each token of one. For reports and notebooks."""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from kit.data.episodes import IDS, read_records
from kit.errors import ConfigError

MOST_BYTES = (
    64 * 2**20
)  # of rollouts files that are read, but for the last step's and the last evaluation's: 3 s
MOST_EPISODES = 20_000  # of all files, and a quarter of them of one


class Folder:
    """What a run has left so far. Raises ConfigError where `path` is none of a run.

    Of more than MOST_BYTES of rollouts files, or MOST_EPISODES, those are read that say most: the last step, the last
    and the first evaluation, and of the others every eighth, fourth, second, ...; `left_out` counts the rest.
    """

    def __init__(self, path: Path):
        self.path, self.name = path, path.name
        found = [path / f"{name}.yaml" for name in ("config", "evaluate", "rollout")]
        written = next((file for file in found if file.is_file()), None)
        if written is None:
            raise ConfigError(
                f"{path}: no folder of a run; give one of runs/, which holds config.yaml"
            )
        self.text = written.read_text()
        self.config: dict[str, Any] = yaml.safe_load(self.text)
        self.broken: list[str] = []  # lines and files that could not be read, in words
        self.left_out = 0  # rollouts files

    def setting(self, key: str) -> Any:
        """A key of the recipe; None where it has none."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A row a step, a column a metric (docs/reference.md) and `time` [s]; NaN where a step has no such metric."""
        lines = []
        path = self.path / "metrics.jsonl"
        text = path.read_text(errors="replace") if path.is_file() else ""
        for number, line in enumerate(text.splitlines(), 1):
            try:
                read = {k: np.nan if v is None else v for k, v in json.loads(line).items()}
            except (ValueError, AttributeError):
                self.broken.append(f"metrics.jsonl:{number} is cut short")
                continue
            other = read.pop(
                "command", None
            )  # `evaluate` or `rollout`, in the folder of a run that trained
            if not (other and (self.path / "config.yaml").is_file()):
                lines.append(read)
        frame = pd.DataFrame(lines or [{"step": 0}])
        return frame.groupby("step").last().astype(float)

    @cached_property
    def trained(self) -> pd.DataFrame:
        """Those of `steps` that sampled episodes to train on."""
        return self.steps[self.column("rollout/episodes").notna()]

    def column(self, name: str) -> pd.Series:
        """A metric over the steps; NaN everywhere where there is no such metric."""
        return self.steps.get(name, pd.Series(np.nan, self.steps.index, name=name))

    @cached_property
    def records(self) -> list[tuple[str, int, dict[str, Any]]]:
        """(file, step, record) of the episodes that are read; step -1 of the files that no step has."""
        found: list[tuple[str, int, dict[str, Any]]] = []
        size = 0
        for place, path in enumerate(order := self._by_use()):
            size += path.stat().st_size
            if (size > MOST_BYTES and place > 1) or len(found) >= MOST_EPISODES:
                self.left_out = len(order) - place
                break
            step = path.stem.rpartition("_")[2]
            try:
                for _, record in itertools.islice(read_records(path), MOST_EPISODES // 4):
                    found.append((path.stem, int(step) if step.isdigit() else -1, record))
            except ConfigError as error:  # a line that a kill cut short ends the file
                self.broken.append(str(error).partition("; give another")[0])
        failures = self.path / "failures.jsonl"
        if (
            not any((self.path / "rollouts").glob("*")) and failures.is_file()
        ):  # of `rollout` and `evaluate`
            for line in failures.read_bytes().splitlines():
                try:
                    episode = json.loads(line)
                    found.append(
                        (
                            episode.pop("rollout"),
                            -1,
                            {"_episode": episode, "response": {"output": []}},
                        )
                    )
                except (ValueError, KeyError):
                    self.broken.append("failures.jsonl is cut short")
        return sorted(found[:MOST_EPISODES], key=lambda each: each[1])

    def _by_use(self) -> list[Path]:
        # of later steps than the next, which may have ended the run, a resumed run has set the numbers aside
        last = int(self.steps.index.max()) + 1

        def numbered(kind: str) -> list[Path]:
            files = filter(
                Path.is_file, (self.path / "rollouts").glob(f"{kind}_*.jsonl")
            )  # a FIFO would hang
            found = {int(path.stem[len(kind) + 1 :]): path for path in files}
            return [found[number] for number in sorted(found) if number <= last]

        others = [self.path / f"{name}.jsonl" for name in ("evaluation", "rollouts")]
        steps, evaluations = numbered("step"), numbered("val")
        order = [*steps[-1:], *evaluations[-1:], *filter(Path.is_file, others), *evaluations[:1]]
        order += [path for files in (evaluations, steps) for path in halves(files)]
        return list(dict.fromkeys(order))

    @cached_property
    def episodes(self) -> pd.DataFrame:
        """A row an episode of `records`, in their order; `best`, `worst`: ranks by reward in its file, or NaN."""
        frame = pd.DataFrame(
            [row(file, step, record) for file, step, record in self.records], columns=COLUMNS
        )
        by_file = frame.groupby("file")["reward"]
        frame["best"], frame["worst"] = (
            by_file.rank(ascending=False, method="first"),
            by_file.rank(method="first"),
        )
        return frame

    def advantages(self, step: int) -> dict[tuple[int, int], np.ndarray]:
        """{(task index, rollout index): the advantage of each sampled token, or the one that all have} of a step."""
        path = self.path / "advantages" / f"step_{step}.npz"
        if not path.is_file():
            return {}
        try:
            with np.load(path) as file:
                parts = np.split(file["values"], np.cumsum(file["lengths"])[:-1])
                return dict(zip(map(tuple, file["places"].tolist()), parts, strict=True))
        except (OSError, ValueError, zipfile.BadZipFile) as error:  # cut short by a kill
            self.broken.append(f"{path.name}: {error!r:.80}")
            return {}


COLUMNS = [
    *(
        "file",
        "step",
        "place",
        "row_id",
        "group",
        "server",
        "prompt",
        "answer",
        "reward",
        "parts",
        "status",
        "error",
    ),
    *("ended", "prompt_tokens", "tokens", "turns", "tools", "seconds"),
]


def row(file: str, step: int, record: dict[str, Any]) -> tuple[Any, ...]:
    """An episode's record -> its values of COLUMNS."""
    told, output = record["_episode"], record["response"]["output"]
    place = record.get("_ng_task_index", -1), record.get("_ng_rollout_index", -1)
    turns = sum(bool(item.get(IDS[1])) for item in output)
    tools = sum(item.get("type") == "function_call" for item in output)
    reward = np.nan if told["reward"] is None else told["reward"]
    who = told["row_id"], told["group_id"], told["server"]
    texts, lengths = (
        (utf8(told["prompt"]), utf8(told["answer"])),
        (told["prompt_tokens"], told["response_tokens"]),
    )
    parts, why = (
        record.get("reward_components") or {},
        (told["status"], utf8(told["error"]), told["ended"]),
    )
    return (
        file,
        step,
        place,
        *who,
        *texts,
        reward,
        parts,
        *why,
        *lengths,
        turns,
        tools,
        sum(told["timings"].values()),
    )


def utf8(text: str) -> str:
    """A text with a "?" for half of a surrogate pair, which no frame of pandas takes."""
    return text.encode(errors="replace").decode()


def halves(files: Sequence[Path]) -> Iterator[Path]:
    """All of them, in such an order that the first k are spread evenly: every 8th, every 4th, ..."""
    stride = 1
    while stride < len(files):
        stride *= 2
    while stride:
        yield from files[::stride]
        stride //= 2


def sampled(record: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """(token ids, log-probs) of each call of the model."""
    return [
        (item[IDS[1]], item[IDS[2]]) for item in record["response"]["output"] if item.get(IDS[1])
    ]
