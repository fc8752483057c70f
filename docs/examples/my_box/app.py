# my_box/app.py
from fastapi import FastAPI, Request
from nemo_gym import base_resources_server as base
from nemo_gym.server_utils import SESSION_ID_KEY
from pydantic import BaseModel


class PutRequest(BaseModel):
    """The arguments of the tool. Other arguments are a 422, which the model reads."""

    item: str


class VerifyRequest(base.BaseVerifyRequest):
    """The fields of the row that the verifier reads, and `response`."""

    wanted: list[str]


class Box(base.SimpleResourcesServer):
    config: base.BaseResourcesServerConfig
    boxes: dict[str, list[str]] = {}  # noqa: RUF012  (pydantic copies it), by session id

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/put")(self.put)  # a tool is a route with its name
        return app

    async def seed_session(self, request: Request) -> base.BaseSeedSessionResponse:
        self.boxes[request.session[SESSION_ID_KEY]] = []
        return base.BaseSeedSessionResponse()

    async def put(self, request: Request, body: PutRequest) -> dict:
        box = self.boxes[request.session[SESSION_ID_KEY]]
        box.append(body.item)
        return {"box": box}

    async def verify(self, request: Request, body: VerifyRequest) -> base.BaseVerifyResponse:
        box = self.boxes.pop(request.session[SESSION_ID_KEY])  # a lost session is a 500, no reward
        right = set(box) & set(body.wanted)
        reward = len(right) / max(len(box), len(body.wanted))
        return base.BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    Box.run_webserver()
