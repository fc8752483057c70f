# my_sampler.py
import random


def frontier(tasks, size, batch, seed, pass_rates, target=0.5, fresh=0.5):
    """Rows whose pass rate is nearest to `target`, and a share `fresh` of new rows."""
    rng = random.Random(f"{seed} {batch}")
    shuffled = rng.sample(tasks, len(tasks))  # so that ties are broken at random
    new = [task for task in shuffled if task.row_id not in pass_rates]
    seen = [task for task in shuffled if task.row_id in pass_rates]
    seen.sort(key=lambda task: abs(pass_rates[task.row_id] - target))
    new_count = max(int(size * fresh), size - len(seen))
    return (new[:new_count] + seen + new[new_count:])[:size]
