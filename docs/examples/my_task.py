# my_task.py
import random
import re


def rows(batch, size, seed, pass_rates, held_out=False):  # pass_rates: results of earlier rows
    draw = random.Random(f"{seed} {batch}")
    low, high = (61, 90) if held_out else (2, 60)
    return [row(draw.randint(low, high)) for _ in range(size)]


def row(number):  # the prompt, and the answer for the verifier
    prompt = f"What number comes before {number}? Answer with the number."
    return {"responses_create_params": {"input": prompt}, "answer": str(number - 1)}


def compute_score(data_source, solution_str, ground_truth, extra_info):  # the verifier
    numbers = re.findall(r"[0-9]+", solution_str)
    return float(numbers[-1:] == [ground_truth])  # the reward: 1 if the last number is right
