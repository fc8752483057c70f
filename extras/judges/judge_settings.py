"""Read `gym.judges` of the recipe: the models that NeMo Gym verifiers call by name (judges).

An entry sets one of three sources:

    base_url    an OpenAI-compatible endpoint that already runs, with the name of its model
    start       a vLLM server that this run starts (judge_processes.py)
    policy      the model that this run trains

configs/base.yaml describes every key, and docs/guides/judges.md has an example.
"""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from kit.config.model_files import is_missing_folder
from kit.errors import ConfigError
from kit.gym import network
from kit.gym.process_specs import is_valid_name

SOURCES = ("base_url", "start")
# Keys of an entry that are fields of Judge with the same name.
OPTION_KEYS = ("parameters", "timeout_s", "attempts", "concurrency", "server", "config")
KEYS = {"model", "api_key_env", *OPTION_KEYS}
START_KEYS = {"model", "gpus", "args", "deadline_s"}
# Gym's model servers that send their requests to an address.
MODEL_SERVERS = ("vllm_model", "openai_model", "inference_provider", "genrm_model")
MODEL_LIST_TIMEOUT_S = 20.0  # seconds for the list of an endpoint's models
DEFAULT_TIMEOUT_SHARE = 0.8  # of gym.timeout_s, for a judge without timeout_s


@dataclass
class Judge:
    """A model that verifiers call by `name`."""

    name: str
    url: str  # of its API: ".../v1"
    model: str  # its name in that API
    key: str = field(default="", repr=False)
    key_name: str = ""  # the environment variable that holds the key
    parameters: dict[str, Any] = field(default_factory=dict)  # override those of a request
    timeout_s: float = 48.0  # for one reply: all attempts and pauses, not the wait for a slot
    attempts: int = 3
    concurrency: int = 64  # requests in flight
    server: str = "vllm_model"  # Gym's model server: a folder of responses_api_models
    config: dict[str, Any] = field(default_factory=dict)  # overrides of its settings
    start: dict[str, Any] | None = None  # a vLLM of this run: {model, gpus, args, deadline_s}

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


# --- check the entries ---------------------------------------------------------------------------


def find_problems(specs: Mapping[str, Any], timeout_s: float, device: str = "cpu") -> Iterator[str]:
    """Yield a message for each invalid value of gym.judges. Sends no request.

    specs: gym.judges. timeout_s: gym.timeout_s. device: trainer.device.
    """
    for name, spec in specs.items():
        where = f"gym.judges.{name}"
        if not is_valid_name(name):
            yield (
                f"`{where}`: {name!r} is not a valid name. "
                "Use letters, digits, `_`, `-` and `.`, and do not begin with `.`."
            )
        if spec != "policy":
            yield from _find_entry_problems(where, spec, timeout_s, device)


def _find_entry_problems(where: str, spec: Any, timeout_s: float, device: str) -> Iterator[str]:
    sources = [key for key in SOURCES if isinstance(spec, Mapping) and spec.get(key)]
    if len(sources) != 1:
        yield (
            f"`{where}` must have exactly one source. Set `base_url: https://.../v1` and `model`, "
            "or `start: {model: ...}`, or set the whole entry to `policy`."
        )
        return
    (source,) = sources
    valid_keys = KEYS | {source}
    unknown_keys = spec.keys() - valid_keys
    if "api_key" in spec:
        yield (
            f"`{where}.api_key`: a recipe must not contain a key. "
            "Set `api_key_env` to the environment variable that holds it."
        )
    elif unknown_keys:
        yield f"`{where}`: {_describe_unknown_key(unknown_keys, valid_keys)}"
    if source == "base_url":
        yield from _find_endpoint_problems(where, spec)
    else:
        yield from _find_start_problems(where, spec, device)
    yield from _find_limit_problems(where, spec, timeout_s)
    yield from _find_model_server_problems(where, spec)


def _describe_unknown_key(unknown_keys: set[str], valid_keys: set[str]) -> str:
    key = min(unknown_keys)
    return f"unknown key {key!r}. Valid keys are {', '.join(sorted(valid_keys))}."


