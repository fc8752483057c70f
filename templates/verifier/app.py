"""A Gym server to copy: the prices of a row in a session, a tool that returns them, a verifier.

    gym: {servers: {shop: {start: {path: templates/verifier}}}}
A failure must raise: any status but 200 is a failed episode. A reward of 0 is a wrong response.
"""

import re

from fastapi import FastAPI, HTTPException, Request
from nemo_gym import base_resources_server as base
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel


class Seed(base.BaseSeedSessionRequest):  # the fields of the row; a row without them is a 422
    prices: dict[str, int]


class PriceRequest(BaseModel):  # arguments of the tool; others are a 422, which the policy reads
    item: str


class VerifyRequest(base.BaseVerifyRequest):  # the row, and `response`: all items of the episode
    answer: int


class VerifyResponse(base.BaseVerifyResponse):  # `reward`, and other numbers for the metrics
    reward_components: dict[str, float]


class Shop(base.SimpleResourcesServer):  # its `config` has the values of start.config
    sessions: dict[str, dict] = {}  # noqa: RUF012  (pydantic copies it), by the id in the cookie

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/price")(self.price)  # a tool is a route with its name
        return app

    async def seed_session(self, request: Request, body: Seed) -> base.BaseSeedSessionResponse:
        self.sessions[request.session[SESSION_ID_KEY]] = {"prices": body.prices, "calls": 0}
        return base.BaseSeedSessionResponse()

    async def price(self, request: Request, body: PriceRequest) -> dict:
        session = self.sessions[request.session[SESSION_ID_KEY]]
        session["calls"] += 1
        return {"price": session["prices"].get(body.item, "not sold here")}

    async def verify(self, request: Request, body: VerifyRequest) -> VerifyResponse:
        session = self.sessions.pop(request.session[SESSION_ID_KEY], None)
        if session is None:
            raise HTTPException(409, "no such session: POST /seed_session first, send its cookie")
        messages = [item.content for item in body.response.output if item.type == "message"]
        text = messages[-1][-1].text if messages and messages[-1] else ""
        reward = float(re.findall(r"\d+", text)[-1:] == [str(body.answer)])
        numbers = {"calls": session["calls"]}
        return VerifyResponse(**body.model_dump(), reward=reward, reward_components=numbers)


if __name__ == "__main__":
    Shop.run_webserver()
