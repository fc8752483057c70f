# my_task.py
import random
import re


def rows(batch, size, seed, pass_rates):  # one batch; pass_rates: of the earlier rows
    draw = random.Random(f"{seed} {batch}")
    low = 51 if batch == 0 else 10  # batch 0: the held-out rows
    return [row(draw.randint(low, low + 40), draw.randint(1, 9)) for _ in range(size)]


def row(a, b):  # the prompt, and the answer for the verifier
    prompt = f"Complete the equation: {a} - {b} ="
    return {"responses_create_params": {"input": prompt}, "answer": str(a - b)}


def compute_score(data_source, solution_str, ground_truth, extra_info):  # the verifier
    numbers = re.findall(r"-?[0-9]+", solution_str)
    return float(numbers[-1:] == [ground_truth])  # the reward: 1 if the last number is right
