# make_chats.py
import json

with open("data/arithmetic_train.jsonl") as rows, open("data/chats.jsonl", "w") as out:
    for row in map(json.loads, rows):
        chat = [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        out.write(json.dumps({"messages": chat}) + "\n")
