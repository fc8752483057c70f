# my_verifier/app.py
import re

from nemo_gym import base_resources_server as base

LIMIT = 10  # words


class VerifyRequest(base.BaseVerifyRequest):
    """The fields of the row that this server reads, and `response`."""

    answer: str


class Words(base.SimpleResourcesServer):
    config: base.BaseResourcesServerConfig

    async def verify(self, body: VerifyRequest) -> base.BaseVerifyResponse:
        words = re.findall("[a-z']+", body.response.output_text.lower())
        if body.answer not in words:
            reward = 0.0
        elif len(words) <= LIMIT:
            reward = 1.0
        else:
            reward = 0.5 * LIMIT / len(words)
        return base.BaseVerifyResponse(**body.model_dump(), reward=reward)


if __name__ == "__main__":
    Words.run_webserver()
