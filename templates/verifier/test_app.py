"""Test the server of this folder over HTTP: `python -m pytest templates/verifier`.

The test starts the server as a run does. Test three responses to a verifier: a right one, a wrong
one, and one that must fail.
"""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

from gym_client import Gym, GymError, VerifyResult, message_response
from kit.verify.servers import running_servers

FOLDER = Path(__file__).resolve().parent
rows = runpy.run_path(str(FOLDER / "rows.py"))["rows"]


async def play(urls: dict[str, str], row: dict, response: str | None = None) -> VerifyResult:
    """Play an episode: get the price from the tool, then respond with it, or with `response`."""
    (item,) = row["prices"]
    async with Gym(urls) as gym, gym.session("shop", row) as session:
        assert session.kind == "verify" and session.executable == {"price"}
        # wrong arguments: the policy reads this
        assert "Field required" in await session.call_tool("price", "{}")
        output = await session.call_tool("price", f'{{"item": "{item}"}}')
        if response is None:
            response = f"The tool returned {output}."
        return await session.verify(message_response(response))


async def verify_without_session(urls: dict[str, str], row: dict) -> None:
    """Verify without the cookie of the session."""
    async with Gym(urls) as gym, gym.session("shop", row) as session:
        session.connection.cookies.clear()
        await session.verify(message_response("7"))


def test_the_verifier(tmp_path: Path) -> None:
    row = rows(1, 1, 1, {})[0]
    with running_servers({"shop": {"start": {"path": str(FOLDER)}}}, tmp_path) as urls:
        right = asyncio.run(play(urls, row))
        assert (right.reward, right.components) == (1.0, {"calls": 1.0})
        wrong = asyncio.run(play(urls, row, f"{row['answer']}, no, {row['answer'] + 1}"))
        assert wrong.reward == 0.0
        assert asyncio.run(play(urls, row, "")).reward == 0.0
        with pytest.raises(GymError, match=r"HTTP 409.*no such session"):
            asyncio.run(verify_without_session(urls, row))
        with pytest.raises(GymError, match=r"HTTP 422.*prices"):
            asyncio.run(verify_without_session(urls, {**row, "prices": None}))
