# my_score.py
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, partial=0.0):
    numbers = re.findall(r"-?[0-9]+", solution_str)
    if numbers[-1:] == [ground_truth]:
        score = 1.0
    elif ground_truth in numbers:
        score = partial
    else:
        score = 0.0
    return {"score": score, "numbers": len(numbers)}
