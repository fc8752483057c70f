"""Tasks: NeMo Gym rows in, prompts out. This is the file to edit first.

A Gym row is one JSON object: `responses_create_params` (what the model is asked, in OpenAI Responses
form) and whatever its verifier wants to see again (`answer`, `metadata`, ...). The kit sends the row
back to the server verbatim; only the prompt is made here:

    read_rows(file)  ->  rows with their file and line    -> render(row) -> chat messages and tools
                     ->  load_tasks(...) keeps what fits  -> batch(tasks, step, ...) picks what a step trains on

To add a task, write a function that yields rows (see `arithmetic` below), give it a line in
`GENERATORS`, and run

    python env.py arithmetic --out data/                              # the demo's generated sums
    python env.py gsm8k --source DIR --out data/                      # GSM8K from its original JSONL
    python env.py gsm8k --out data/                                   # the same, from the hub

This file knows no torch and no verl: it can be copied on its own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


class DataError(ValueError):
    """A row that cannot be used; the message names the file and the line."""


@dataclass(frozen=True)
class Task:
    """One row, ready to be answered. `prompt_ids` are what the policy sees: [P] token ids."""

    row_id: str  # file:line, the name of this row in logs, metrics and rollouts
    row: dict[str, Any]  # verbatim: what the Gym server gets back
    server: str  # key of gym.servers that seeds and verifies it
    messages: list[dict[str, Any]]  # the prompt as chat messages
    prompt_ids: list[int]


# --- reading and rendering -----------------------------------------------------------------------


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, row) of a JSONL file, blank lines skipped. Raises DataError."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = json.loads(line, parse_constant=_not_json)
            except ValueError as error:
                raise DataError(f"{where}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: a row is a JSON object, this is a {type(row).__name__}")
            if not isinstance(row.get("responses_create_params"), dict):
                raise DataError(f"{where}: no responses_create_params, so this is not a Gym row")
            yield where, row


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON, and no server would take it back")


def _text(content: Any, where: str) -> str:
    """Message content, a string or a list of text parts -> one string. Raises DataError on the rest."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content}
        if kinds <= {"input_text", "output_text", "text"}:
            return "".join(part["text"] for part in content)
        raise DataError(f"{where}: content parts {sorted(map(str, kinds))}; only text is understood")
    raise DataError(f"{where}: content is {type(content).__name__}, not text")


