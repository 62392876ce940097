"""Every domain by its name. Adding one is a line in `DOMAINS`.

A domain outside this package is named by `SG_DOMAINS=package.module:NAME` (several with commas),
and has its name in every command then; or as `package.module:NAME` in place of a name.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from sg_rlhf.tasks.domain import Domain, load

DOMAINS: Mapping[str, str] = {
    "kk": "sg_rlhf.tasks.kk.domain:KK",
    "math": "sg_rlhf.tasks.math.domain:MATH",
    "search": "sg_rlhf.tasks.search.domain:SEARCH",
}

VARIABLE = "SG_DOMAINS"


def domains() -> dict[str, Domain]:
    """Every domain by name: the package's, then those of `SG_DOMAINS`.

    Raises:
        ValueError: a place in `SG_DOMAINS` holds no domain, or one whose name is taken.
    """
    found = {name: _domain(place) for name, place in DOMAINS.items()}
    for place in _outside():
        try:
            domain = _domain(place)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None
        if found.setdefault(domain.name, domain) is not domain:
            raise ValueError(f"{VARIABLE}={place}: there is a domain {domain.name} already")
    return found


def find(name: str) -> Domain:
    """The domain of a name, or at a place `package.module:NAME`.

    Raises:
        ValueError: there is none; names the nearest.
    """
    if ":" in name:
        return _domain(name)
    if name in DOMAINS:
        return _domain(DOMAINS[name])
    known = domains()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"domain {name!r}: expected one of {', '.join(known)}, or package.module:NAME{hint}"
        )
    return known[name]


def rewarded_by(reward: str) -> list[str]:
    """The names of the domains whose reward a recipe names in `reward.remote_url`.

    Args:
        reward: `module:NAME` or a file, in the folder of the domain's module. A domain whose module
            is in no package has its reward in that module.
    """
    dotted = f".{reward.removeprefix('module:').replace('/', '.')}."
    places = {**DOMAINS, **{_domain(place).name: place for place in _outside()}}
    modules = {name: place.partition(":")[0] for name, place in places.items()}
    return [
        name
        for name, module in modules.items()
        if f".{module.rpartition('.')[0] or module}." in dotted
    ]


def _outside() -> list[str]:
    """The places that `SG_DOMAINS` names."""
    return [place for each in os.environ.get(VARIABLE, "").split(",") if (place := each.strip())]


def _domain(place: str) -> Domain:
    found: object = load(place)
    if not isinstance(found, Domain):
        raise ValueError(f"{place}: is {type(found).__name__}, expected a Domain")
    return found
