"""Secrets, and what stands in their place wherever a setting is written or shown.

One rule for recipes, command lines, errors, logs and reports. A secret is the value of a key or a
variable whose last word says so (`logger.wandb.key`, `HF_TOKEN`), and the user and password of an
address. Everything else is shown as it is.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

#: What is shown instead.
HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:key|api_?key|access_?key|token|secret|password|passwd|credentials?)$", re.I
)
#: Keys whose last word says so, and that hold none.
_NOT_SECRET = ("data.input_key", "data.label_key", "data.image_key", "ckpt.best_metric_key")
_IN_ADDRESS = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^\s/?#@'\"]+@", re.I)
_IN_QUERY = re.compile(
    r"(?P<name>[?&](?:api_?key|access_?token|token|key|secret|password)=)[^&\s'\"]+", re.I
)
_WORDS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|(?<=[Bb]earer )[\w.~+/-]{16,})"
)
_A_KEY = re.compile(r"[\w.-]+").fullmatch
#: A shorter value is more likely a word that stands in many texts.
_LEAST = 8


class SecretStr(str):
    """Text that is what it is to whoever uses it, and hidden to whoever prints what holds it.

    Upstream prints the namespace of all flags and sends it to wandb as text; both show `repr`.
    """

    def __repr__(self) -> str:
        return repr(redact_text(self) if _IN_ADDRESS.search(self) else HIDDEN)


def is_secret(name: str) -> bool:
    """Whether a key of a recipe, or a variable, holds a secret by its name."""
    return bool(_SECRET_NAME.search(name)) and name not in _NOT_SECRET


def redact(name: str, value: Any) -> Any:
    """A setting's value as it may be shown."""
    if value is None or value == "" or isinstance(value, bool):
        return value
    if is_secret(name):
        return HIDDEN
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: redact(str(key), one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact("", one) for one in value]
    return value


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """A text without users and passwords of addresses, tokens, and the secrets of variables.

    Args:
        environment: whose secrets it may hold; by default this process's.
    """
    text = _IN_ADDRESS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text)
    text = _WORDS.sub(HIDDEN, text)
    for name, value in (os.environ if environment is None else environment).items():
        if len(value) >= _LEAST and is_secret(name):
            text = text.replace(value, HIDDEN)
    return text


def redact_argv(words: Iterable[str]) -> list[str]:
    """A command line, ``--key value`` or ``key=value``, as it may be shown."""
    shown: list[str] = []
    before = ""
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if equals and _A_KEY(name):  # and not an address with a query
            found = redact(name, value)
            shown.append(word if found == value else f"{word.partition('=')[0]}={found}")
        else:
            shown.append(redact(before, word))
        before = word[2:] if word.startswith("--") and not equals else ""
    return shown


def mask_namespace(settings: Namespace | SimpleNamespace, prefix: str = "") -> None:
    """Make secrets of a nested namespace, in place, such that printing it does not show them."""
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
        return {name: _hidden(f"{key}.{name}", one) for name, one in value.items()}
    if isinstance(value, list):
        return [_hidden(key, one) for one in value]
    return value
