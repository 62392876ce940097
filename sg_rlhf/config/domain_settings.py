"""The sections of domains in a recipe: ``sg.NAME.KEY``, for a domain with settings of its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from sg_rlhf.config.errors import ConfigError
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.domain import Domain, load
from sg_rlhf.tasks.settings import DomainSettings


@functools.cache
def _domains() -> dict[str, Domain]:
    try:
        found = registry.domains()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    owners = {name: domain for name, domain in found.items() if domain.settings is not None}
    for name, domain in owners.items():
        section = _class(domain).section
        if section != name:
            raise ConfigError(f"domain {name}: its settings have section = {section!r}")
    return owners


def _class(domain: Domain) -> type[DomainSettings]:
    assert domain.settings is not None
    return load(domain.settings)


def names() -> tuple[str, ...]:
    """The domains that have a section."""
    return tuple(_domains())


def settings_class(name: str) -> type[DomainSettings]:
    """The settings of a domain that has a section."""
    return _class(_domains()[name])


def keys() -> dict[str, str]:
    """Every key of the sections -> its description."""
    return {
        f"sg.{name}.{field}": info.description or ""
        for name in names()
        for field, info in settings_class(name).model_fields.items()
    }


def parse_key(key: str) -> tuple[str, str] | None:
    """(domain, field) of a key such as ``sg.search.url``; None for any other key."""
    parts = key.split(".", 2)
    return (parts[1], parts[2]) if len(parts) == 3 and parts[1] in _domains() else None


def check(sections: Mapping[str, DomainSettings]) -> None:
    """Run the domains' own checks (a search server, for example) before Ray starts."""
    for name, settings in sections.items():
        wanted = _domains()[name].check
        if wanted is not None:
            try:
                load(wanted)(settings)
            except ValueError as error:
                raise ConfigError(str(error)) from None


def worker_variables(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Environment variables that pass the settings of domains to the workers."""
    chosen = [settings_class(name)(**values) for name, values in sections.items()]
    return {settings.env_name(): settings.to_env() for settings in chosen}
