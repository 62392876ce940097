"""Hide secrets in recipes, command lines, errors, logs and reports.

A secret is the value of a key or variable whose last word says so (`logger.wandb.key`,
`HF_TOKEN`), or the user and password of an address.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

#: Shown instead of a secret.
HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:key|api_?key|access_?key|token|secret|password|passwd|credentials?)$", re.I
)
#: Keys that end like a secret but hold none.
_NOT_SECRET = ("data.input_key", "data.label_key", "data.image_key", "ckpt.best_metric_key")
_IN_ADDRESS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/?#@'\"]+@", re.I)
_IN_QUERY = re.compile(
    r"(?P<name>[?&](?:api_?key|access_?token|token|key|secret|password)=)[^&\s'\"]+", re.I
)
_WORDS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|(?<=[Bb]earer )[\w.~+/-]{16,})"
)
_A_KEY = re.compile(r"[\w.-]+").fullmatch
#: Shorter values are probably ordinary words and are not hidden in texts.
_MIN_LENGTH = 8


class SecretStr(str):
    """A string whose `repr` is hidden.

    Upstream prints the namespace of all flags and sends it to wandb as text. Both use `repr`.
    """

    def __repr__(self) -> str:
        return repr(redact_text(self) if _IN_ADDRESS.search(self) else HIDDEN)


def is_secret(name: str) -> bool:
    """Whether a recipe key or an environment variable holds a secret, by its name."""
    return bool(_SECRET_NAME.search(name)) and name not in _NOT_SECRET


def redact(name: str, value: Any) -> Any:
    """A setting's value without secrets."""
    if value is None or value == "" or isinstance(value, bool):
        return value
    if is_secret(name):
        return HIDDEN
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: redact(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact("", item) for item in value]
    return value


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Remove users and passwords of addresses, tokens, and secrets of the environment."""
    text = _IN_ADDRESS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text)
    text = _WORDS.sub(HIDDEN, text)
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= _MIN_LENGTH and is_secret(name):
            text = text.replace(value, HIDDEN)
    return text


def redact_argv(words: Iterable[str]) -> list[str]:
    """A command line (``--key value`` or ``key=value``) without secrets."""
    shown: list[str] = []
    before = ""
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if equals and _A_KEY(name):  # and not an address with a query
            safe = redact(name, value)
            shown.append(word if safe == value else f"{word.partition('=')[0]}={safe}")
        else:
            shown.append(redact(before, word))
        before = word[2:] if word.startswith("--") and not equals else ""
    return shown


def mask_namespace(settings: Namespace | SimpleNamespace, prefix: str = "") -> None:
    """Replace secrets in a nested namespace by :class:`SecretStr`, in place."""
    for name, value in vars(settings).items():
        key = f"{prefix}{name}"
        if isinstance(value, (Namespace, SimpleNamespace)):
            mask_namespace(value, f"{key}.")
        else:
            setattr(settings, name, _hidden(key, value))


def _hidden(key: str, value: Any) -> Any:
    if isinstance(value, str) and redact(key, value) != value:
        return SecretStr(value)
    if isinstance(value, dict):
        return {name: _hidden(f"{key}.{name}", item) for name, item in value.items()}
    if isinstance(value, list):
        return [_hidden(key, item) for item in value]
    return value
