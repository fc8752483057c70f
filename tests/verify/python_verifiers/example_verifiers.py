"""Reward functions and environment classes. The tests of Python verifiers copy them to `my.py`."""

import asyncio
import os
import subprocess
import sys


def compute_score(data_source, solution_str, ground_truth, extra_info):
    print("it prints", solution_str)  # output must not be taken for the result
    return float(ground_truth in solution_str)


async def score_with_details(ground_truth, strict=False, **others):
    await asyncio.sleep(0.01)
    extra_info = others["extra_info"]
    assert extra_info["row"]["answer"] == ground_truth and extra_info["num_turns"] == 2
    return {
        "score": 1 if strict else 0.5,
        "acc": True,
        "length": len(others["solution_str"]),
        "failed": others["solution_str"],  # the kit's own key of a failure
        "who": others["data_source"],
        "odd": {1, 2},
    }


def read_missing_key(data_source, solution_str, ground_truth, extra_info):
    return {}[solution_str]


def raise_error():
    raise ValueError("no such answer")


def loop():
    while True:
        pass


ACTIONS = {
    "raise": raise_error,
    "sys.exit": lambda: sys.exit(0),
    "os._exit": lambda: os._exit(0),
    "loop": loop,
    "memory": lambda: len(bytearray(10 * 2**30)),
    "fine": lambda: 1.0,
}


def run_action(data_source, solution_str, ground_truth, extra_info):
    return ACTIONS[solution_str]()


def count_sevens(solution_str, **_):
    if "?" in solution_str:
        raise ValueError(solution_str)
    return {"score": solution_str.count("7"), "length": len(solution_str)}


class Game:
    """Guess the number in at most `most` turns."""

    def __init__(self, most=5):
        self.most = most
        self.turns = 0

    def reset(self, row):
        self.answer = int(row["answer"])
        return "Guess." if row["question"] == "say 7" else None

    async def step(self, text):
        self.turns += 1
        is_right = text == str(self.answer)
        observation = None if is_right else f"No, {self.turns} of {self.most}."
        return observation, float(is_right), is_right or self.turns == self.most


ADD_UP = "total = 0\nwhile True: total += int(input()); print(total, flush=True)"
CALCULATOR = [sys.executable, "-c", ADD_UP]


class Calculator:
    """A program that adds up what it reads. `close` ends it."""

    def reset(self, row):
        pipe = subprocess.PIPE
        self.program = subprocess.Popen(CALCULATOR, stdin=pipe, stdout=pipe, text=True)

    def step(self, text):
        if text in ACTIONS:
            return ACTIONS[text]()
        print(text, file=self.program.stdin, flush=True)
        return self.program.stdout.readline().strip(), 0.0, False

    def close(self):
        self.program.kill()
        self.program.wait()


class PairStep(Game):
    """Its step returns two values instead of three."""

    def step(self, text):
        return "only", 1.0