def render(row: dict[str, Any], where: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A Gym row -> (chat messages, tools) as `tokenizer.apply_chat_template` takes them.

    `input` may be a string or a list of messages; `instructions` and `developer` messages become system
    messages, the form that chat templates know. Raises DataError for what this loop cannot ask.

    >>> render({"responses_create_params": {"input": "2 + 2?", "instructions": "Be brief."}}, "x:1")[0]
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
    """
    params = row["responses_create_params"]
    items = params.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise DataError(f"{where}: responses_create_params.input is empty or neither text nor a list")
    messages = [{"role": "system", "content": params["instructions"]}] if params.get("instructions") else []
    for item in items:
        if not isinstance(item, dict) or item.get("type", "message") != "message" or "role" not in item:
            kind = item.get("type") if isinstance(item, dict) else type(item).__name__
            raise DataError(f"{where}: input item {kind!r}; only messages are understood")
        role = "system" if item["role"] == "developer" else item["role"]
        messages.append({"role": role, "content": _text(item.get("content"), where)})
    if params.get("tools"):
        raise DataError(f"{where}: the row offers tools; this loop answers in one turn")
    return messages, []


def server_of(row: dict[str, Any], servers: Sequence[str], where: str) -> str:
    """The key of gym.servers that this row belongs to: its agent_ref, or the only server there is.

    `agent_ref.name` names an agent (`mcqa_simple_agent`) or the resources server itself (`mcqa`).
    """
    name = (row.get("agent_ref") or {}).get("name")
    for candidate in (name, name.removesuffix("_simple_agent") if name else None):
        if candidate in servers:
            return str(candidate)
    if name is None and len(servers) == 1:
        return servers[0]
    raise DataError(f"{where}: agent_ref {name!r} matches none of gym.servers ({', '.join(servers) or 'empty'})")


def load_tasks(
    files: Sequence[str], tokenizer: Any, servers: Sequence[str], max_prompt_length: int
) -> tuple[list[Task], list[str]]:
    """Read, render and tokenise every row of `files`.

    Returns (tasks, dropped): `dropped` names each row whose prompt is over `max_prompt_length` tokens.
    tokenizer: any with Hugging Face's `apply_chat_template`. Raises DataError for a row that is no Gym row.
    """
    tasks, dropped = [], []
    for path in files:
        for where, row in read_rows(path):
            messages, _ = render(row, where)
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            if len(ids) > max_prompt_length:
                dropped.append(f"{where} ({len(ids)} tokens)")
                continue
            tasks.append(Task(where, row, server_of(row, servers, where), messages, list(ids)))
    return tasks, dropped


def batch(tasks: Sequence[Task], size: int, step: int, seed: int, shuffle: bool = True) -> list[Task]:
    """The `size` tasks of training step `step` (1, 2, ...): epochs in a seeded order, the remainder dropped.

    A function of its arguments alone, so a resumed run reads on where it stopped. Edit it for a
    curriculum: it sees the step and may look at any field of `task.row`.
    """
    per_epoch = len(tasks) // size
    epoch, position = divmod(step - 1, per_epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(tasks)) if shuffle else np.arange(len(tasks))
    return [tasks[i] for i in order[position * size : (position + 1) * size]]


# --- generators: a function that yields rows, and its line in GENERATORS -------------------------


def _row(server: str, prompt: str, system: str = "", **verifier_fields: Any) -> dict[str, Any]:
    """A one-question Gym row for `server`, with the fields that its verifier asks for."""
    messages = [{"role": "system", "content": system}] if system else []
    params = {"input": [*messages, {"role": "user", "content": prompt}]}
    agent = {"type": "responses_api_agents", "name": f"{server}_simple_agent"}
    return {"responses_create_params": params, **verifier_fields, "agent_ref": agent}


def arithmetic(args: argparse.Namespace) -> dict[str, Iterable[dict[str, Any]]]:
    """Sums `a + b` for Gym's reasoning_gym server: {"train": rows, "validation": rows}.

    The server pays 1 for the equation and nothing else, and len(equation) / len(answer) for an answer that
    contains it. No pair of numbers is in both, in either order, so the validation set asks for sums never trained on.
    """
    rng = random.Random(args.seed)
    pairs = [(a, b) for a in range(args.low, args.high + 1) for b in range(a, args.high + 1)]
    rng.shuffle(pairs)
    if args.validation >= len(pairs):
        raise DataError(f"{len(pairs)} different pairs from {args.low} to {args.high}, {args.validation} held out")

    def row(a: int, b: int) -> dict[str, Any]:
        question, answer = f"Complete the equation: {a} + {b} =", f"{a} + {b} = {a + b}"
        fields = {"question": question, "answer": answer, "metadata": {"source_dataset": "chain_sum"}}
        return _row("reasoning_gym", question, system="You are a calculator.", **fields)

    held_out, rest = pairs[: args.validation], pairs[args.validation :]
    train = sorted({(x, y) for a, b in rest for x, y in ((a, b), (b, a))})
    rng.shuffle(train)
    return {"train": [row(a, b) for a, b in train], "validation": [row(a, b) for a, b in held_out]}


def gsm8k(args: argparse.Namespace) -> dict[str, Iterable[dict[str, Any]]]:
    """GSM8K (Cobbe et al. 2021, arXiv:2110.14168) for Gym's math_with_judge server.

    --source: a folder with the original train.jsonl and test.jsonl; without it, `datasets` fetches
    openai/gsm8k from the hub. The reference answer is what follows `####`, without thousands commas.
    """

    def row(entry: dict[str, str]) -> dict[str, Any]:
        question, answer = entry["question"], entry["answer"].rsplit("####", 1)[1].strip().replace(",", "")
        prompt = f"{question} Let's think step by step and put the final answer within \\boxed{{}}."
        return _row("math_with_judge", prompt, question=question, expected_answer=answer)

    def entries(split: str) -> Iterator[dict[str, str]]:
        if args.source:
            path = Path(args.source) / f"{split}.jsonl"
            if not path.is_file():
                raise DataError(f"{path}: no such file; --source is the folder of GSM8K's train.jsonl and test.jsonl")
            yield from (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        else:
            import datasets

            yield from datasets.load_dataset("openai/gsm8k", "main", split=split)

    return {"train": map(row, entries("train")), "validation": map(row, entries("test"))}


GENERATORS = {"arithmetic": arithmetic, "gsm8k": gsm8k}


def main() -> None:
    """Write <out>/<name>_train.jsonl and <out>/<name>_validation.jsonl."""
    parser = argparse.ArgumentParser(description="Write a task's rows in NeMo Gym's format.")
    parser.add_argument("name", choices=GENERATORS)
    parser.add_argument("--out", default="data", help="folder to write to (default: data)")
    parser.add_argument("--seed", type=int, default=0, help="arithmetic: which pairs are held out, and the order")
    parser.add_argument("--low", type=int, default=2, help="arithmetic: smallest number (default: 2)")
    parser.add_argument("--high", type=int, default=29, help="arithmetic: largest number (default: 29)")
    parser.add_argument("--validation", type=int, default=128, help="arithmetic: pairs held out (default: 128)")
    parser.add_argument("--source", help="gsm8k: folder with the original train.jsonl and test.jsonl")
    args = parser.parse_args()
    try:
        for split, rows in GENERATORS[args.name](args).items():
            path = Path(args.out) / f"{args.name}_{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            path.write_text("".join(lines), encoding="utf-8")
            print(f"{path}: {len(lines)} rows")
    except DataError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