def _find_endpoint_problems(where: str, spec: Mapping[str, Any]) -> Iterator[str]:
    url = str(spec["base_url"])
    if not url.startswith(("http://", "https://")):
        yield f"`{where}.base_url={url}` is not an HTTP address. Set one like https://host/v1."
    if not spec.get("model"):
        yield f"`{where}.model` is not set. Set it to the name of the model at {url}."
    variable = spec.get("api_key_env")
    if variable and not os.environ.get(str(variable)):
        yield (
            f"`{where}.api_key_env={variable}`: this environment variable is not set. "
            "Set it to the key."
        )


def _find_start_problems(where: str, spec: Mapping[str, Any], device: str) -> Iterator[str]:
    start = spec["start"] if isinstance(spec["start"], Mapping) else {}
    unknown_keys = start.keys() - START_KEYS
    if unknown_keys:
        yield f"`{where}.start`: {_describe_unknown_key(unknown_keys, START_KEYS)}"
    model = str(start.get("model") or "")
    if not model:
        yield f"`{where}.start.model` is not set. Set it to a model folder or a Hugging Face name."
    elif is_missing_folder(model):
        yield (
            f"`{where}.start.model={model}` is not an existing folder. "
            "Set it to a model folder or a Hugging Face name."
        )
    gpus = start.get("gpus") or []
    if device != "cpu" and not gpus:
        yield (
            f"`{where}.start.gpus` is not set, but a judge needs its own GPUs. "
            "Set it to their indices in nvidia-smi, for example [7]."
        )
    if not isinstance(gpus, list):
        yield f"`{where}.start.gpus={gpus}` is not a list. Set it to a list of GPU indices."
    arguments = start.get("args") or {}
    if not isinstance(arguments, Mapping):
        yield (
            f"`{where}.start.args={arguments}` is not a mapping. "
            "Set it to options of `vllm serve`, for example {max_model_len: 8192}."
        )


def _find_limit_problems(where: str, spec: Mapping[str, Any], timeout_s: float) -> Iterator[str]:
    for key, number in (("timeout_s", float), ("attempts", int), ("concurrency", int)):
        value = spec.get(key)
        if value is None:
            continue
        if type(value) not in (int, number) or value <= 0:
            kind = "a number" if number is float else "an integer"
            yield f"`{where}.{key}={value!r}` is not valid. Set it to {kind} above 0."
        elif key == "timeout_s" and value >= timeout_s:
            yield (
                f"`{where}.timeout_s={value}` must be less than `gym.timeout_s={timeout_s:g}`, "
                "which limits the whole verification. Lower it."
            )


def _find_model_server_problems(where: str, spec: Mapping[str, Any]) -> Iterator[str]:
    server = spec.get("server") or MODEL_SERVERS[0]
    if server not in MODEL_SERVERS:
        yield (
            f"`{where}.server={server}` is not one of {', '.join(MODEL_SERVERS)}. "
            "Set one of these. To run a vLLM server, set `start`."
        )
    for key in ("parameters", "config"):
        value = spec.get(key) or {}
        if not isinstance(value, Mapping):
            yield f"`{where}.{key}={value!r}` is not a mapping. Set it to keys and values."


# --- build the judges ----------------------------------------------------------------------------


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
        options = {key: spec[key] for key in OPTION_KEYS if spec.get(key) is not None}
        options = {"timeout_s": default_timeout_s, **options}
        if spec.get("start"):
            judges[name] = _build_started_judge(name, spec["start"], options, cpu_dtype)
        else:
            judges[name] = _build_endpoint_judge(name, spec, options)
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
    name: str, start: Mapping[str, Any], options: Mapping[str, Any], cpu_dtype: str
) -> Judge:
    arguments: dict[str, Any] = {}
    if cpu_dtype:
        arguments = {"dtype": cpu_dtype, "enforce_eager": True, "kv_cache_memory_bytes": 2**30}
    arguments |= start.get("args") or {}
    return Judge(
        name,
        url=f"http://{network.HOST}:{network.find_free_port()}/v1",
        model=name,
        key=secrets.token_hex(16),
        start={**start, "args": arguments},
        **options,
    )


