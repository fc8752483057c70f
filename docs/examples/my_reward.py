# my_reward.py
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)  # 1 if it contains, say, "4 + 15 = 19"
