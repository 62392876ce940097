"""A domain's own section of a recipe: `sg.NAME.KEY`."""

from __future__ import annotations

import json
import os
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict


class DomainSettings(BaseModel):
    """The keys of the section `sg.NAME`; Ray workers read them with `from_environment`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    #: The domain's name; the section is there for a recipe that names any of its keys.
    section: ClassVar[str]
    #: One line for the help.
    about: ClassVar[str] = ""

    @classmethod
    def env_name(cls) -> str:
        """Workers find the settings in this environment variable, as JSON."""
        return f"SG_{cls.section.upper()}"

    def to_env(self) -> str:
        """The value of that variable."""
        return json.dumps(self.model_dump())

    @classmethod
    def from_environment(cls) -> Self:
        """The settings that the variable holds, or the defaults where it is not set."""
        values: dict[str, Any] = json.loads(os.environ.get(cls.env_name()) or "{}")
        return cls(**values)


def checked_url(url: str, expected: str) -> str:
    """The address of a service; a `ValueError` if it is not of the form that is expected."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"expected {expected}")
    return url
