"""Every suite by its name: those of the domains (`Domain.suite`)."""

from __future__ import annotations

from sg_rlhf.tasks import registry
from sg_rlhf.tasks.domain import Domain, load
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.suite import Suite


def suite_of(domain: Domain) -> Suite:
    """The suite of a domain.

    Raises:
        EvalError: it has none.
    """
    if domain.suite is None:
        raise EvalError(f"domain {domain.name} has no suite")
    return load(domain.suite)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for domain in registry.domains().values()
    if domain.suite is not None
    for suite in [suite_of(domain)]
}


def find(name: str) -> Suite:
    """The suite of a name, or of the domain at a place `package.module:NAME`.

    Raises:
        EvalError: there is none; names those that there are.
    """
    if ":" in name:
        try:
            return suite_of(registry.find(name))
        except ValueError as error:
            raise EvalError(f"--suite {error}") from None
    if name not in SUITES:
        raise EvalError(
            f"--suite {name}: expected one of {', '.join(SUITES)}, or a domain as "
            "package.module:NAME"
        )
    return SUITES[name]
