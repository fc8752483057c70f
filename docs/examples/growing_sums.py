# growing_sums.py
import random


def rows(batch, size, seed, pass_rates, start=9, highest=99):
    """Sums of numbers from 1 to `top`. Each batch that was mostly solved raises `top` by 2."""
    solved = 0
    for rates in pass_rates.values():  # {earlier batch: {row: pass rate}}
        if sum(rates.values()) > len(rates) / 2:
            solved += 1
    top = min(start + 2 * solved, highest)
    rng = random.Random(f"{seed} {batch}")
    return [row(rng.randint(1, top), rng.randint(1, top)) for _ in range(size)]


def row(a, b):
    question = f"Complete the equation: {a} + {b} ="
    messages = [
        {"role": "system", "content": "You are a calculator."},
        {"role": "user", "content": question},
    ]
    return {
        "responses_create_params": {"input": messages},
        "question": question,
        "answer": f"{a} + {b} = {a + b}",
        "metadata": {"source_dataset": "chain_sum"},
    }
