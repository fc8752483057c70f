# test_my_sampler.py
from types import SimpleNamespace

from my_sampler import frontier

TASKS = [SimpleNamespace(row_id=f"r:{k}") for k in range(10)]
PASS_RATES = {f"r:{k}": k / 5 for k in range(6)}  # 0, 0.2, ..., 1; four rows are new


def sample_ids(size, pass_rates):
    return [task.row_id for task in frontier(TASKS, size, 7, 1, pass_rates)]


def test_half_is_new_and_half_is_near_the_target():
    ids = sample_ids(4, PASS_RATES)
    assert not set(ids[:2]) & set(PASS_RATES)
    assert set(ids[2:]) == {"r:2", "r:3"}


def test_a_second_call_returns_the_same():
    assert sample_ids(4, PASS_RATES) == sample_ids(4, PASS_RATES)


def test_the_batch_is_full():
    assert len(sample_ids(4, {})) == 4
    assert len(sample_ids(9, PASS_RATES)) == 9
