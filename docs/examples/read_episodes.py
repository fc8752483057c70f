# read_episodes.py
import pandas

lines = pandas.read_json("runs/math_cpu/rollouts/step_20.jsonl", lines=True)
episodes = pandas.json_normalize(lines["_episode"])
print(episodes.groupby(["server", "status", "ended"])["reward"].describe())
print(episodes.sort_values("reward")[["prompt", "answer", "reward"]].to_string())
