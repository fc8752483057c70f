"""Write the rows of small tasks in configs/tasks (others: reasoning_gym_rows.py and judged.py).

    python configs/tasks/rows.py [--out data] people instructions apples guess increment drawers \
        transfers

The files are NAME_train and NAME_validation, as JSON lines or Parquet, and NAME_warm.jsonl with
answers for a supervised warm-up. No prompt is in two files. But in `guess` the prompt is always the
same: the hidden number differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from configs.tasks.game import NUMBERS, Guess
from env import Json, make_increment, make_row, render_row, write_rows

VALIDATION = 128  # rows
WARM = 64
NAMES = "Anna Ben Carla David Emma Felix Grace Hugo Ida Jack Karen Leo Mia Noah Olga Paul"
CITIES = "Rome Paris Berlin Madrid Oslo Tokyo Lima Cairo Delhi Boston"
TOPICS = "rivers horses bread winter music clouds trees ships coffee books gardens stars"
UNITS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
THINGS = "lamp spoon hat clock ball ring map coin cup key flute pen mirror rope shell watch"
WORDS = "old green quiet fast warm small early deep bright soft"


class Rule(NamedTuple):
    """A rule for the form of a sentence."""

    pattern: str  # a regular expression that matches at the beginning of the sentence
    apply: Callable[[str], str]


RULES = {
    "Use capital letters only.": Rule("(?!.*[a-z])", str.upper),
    "Begin with the word Note and a colon.": Rule("(?=(?i:note): )", "Note: {}".format),
    "End with the word done.": Rule('(?=.* (?i:done)[."]*$)', "{} done".format),
    "Put it into double quotes.": Rule('(?=[^"]*"[^"]+"$)', '"{}"'.format),
}


class Pair(NamedTuple):
    """A row to train on with RL, and one for the command `sft`."""

    row: Json
    chat: Json


def people() -> list[Pair]:
    """Make facts to write as nested JSON. The schema has the right values; the prompt does not."""
    pairs: list[Pair] = []
    for name, city, age in itertools.product(NAMES.split(), CITIES.split(), range(20, 70, 5)):
        person = {"name": name, "age": age}
        schema = json.dumps(make_schema({"city": city, "person": person}))
        prompt = (
            f"{name} is {age} years old and lives in {city}. Write this as a JSON object with the "
            "keys city and person. The person is an object with the keys name and age."
        )
        row = make_row("structured_outputs", prompt, schema_str=schema, schema_type="json")
        answer = json.dumps({"city": city, "person": person})
        pairs.append(Pair(row, {"prompt": prompt, "response": answer}))
    return pairs


def make_schema(value: Any) -> Json:
    """Return a JSON schema for `value`. The server also forbids other keys and missing ones."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: make_schema(value[key]) for key in value}}
    return {"type": "integer" if isinstance(value, int) else "string", "enum": [value]}


def instructions() -> list[Pair]:
    """Make sentences that follow a rule. The verifier sees only the rule and the topic's name."""
    pairs: list[Pair] = []
    for word, topic, text in itertools.product(WORDS.split(), TOPICS.split(), RULES):
        rule = RULES[text]
        prompt = f"Write one sentence about {word} {topic}. {text}"
        pattern = f"^{rule.pattern}.*(?i:{topic})"
        verifier = {"type": "regex", "verify_regex": [pattern], "verify_min_matches": 1}
        row = make_row("format_verification", prompt, verifier=verifier)
        answer = rule.apply(f"I like {word} {topic}.")
        pairs.append(Pair(row, {"prompt": prompt, "response": answer}))
    return pairs


def apples() -> list[Pair]:
    """Make sums as words, in verl's columns. verl's function reads the number after ####."""
    pairs: list[Pair] = []
    for name, a, b in itertools.product(NAMES.split()[:4], range(2, 15), range(2, 15)):
        prompt = (
            f"{name} has {a} apples and gets {b} more. How many apples does {name} have now? "
            "Write the sum, then #### and the number."
        )
        row = {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"index": len(pairs)},
        }
        answer = f"{a} + {b} = {a + b} #### {a + b}"
        pairs.append(Pair(row, {"prompt": prompt, "response": answer}))
    return pairs


