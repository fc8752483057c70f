# my_box/test_app.py
import asyncio

from rows import row

from gym_client import Gym, message_response
from kit.verify.servers import running_servers

CUP = '{"item": "cup"}'
FORK = '{"item": "fork"}'


async def play(urls, *calls):
    """Call the tool, then verify. Returns the last output of the tool, and the reward."""
    async with Gym(urls) as gym, gym.session("box", row(["cup", "fork"])) as session:
        outputs = [await session.call_tool("put", arguments) for arguments in calls]
        result = await session.verify(message_response("Done."))
        return outputs[-1], result.reward


def test_the_server(tmp_path):
    with running_servers({"box": {"start": {"path": "my_box"}}}, tmp_path) as urls:
        assert asyncio.run(play(urls, CUP, FORK)) == ('{"box":["cup","fork"]}', 1.0)
        assert asyncio.run(play(urls, CUP)) == ('{"box":["cup"]}', 0.5)
        text, reward = asyncio.run(play(urls, "{}"))  # the tool's argument is missing
        assert "Field required" in text and reward == 0.0
