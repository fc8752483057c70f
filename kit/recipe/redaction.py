"""A recipe without its secrets, to be written down or printed.

Protects: keys and passwords do not get into files, cards and trackers.
"""

from __future__ import annotations

import os
import re
from typing import cast

from omegaconf import OmegaConf

from env import Json
from kit.recipe.keys import escape

HIDDEN = "<hidden>"  # written instead of a secret
MIN_SECRET_LENGTH = 8  # characters; shorter values of variables are common words
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SECRET_KEY = re.compile(  # names of keys; verl's prompt_key, reward_fn_key and such do not match
    r"(?:^|[_-])(?:(?:api|access|auth|secret|private|signing|encryption|account|judge|policy|openai"
    r"|model|server)[_-]?keys?"
    r"|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)(?<!image_)(?<!stop_)token"
    r"|secret|password|passwd|passphrase|credentials?|authorization)$|^key$",
    re.IGNORECASE,
)
DEFAULT = re.compile(r"\$\{oc\.env:(\w+),[^{}]*\}")  # ${oc.env:NAME,default}
URL_PASSWORD = re.compile(
    r"(\b[a-z][\w+.-]*://(?:[^\s/:@]*:(?=[^\s/@])|(?=[^\s/:@]+@)))(?!\$\{)[^\s/]+@", re.I
)
URL_QUERY = re.compile(
    r"([?&](?:(?:api_?key|key|token|access_token|secret|password)=|[\w.-]+=(?=[^&\s#]{8})))"
    r"(?!\$\{)[^&\s#]+",
    re.I,
)


def redact(nested: Json, resolved: Json) -> Json:
    """Return a recipe, resolved and without secrets. Values of the environment stay ${...}.

    These are secrets:

    - the value of an environment variable with KEY, TOKEN, SECRET, PASSWORD or CREDENTIAL in its
      name
    - a literal value of a key with such a name
    - a password or a key in a URL

    A secret is replaced by the name of its variable, or by HIDDEN if it has none.
    """
    return cast(Json, _redact(nested, resolved, False, secret_values()))


def write_yaml(values: Json) -> str:
    """Return a recipe as YAML, which the kit and OmegaConf read as the same values."""
    return OmegaConf.to_yaml(OmegaConf.create(values))


def secret_values() -> list[tuple[str, str]]:
    """Return (value, name) of the environment's secrets, the longest first: some contain others."""
    variables = {
        value: name
        for name, value in os.environ.items()
        if SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET_LENGTH
    }
    return sorted(variables.items(), key=lambda item: -len(item[0]))


def _redact(
    raw: object, resolved: object, is_secret: bool, secrets: list[tuple[str, str]]
) -> object:
    """Return `resolved` without secrets. raw: the same node before interpolation."""
    if isinstance(resolved, dict):
        raws = raw if isinstance(raw, dict) else {}
        return {
            key: _redact(
                raws.get(key, ""), value, is_secret or names_secret(str(key), value), secrets
            )
            for key, value in resolved.items()
        }
    if isinstance(resolved, list):
        items = raw if isinstance(raw, list) else [""] * len(resolved)
        pairs = zip(items, resolved, strict=True)
        return [_redact(item, value, is_secret, secrets) for item, value in pairs]
    if isinstance(raw, str) and "${oc.env:" in raw:
        return without_passwords(DEFAULT.sub(r"${oc.env:\1}", raw) if is_secret else raw)
    if isinstance(resolved, str):
        resolved = str(escape(resolved))
        for value, name in secrets:
            resolved = resolved.replace(value, f"${{oc.env:{name}}}")
        resolved = without_passwords(resolved)
    is_literal = resolved not in (None, "") and not isinstance(resolved, bool)
    if is_secret and is_literal and "${oc.env:" not in str(resolved):
        return HIDDEN
    return resolved


def names_secret(name: str, value: object) -> bool:
    """Return whether a key's name marks its value as a secret.

    A name in capitals is the name of an environment variable.
    """
    if name.isupper():
        return bool(SECRET_VARIABLE.search(name)) and len(str(value)) >= MIN_SECRET_LENGTH
    return bool(SECRET_KEY.search(name))


def without_settings(recipe: Json) -> Json:
    """Return a recipe for others: of servers and judges, which may have secrets, only the names."""
    gym = recipe.get("gym")
    if not isinstance(gym, dict):
        return recipe
    hidden: Json = {}
    for section in gym.keys() & {"servers", "judges"}:
        names = gym[section]
        hidden[section] = dict.fromkeys(names, HIDDEN) if isinstance(names, dict) else HIDDEN
    return recipe | {"gym": gym | hidden}


def without_passwords(text: str) -> str:
    """Return a text with HIDDEN for the passwords and keys in its URLs. Interpolations stay.

    >>> without_passwords("https://me:pass@host/v1?api_key=sk-1&n=2")
    'https://me:<hidden>@host/v1?api_key=<hidden>&n=2'
    """
    text = URL_PASSWORD.sub(rf"\g<1>{HIDDEN}@", text)
    return URL_QUERY.sub(rf"\g<1>{HIDDEN}", text)
