# my_task.py
import random
import re


def rows(batch, size, seed, pass_rates, held_out=False):  # the rows of one step
    low, high = (60_000, 100_000) if held_out else (10_000, 60_000)
    numbers = random.Random(f"{seed} {batch}").sample(range(low, high), size)
    return [row(number) for number in numbers]


def row(number):  # `answer` reaches the verifier as `ground_truth`
    prompt = f"What is the last digit of {number}? Answer with the digit."
    return {"responses_create_params": {"input": prompt}, "answer": str(number % 10)}


def compute_score(data_source, solution_str, ground_truth, extra_info):  # verifies a response
    numbers = re.findall(r"[0-9]+", solution_str)
    return float(numbers[-1:] == [ground_truth])  # the reward: 1 if the last number is right
