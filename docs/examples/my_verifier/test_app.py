# my_verifier/test_app.py
import asyncio

import pytest

from gym_client import Gym, GymError, message_response
from kit.verify.servers import running_servers


async def verify(urls, text, thing):
    question = f"Describe a {thing} in at most ten words."
    row = {"responses_create_params": {"input": question}, "answer": thing}
    async with Gym(urls) as gym, gym.session("words", row) as session:
        return (await session.verify(message_response(text))).reward


def test_the_server(tmp_path):
    with running_servers({"words": {"start": {"path": "my_verifier"}}}, tmp_path) as urls:
        assert asyncio.run(verify(urls, "A cat is a small animal.", "cat")) == 1.0
        assert asyncio.run(verify(urls, "", "cat")) == 0.0
        with pytest.raises(GymError, match="HTTP 422"):  # a row without its answer: no reward
            asyncio.run(verify(urls, "A cat.", None))
