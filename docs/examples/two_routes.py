# two_routes.py
import re

from fastapi import FastAPI

app = FastAPI()


@app.post("/seed_session")  # an episode begins; the body is its row
def seed_session():
    return {}


@app.post("/verify")  # it has ended; the body is the row with `response` (OpenAI Responses API)
def verify(body: dict):
    texts = []
    for item in body["response"]["output"]:
        texts += [part["text"] for part in item.get("content", [])]
    numbers = re.findall("[0-9]+", " ".join(texts))
    answer = re.findall("[0-9]+", body["answer"])[-1]
    return body | {"reward": float(numbers[-1:] == [answer])}