def guess() -> list[Pair]:
    """Make hidden numbers for the environment in game.py."""
    prompt = "Guess my number from 1 to 7. Answer only with a number."
    rng = random.Random("guess")
    pairs: list[Pair] = []
    for number in list(NUMBERS) * 80:
        row = {"responses_create_params": {"input": prompt}, "number": number}
        pairs.append(Pair(row, {"messages": play(prompt, number, rng)}))
    return pairs


def play(prompt: str, number: int, rng: random.Random) -> list[Json]:
    """Return the messages of a game in which the guesses ignore the hints."""
    game = Guess()
    game.reset({"number": number})
    messages = []
    observation: str | None = prompt
    while observation is not None:
        answer = str(rng.choice(NUMBERS))
        messages.append({"role": "user", "content": observation})
        messages.append({"role": "assistant", "content": answer})
        observation, _, _ = game.step(answer)
    return messages


def increment() -> list[Pair]:
    """Make numbers to add to a counter with a tool. `env.py counter` has them as digits."""
    pairs: list[Pair] = []
    for number in range(100, 1000):
        row = make_increment(number)
        question = {"role": "user", "content": f"Add {spell(number)} to the counter."}
        row["responses_create_params"]["input"][-1] = question
        messages, tools = render_row(row, "increment")
        function = {"name": "increment_counter", "arguments": {"count": number}}
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        pairs.append(Pair(row, {"messages": [*messages, call], "tools": tools}))
    return pairs


def drawers() -> list[Pair]:
    """Make drawers whose numbers are in words. Only the tool of the agent knows what is in one."""
    rng = random.Random("drawers")
    pairs: list[Pair] = []
    for number in range(100, 1000):
        prompt = f"What is in drawer {spell(number)}?"
        thing = f"a {rng.choice(WORDS.split())} {rng.choice(THINGS.split())}"
        row = {"responses_create_params": {"input": prompt}, "number": number, "thing": thing}
        pairs.append(Pair(row, {"prompt": prompt, "response": thing}))
    return pairs


def transfers() -> list[Pair]:
    """Make amounts, in words, to move to an account with a tool of templates/trl_environment.py."""
    function = {"name": "move", "arguments": '{"amount": 211}'}
    example = [
        {"role": "user", "content": "Move two hundred eleven to the right account."},
        {"type": "function_call", "call_id": "1", **function},
        {"type": "function_call_output", "call_id": "1", "output": "left 789, right 211"},
        {"role": "assistant", "content": "Done."},
    ]
    pairs: list[Pair] = []
    for number in range(100, 1000):
        prompt = f"Move {spell(number)} to the right account."
        question = [*example, {"role": "user", "content": prompt}]
        row = {"responses_create_params": {"input": question}, "left": 1000, "right": 0}
        pairs.append(Pair({**row, "goal": number}, {"prompt": prompt, "response": "Done."}))
    return pairs


def spell(number: int) -> str:
    """Return a number from 100 to 999 in words."""
    units = UNITS.split()
    rest = number % 100
    words = [units[number // 100 - 1], "hundred"]
    if rest >= 20:
        ten = TENS.split()[rest // 10 - 2]
        unit = rest % 10
        words.append(f"{ten}-{units[unit - 1]}" if unit else ten)
    elif rest:
        words.append(units[rest - 1])
    return " ".join(words)


TASKS = {
    task.__name__: task
    for task in (people, instructions, apples, guess, increment, drawers, transfers)
}


def write(path: Path, rows: list[Json]) -> None:
    """Write rows: those with verl's columns as Parquet, others as JSON lines."""
    if "data_source" in rows[0]:
        path = path.with_suffix(".parquet")
        pd.DataFrame(rows).to_parquet(path)
    else:
        write_rows(path, rows)
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=TASKS, metavar="name")
    parser.add_argument("--out", type=Path, default=Path("data"), help="folder (default: data)")
    args = parser.parse_args()
    for name in args.names:
        pairs = TASKS[name]()
        random.Random(name).shuffle(pairs)
        write(args.out / f"{name}_warm.jsonl", [pair.chat for pair in pairs[:WARM]])
        rows = [pair.row for pair in pairs[WARM:]]
        write(args.out / f"{name}_validation.jsonl", rows[:VALIDATION])
        write(args.out / f"{name}_train.jsonl", rows[VALIDATION:])


if __name__ == "__main__":
    main()
