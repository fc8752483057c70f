# my_words.py
import random
import re

THINGS = ["bird", "boat", "book", "cat", "city", "cloud", "dog", "door", "fire", "flower"]
HELD_OUT = ["garden", "hat", "house", "tree"]


def rows(batch, size, seed, pass_rates, held_out=False):
    """Rows for one batch. They depend on the arguments alone."""
    rng = random.Random(f"{seed} {batch}")
    return [row(rng.choice(HELD_OUT if held_out else THINGS)) for _ in range(size)]


def row(thing):
    question = f"Describe a {thing} in at most ten words."
    return {"responses_create_params": {"input": question}, "answer": thing}


def brief_description(data_source, solution_str, ground_truth, extra_info, limit=10):
    """Return 1 for at most `limit` words that name the thing, and less for more words."""
    if not ground_truth:
        raise ValueError("the row has no answer")
    words = re.findall("[a-z']+", solution_str.lower())
    if ground_truth not in words:
        score = 0.0
    elif len(words) <= limit:
        score = 1.0
    else:
        score = 0.5 * limit / len(words)
    return {"score": score, "words": len(words)}
