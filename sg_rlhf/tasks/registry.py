"""Every domain by its name. Adding one is a line in `DOMAINS`.

A domain outside this package is `package.module:NAME`; `SG_DOMAINS` gives some their own names.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping

from sg_rlhf.tasks.domain import Domain, load
from sg_rlhf.tasks.grade import Grader

DOMAINS: Mapping[str, str] = {
    "kk": "sg_rlhf.tasks.kk.domain:KK",
    "math": "sg_rlhf.tasks.math.domain:MATH",
    "search": "sg_rlhf.tasks.search.domain:SEARCH",
    "arithmetic": "sg_rlhf.tasks.arithmetic.domain:ARITHMETIC",
}

VARIABLE = "SG_DOMAINS"
#: `domain:NAME[/GRADER]` in `reward.remote_url`, `domain:NAME` in `train.agent_func_path`.
PREFIX = "domain:"


def domains() -> dict[str, Domain]:
    """Every domain by name: the package's, then those of `SG_DOMAINS`; else a `ValueError`."""
    found = {name: _domain(import_path) for name, import_path in DOMAINS.items()}
    for import_path in _outside_paths():
        try:
            domain = _domain(import_path)
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: {error}") from None
        if found.setdefault(domain.name, domain) is not domain:
            raise ValueError(f"{VARIABLE}={import_path}: there is a domain {domain.name} already")
    return found


def find(name: str) -> Domain:
    """The domain of a name, or of an import path `package.module:NAME`; else a `ValueError`."""
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


def named_in(value: str) -> tuple[Domain, Grader]:
    """The domain and the grader of `domain:NAME` or `domain:NAME/GRADER`; else a `ValueError`."""
    name, slash, grader = value.removeprefix(PREFIX).partition("/")
    domain = find(name)
    if not slash:
        return domain, domain.grade
    if grader not in domain.graders:
        known = ", ".join(domain.graders) or "no other graders"
        raise ValueError(f"{value}: domain {name} has {known}")
    return domain, domain.graders[grader]


def used_by(reward: str, agent: str, sections: Iterable[str] = ()) -> list[Domain]:
    """The domains of a recipe.

    Args:
        reward: its `reward.remote_url`: `domain:NAME`, or a file or module in the domain's folder.
        agent: its `train.agent_func_path`.
        sections: names of `sg.NAME`; with an agent of another kind, the rollouts' domains.
    """
    found = [named_in(value)[0] for value in (reward, agent) if value.startswith(PREFIX)]
    dotted = f".{reward.removeprefix('module:').replace('/', '.')}."
    by_file = () if reward.startswith(PREFIX) else (*DOMAINS.values(), *_outside_paths())
    for import_path in by_file:
        module = import_path.partition(":")[0]
        if f".{module.rpartition('.')[0] or module}." in dotted:
            found.append(_domain(import_path))
    if agent and not agent.startswith(PREFIX):
        found += map(find, sections)
    return list({domain.name: domain for domain in found}.values())


def _outside_paths() -> list[str]:
    """The import paths in `SG_DOMAINS`."""
    return [path for each in os.environ.get(VARIABLE, "").split(",") if (path := each.strip())]


def _domain(import_path: str) -> Domain:
    found: object = load(import_path)
    if not isinstance(found, Domain):
        raise ValueError(f"{import_path}: is {type(found).__name__}, expected a Domain")
    return found
