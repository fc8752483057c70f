# my_trl.py
def accuracy(completions, answer, **columns):  # your TRL reward functions, unchanged
    pairs = zip(completions, answer, strict=True)
    return [float(c[0]["content"].strip().endswith(a)) for c, a in pairs]


def brief(completions, **columns):
    return [float(len(c[0]["content"]) < 20) for c in completions]


WEIGHTS = {accuracy: 1.0, brief: 0.1}  # TRL's reward_funcs and reward_weights


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Call TRL's functions with a batch of one completion, and add up their rewards."""
    row = dict(extra_info["row"])
    prompt = row.pop("responses_create_params")["input"]
    completion = [{"role": "assistant", "content": solution_str}]
    columns = {name: [value] for name, value in row.items()}
    parts = {}
    score = 0.0
    for function, weight in WEIGHTS.items():
        reward = function(prompts=[prompt], completions=[completion], **columns)[0]
        parts[function.__name__] = reward
        score += weight * reward
    return {"score": score, **parts}
