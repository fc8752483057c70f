# next_number.py
import random
import re


def rows(batch, size, seed, pass_rates, held_out=False):
    """Rows for one batch. They depend on the arguments alone, so a resumed run gets the same."""
    rng = random.Random(f"{seed} {batch}")
    low, high = (61, 90) if held_out else (2, 60)
    return [row(rng.randint(low, high)) for _ in range(size)]


def row(number):
    question = f"What number comes after {number}? Answer with the number."
    return {"responses_create_params": {"input": question}, "answer": str(number + 1)}


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return 1 if the last number of the response is right, else 0. Accepts any text."""
    numbers = re.findall("[0-9]+", solution_str)
    return float(numbers[-1:] == [ground_truth])
