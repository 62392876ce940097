"""Domains outside the package, registered as a user's own are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from sg_rlhf.config import domain_settings, sg_settings
from sg_rlhf.tasks import registry


def _forget() -> None:
    for cached in (domain_settings._domains, sg_settings.sg_keys):
        cached.cache_clear()


@contextlib.contextmanager
def registered(monkeypatch: pytest.MonkeyPatch, places: str) -> Iterator[None]:
    """With `SG_DOMAINS` set to these places, until the test ends."""
    monkeypatch.setenv(registry.VARIABLE, places)
    _forget()
    yield
    _forget()
