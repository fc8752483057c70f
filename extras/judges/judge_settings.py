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
from typing import Any, Literal
from urllib.parse import urlsplit

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
from kit.config.model_files import is_missing_folder
from kit.gym import network
from kit.gym.process_specs import is_valid_name

PAGE = 'See docs/guides/judges.md, "Configure judges".'
# Keys of an entry that are fields of Judge with the same name.
OPTION_KEYS = {"parameters", "timeout_s", "attempts", "concurrency", "server", "config"}
DEFAULT_TIMEOUT_SHARE = 0.8  # of gym.timeout_s, for a judge without timeout_s


@dataclass
class Judge:
    """A model that verifiers call by `name`."""

    name: str
    url: str  # of its API: ".../v1"
    model: str  # its name in that API
    key: str = field(default="", repr=False)
    key_name: str = ""  # the environment variable that holds the key
    parameters: Json = field(default_factory=dict)  # override those of a request
    timeout_s: float = 48.0  # for one reply: all attempts and pauses, not the wait for a slot
    attempts: int = 3
    concurrency: int = 64  # requests in flight
    server: str = "vllm_model"  # Gym's model server: a folder of responses_api_models
    config: Json = field(default_factory=dict)  # overrides of its settings
    start: Start | None = None  # of a vLLM of this run

    @property
    def is_local(self) -> bool:
        """Whether the endpoint is on this machine, where the environment's proxy is not used."""
        return urlsplit(self.url).hostname in ("127.0.0.1", "::1", "localhost")

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that authorize a request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def redact(self, text: str) -> str:
        """Replace the key in `text`: an error of the provider may quote it."""
        return text.replace(self.key, f"${self.key_name}") if self.key else text


class Section(BaseModel):
    """A section of a recipe. A key without a value has its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def drop_nulls(cls, values: object) -> object:
        """Return the keys that have a value."""
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if value is not None}


class Start(Section):
    """A vLLM server that the run starts."""

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


class Entry(Section):
    """An entry of gym.judges, except `policy`."""

    base_url: str | None = Field(None, pattern="^https?://")
    model: str | None = None
    api_key_env: str | None = None
    start: Start | None = None
    parameters: Json | None = None
    timeout_s: PositiveFloat | None = None
    attempts: PositiveInt | None = None
    concurrency: PositiveInt | None = None
    server: Literal["vllm_model", "openai_model", "inference_provider"] | None = None
    config: Json | None = None

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


def find_problems(specs: Mapping[str, Any], timeout_s: float, device: str = "cpu") -> Iterator[str]:
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
    specs: Mapping[str, Any],
    timeout_s: float,
    policy: Mapping[str, str] | None = None,
    cpu_dtype: str = "",
) -> dict[str, Judge]:
    """Return {name: Judge} for gym.judges, which must have passed `find_problems`.

    timeout_s: gym.timeout_s. policy: {base_url, api_key, model} of this run's policy endpoint.
    cpu_dtype: dtype of a started vLLM on a CPU; "" if it has GPUs.
    """
    default_timeout_s = DEFAULT_TIMEOUT_SHARE * timeout_s
    judges = {}
    for name, spec in specs.items():
        if spec == "policy":
            judges[name] = _build_policy_judge(name, policy, default_timeout_s)
            continue
        entry = Entry.model_validate(spec)
        options: Json = {"timeout_s": default_timeout_s}
        options |= entry.model_dump(include=OPTION_KEYS, exclude_none=True)
        if entry.start:
            judges[name] = _build_started_judge(name, entry.start, options, cpu_dtype)
        else:
            variable = entry.api_key_env or ""
            url = str(entry.base_url).rstrip("/")
            key = os.environ.get(variable, "")
            judges[name] = Judge(name, url, str(entry.model), key, variable, **options)
    return judges


def _build_policy_judge(name: str, policy: Mapping[str, str] | None, timeout_s: float) -> Judge:
    endpoint = policy or {"base_url": "", "api_key": "", "model": "policy"}
    return Judge(
        name,
        url=endpoint["base_url"],
        model=endpoint["model"],
        key=endpoint["api_key"],
        key_name="POLICY_API_KEY",
        timeout_s=timeout_s,
        parameters={"for_training": False},  # the limits of episodes are not those of a judge
    )


def _build_started_judge(
    name: str, start: Start, options: Mapping[str, Any], cpu_dtype: str
) -> Judge:
    arguments: Json = {}
    if cpu_dtype:
        arguments = {"dtype": cpu_dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**30}
    return Judge(
        name,
        url=f"http://{network.HOST}:{network.find_free_port()}/v1",
        model=name,
        key=secrets.token_hex(16),
        start=start.model_copy(update={"args": arguments | start.args}),
        **options,
    )


def describe_judges(judges: Mapping[str, Judge]) -> Iterator[str]:
    """Yield a line for each judge, for the dry run."""
    for judge in judges.values():
        source = f"{judge.model} at {judge.url or 'the policy endpoint'}"
        if judge.start:
            source = f"vLLM with {judge.start.model}"
        yield (
            f"judge       {judge.name}: {source}; timeout {judge.timeout_s:g} s, "
            f"{judge.attempts} attempts, {judge.concurrency} concurrent requests"
        )
