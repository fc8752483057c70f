# my_parquet.py
from datasets import Dataset


def row(a, b, split):
    question = f"{a} + {b} apples? Think, and put the answer after ####."
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "index": 30 * a + b},
    }


for split, numbers in {"train": range(2, 30), "test": range(30, 34)}.items():
    rows = [row(a, b, split) for a in numbers for b in range(2, 30)]
    Dataset.from_list(rows).to_parquet(f"data/verls_{split}.parquet")
