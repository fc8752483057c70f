"""Read `gym.judges` of the recipe: the models that NeMo Gym verifiers call by name (judges).

An entry sets one of three sources:

    base_url    an OpenAI-compatible endpoint that already runs, with the name of its model
    start       a vLLM server that this run starts (judge_processes.py)
    policy      the model that this run trains

configs/base.yaml describes every key, and docs/guides/judges.md has an example.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from env import Json
from kit.recipe.model_files import is_missing_folder
from kit.verify import network
from kit.verify.process_specs import is_valid_name

PAGE = 'See docs/guides/judges.md, "Configure judges".'
DEFAULT_TIMEOUT_SHARE = 0.8  # of gym.timeout_s, for a judge without timeout_s


SECTION = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)


class Start(BaseModel):
    """A vLLM server that the run starts."""

    model_config = SECTION
    model: str
    gpus: list[str] = []
    args: Json = {}  # of `vllm serve`
    deadline_s: PositiveFloat = 600.0  # to load the model

    @field_validator("model")
    @classmethod
    def check_model(cls, model: str) -> str:
        """Return a folder that exists, or a name on the hub. Raises ValueError."""
        if is_missing_folder(model):
            raise ValueError(f"{model} is no folder. Set a model folder or a Hugging Face name")
        return model


class Entry(BaseModel):
    """An entry of gym.judges."""

    model_config = SECTION
    base_url: str | None = Field(None, pattern="^https?://")
    model: str | None = None
    api_key_env: str | None = None
    start: Start | None = None
    parameters: Json = {}  # override those of a request
    timeout_s: PositiveFloat | None = None  # for one reply, with all attempts and pauses
    attempts: PositiveInt = 3
    concurrency: PositiveInt = 64  # requests in flight
    # Gym's model server: a folder of responses_api_models
    server: Literal["vllm_model", "openai_model", "inference_provider"] = "vllm_model"
    config: Json = {}  # overrides of its settings

    @field_validator("api_key_env")
    @classmethod
    def check_variable(cls, name: str) -> str:
        """Return the name of a variable that is set. Raises ValueError."""
        if not os.environ.get(name):
            raise ValueError(f"the environment variable {name} is not set. Set it to the key")
        return name

    @model_validator(mode="after")
    def check_source(self) -> Entry:
        """Raise ValueError unless the entry has one source."""
        has_endpoint = bool(self.base_url and self.model)
        if has_endpoint == bool(self.start) or (self.base_url and self.start):
            raise ValueError("set base_url and model, or start, or the whole entry to `policy`")
        return self


@dataclass
class Judge:
    """A model that verifiers call by `name`. url: of its API, with /v1."""

    name: str
    url: str
    model: str  # its name in that API
    key: str = field(repr=False)
    timeout_s: float
    settings: Entry
    cpu_dtype: str = ""  # of a vLLM that this run starts on a CPU

    def redact(self, text: str) -> str:
        """Replace the key in `text`: an error of the provider may quote it."""
        return text.replace(self.key, "(the key)") if self.key else text


def find_problems(specs: Json, timeout_s: float, device: str = "cpu") -> Iterator[str]:
    """Yield a message for each invalid value of gym.judges.

    specs: gym.judges. timeout_s: gym.timeout_s. device: trainer.device.
    """
    for name, spec in specs.items():
        key = f"gym.judges.{name}"
        if not is_valid_name(name):
            yield f"{key}: the name may have letters, digits, `_`, `-` and `.`. Change it."
        if spec == "policy":
            continue
        try:
            entry = Entry.model_validate(spec)
        except ValidationError as error:
            for problem in error.errors():  # without the value, which may be a key
                place = ".".join(map(str, (key, *problem["loc"])))
                yield f"{place}: {problem['msg'].removeprefix('Value error, ')}. {PAGE}"
            continue
        if entry.timeout_s and entry.timeout_s >= timeout_s:
            yield f"{key}.timeout_s must be below gym.timeout_s={timeout_s:g}. Lower it."
        if entry.start and not entry.start.gpus and device != "cpu":
            yield f"{key}.start.gpus: a judge needs separate GPUs. Set their indices, as in [7]."


def build_judges(
    specs: Json,
    timeout_s: float,
    policy: Mapping[str, str] | None = None,
    cpu_dtype: str = "",
) -> dict[str, Judge]:
    """Return {name: Judge} for gym.judges, which must have passed `find_problems`.

    timeout_s: gym.timeout_s. policy: {base_url, api_key, model} of this run's policy endpoint.
    cpu_dtype: dtype of a vLLM that this run starts on a CPU, "" if it has GPUs.
    """
    judges = {}
    for name, spec in specs.items():
        key = ""
        if spec == "policy":
            assert policy
            key = policy["api_key"]
            spec = {"base_url": policy["base_url"], "model": policy["model"]}
            spec["parameters"] = {"for_training": False}  # the limits of episodes do not apply
        entry = Entry.model_validate(spec)
        if entry.api_key_env:
            key = os.environ[entry.api_key_env]
        url = str(entry.base_url).rstrip("/")
        if entry.start:
            key = secrets.token_hex(16)
            url = f"http://{network.HOST}:{network.find_free_port()}/v1"
        limit_s = entry.timeout_s or DEFAULT_TIMEOUT_SHARE * timeout_s
        judges[name] = Judge(name, url, entry.model or name, key, limit_s, entry, cpu_dtype)
    return judges
