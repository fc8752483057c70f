# my_dataset.py
from datasets import Dataset

rows = [
    {"prompt": f"Complete the equation: {a} + {b} =", "answer": str(a + b)}
    for a in range(30)
    for b in range(30)
]
splits = Dataset.from_list(rows).train_test_split(test_size=64, seed=0)
for name, split in splits.items():
    split.to_json(f"data/sums_{name}.jsonl")