def _build_endpoint_judge(name: str, spec: Mapping[str, Any], options: Mapping[str, Any]) -> Judge:
    variable = spec.get("api_key_env")
    return Judge(
        name,
        url=str(spec["base_url"]).rstrip("/"),
        model=spec["model"],
        key=os.environ[variable] if variable else "",
        key_name=variable or "",
        **options,
    )


def describe_judges(judges: Mapping[str, Judge]) -> Iterator[str]:
    """Yield a line for each judge, for the dry run."""
    for judge in judges.values():
        if judge.start:
            source = f"vLLM with {judge.start['model']}"
        else:
            source = f"{judge.model} at {judge.url or 'the policy endpoint'}"
        if judge.key_name and judge.url:
            source += f", key in {judge.key_name}"
        limits = (
            f"timeout {judge.timeout_s:g} s, {judge.attempts} attempts, "
            f"{judge.concurrency} concurrent requests"
        )
        yield f"judge       {judge.name}: {source}; {limits}"


# --- check an endpoint ---------------------------------------------------------------------------


def check_endpoint(judge: Judge) -> None:
    """Check that a judge's endpoint answers, accepts the key, and has the model.

    Requests the list of models. Some endpoints list no models, or only a part of them. So if the
    model is not in the list, requests one short completion, which costs a few tokens. Raises
    ConfigError.
    """
    response = _fetch(judge, "models", "GET", MODEL_LIST_TIMEOUT_S)
    models = _read_model_ids(response)
    if judge.model in models:
        return
    if response.status_code not in (401, 403):
        request = {
            "model": judge.model,
            "messages": [{"role": "user", "content": "Say yes."}],
            **judge.parameters,
        }
        response = _fetch(judge, "chat/completions", "POST", judge.timeout_s, json=request)
    _raise_for_status(judge, response, models)


def _fetch(
    judge: Judge, route: str, method: str, timeout_s: float, **request: Any
) -> httpx.Response:
    """Send one request to a judge's endpoint. Raises ConfigError if it does not answer."""
    try:
        return network.fetch(
            f"{judge.url}/{route}",
            method,
            timeout_s,
            use_proxy=not judge.is_local,
            headers=judge.headers,
            **request,
        )
    except network.FetchError as error:
        raise ConfigError(
            f"`gym.judges.{judge.name}.base_url={judge.url}` does not answer ({error}). "
            "Start the server, or correct the address. "
            'See docs/guides/judges.md, "Configure judges".'
        ) from None


def _read_model_ids(response: httpx.Response) -> list[Any]:
    """Return the ids in a list of models, or [] if the response is not such a list."""
    if response.status_code != 200:
        return []
    try:
        return [model["id"] for model in response.json()["data"]]
    except (ValueError, TypeError, KeyError):
        return []


def _raise_for_status(judge: Judge, response: httpx.Response, models: list[Any]) -> None:
    """Raise ConfigError if the status shows that the key or the name of the model is wrong."""
    where = f"gym.judges.{judge.name}"
    status = response.status_code
    problem = f"{judge.url} returned HTTP {status}: {judge.redact(response.text[:200])}"
    if status in (401, 403):
        hint = "Set `api_key_env` to the environment variable that holds the key."
        if judge.key:
            hint = f"Correct the key in {judge.key_name}."
        raise ConfigError(f"`{where}`: {problem}. {hint}")
    if status in (400, 404, 422):
        hint = "Set a model that it has."
        nearest = difflib.get_close_matches(judge.model, models, 4, 0.0)
        if nearest:
            hint = f"Set one of its {len(models)} models; the nearest are {', '.join(nearest)}."
        raise ConfigError(f"`{where}.model={judge.model}`: {problem}. {hint}")
