"""The server of this folder, started as a run starts it, and asked over HTTP: `python -m pytest templates/verifier`.

A verifier wants three answers tested: one that is right, one that is wrong, and what is none, which must fail.
"""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

from gym_client import Gym, GymError, Verdict, message_response
from kit.gym.servers import running_servers

HERE = Path(__file__).resolve().parent
rows = runpy.run_path(str(HERE / "rows.py"))["rows"]


async def play(urls: dict[str, str], row: dict, answer: str | None = None) -> Verdict:
    """An episode of `row`: the price is asked, and said, or `answer` is."""
    (item,) = row["prices"]
    async with Gym(urls) as gym, gym.session("shop", row) as session:
        assert session.kind == "verify" and session.executable == {"price"}
        assert "Field required" in await session.call_tool("price", "{}")  # which the policy reads
        told = await session.call_tool("price", f'{{"item": "{item}"}}')
        return await session.verify(
            message_response(f"It says {told}." if answer is None else answer)
        )


async def without_a_session(urls: dict[str, str], row: dict) -> None:
    async with Gym(urls) as gym, gym.session("shop", row) as session:
        session._http.cookies.clear()
        await session.verify(message_response("7"))


def test_the_verifier(tmp_path: Path) -> None:
    row = rows(1, 1, 1, {})[0]
    with running_servers({"shop": {"start": {"path": str(HERE)}}}, tmp_path) as urls:
        right = asyncio.run(play(urls, row))
        assert (right.reward, right.components) == (1.0, {"calls": 1.0})
        assert (
            asyncio.run(play(urls, row, f"{row['answer']}, no, {row['answer'] + 1}")).reward == 0.0
        )
        assert asyncio.run(play(urls, row, "")).reward == 0.0
        with pytest.raises(GymError, match=r"HTTP 409.*no such session"):
            asyncio.run(without_a_session(urls, row))
        with pytest.raises(GymError, match=r"HTTP 422.*prices"):
            asyncio.run(without_a_session(urls, {**row, "prices": None}))
