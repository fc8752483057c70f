"""A Gym resources server of one's own: a session with the row's prices, one tool that tells them, a verdict.

    gym: {servers: {shop: {start: {path: templates/verifier}}}}

Copy the folder, change it, name that. It is made as Gym's own servers are, and runs in .venv-gym, without verl.
What may fail must raise: any status but 200 is a failed episode, a reward of 0 a wrong answer.
"""

import re

from fastapi import FastAPI, HTTPException, Request
from nemo_gym import base_resources_server as gym
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel


class Seed(gym.BaseSeedSessionRequest):  # what is used of the row; a row without it is a 422
    prices: dict[str, int]


class Question(BaseModel):  # the tool's arguments; others are a 422, which the policy reads
    item: str


class Asked(
    gym.BaseVerifyRequest
):  # the row again, and `response`: what the policy wrote and was answered
    answer: int


class Verdict(gym.BaseVerifyResponse):  # with `reward`; what else is worth a metric
    reward_components: dict[str, float]


class Shop(gym.SimpleResourcesServer):
    config: gym.BaseResourcesServerConfig  # a subclass of it has fields for start.config
    sessions: dict[str, dict] = {}  # noqa: RUF012  (pydantic copies it): one for each episode, by its cookie's id

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/price")(self.price)  # a tool is a route of its name
        return app

    async def seed_session(self, request: Request, body: Seed) -> gym.BaseSeedSessionResponse:
        self.sessions[request.session[SESSION_ID_KEY]] = {"prices": body.prices, "calls": 0}
        return gym.BaseSeedSessionResponse()

    async def price(self, request: Request, body: Question) -> dict:
        (session := self.sessions[request.session[SESSION_ID_KEY]])["calls"] += 1
        return {"price": session["prices"].get(body.item, "not sold here")}

    async def verify(self, request: Request, body: Asked) -> Verdict:
        session = self.sessions.pop(request.session[SESSION_ID_KEY], None)
        if session is None:
            raise HTTPException(
                409, "no such session: POST /seed_session first, and send its cookie"
            )
        said = [
            part.text
            for item in body.response.output
            if item.type == "message"
            for part in item.content
        ]
        right = re.findall(r"\d+", " ".join(said[-1:]))[-1:] == [str(body.answer)]
        return Verdict(
            **body.model_dump(), reward=float(right), reward_components={"calls": session["calls"]}
        )


if __name__ == "__main__":
    Shop.run_webserver()
