"""The registry of suites: each domain's `Domain.suite`, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from sg_rlhf.eval import own_rows
from sg_rlhf.eval.scores import report
from sg_rlhf.tasks import registry
from sg_rlhf.tasks.domain import Domain, load
from sg_rlhf.tasks.questions import EvalError
from sg_rlhf.tasks.rollout import Environment
from sg_rlhf.tasks.suite import Suite


def suite_of(domain: Domain) -> Suite:
    """The suite of a domain."""
    if domain.suite is None:
        raise EvalError(f"domain {domain.name} has no suite")
    return load(domain.suite)


#: The suites of the package's own domains.
SUITES: dict[str, Suite] = {
    suite.name: suite
    for domain in map(registry.find, registry.DOMAINS)
    if domain.suite is not None
    for suite in [suite_of(domain)]
}


def domain_of(suite: Suite, requested: str) -> Domain | None:
    """The domain of a suite that `--suite` requested; None for a suite without one."""
    known = registry.domains().values()
    imported = [registry.find(requested)] if ":" in requested else []
    owners = (d for d in (*known, *imported) if d.suite is not None and load(d.suite) is suite)
    return next(owners, None)


def environment_of(
    domain: Domain | None, run_settings: Mapping[str, Any]
) -> Callable[[], Environment] | None:
    """Makes the environment of a domain for an evaluation; None: it has none.

    It gets the section `sg.NAME` of the model's training run.
    """
    if domain is None or domain.environment is None:
        return None
    made, settings = load(domain.environment), None
    if domain.settings is not None:
        section = (run_settings.get("sg") or {}).get(domain.name) or {}
        settings = load(domain.settings)(**section)
    return lambda: made(settings, strict=True)


def all_suites() -> dict[str, Suite]:
    """`SUITES`, and those of the domains that `SG_DOMAINS` names."""
    found = {**SUITES, own_rows.NAME: own_rows.ROWS}
    try:
        outside = [d for name, d in registry.domains().items() if name not in registry.DOMAINS]
    except ValueError as error:
        raise EvalError(str(error)) from None
    for suite in [suite_of(domain) for domain in outside if domain.suite is not None]:
        if found.setdefault(suite.name, suite) is not suite:
            raise EvalError(f"{registry.VARIABLE}: there is a suite {suite.name} already")
    return found


def suite_at(import_path: str) -> Suite:
    """The suite of the domain `package.module:NAME`."""
    try:
        return suite_of(registry.find(import_path))
    except ValueError as error:
        raise EvalError(f"--suite {error}") from None


def show(suites: Mapping[str, Suite], console: Console) -> None:
    """Print one table per suite: its benchmarks, with sizes, settings and licences."""
    heads = ("--only", "benchmark", "questions", "settings", "scores", "licence")
    parts = []
    for name, suite in suites.items():
        if not suite.benchmarks:  # --data FILE
            continue
        rows = []
        for b in suite.benchmarks:
            s = b.settings
            how = "greedy" if s.temperature == 0 else f"T={s.temperature:g}, top_p={s.top_p:g}"
            names = [b.mean_name, *(f"pass@{k}" for k in b.pass_at)]
            if s.n > 1:
                names.append(f"bayes@{s.n}")
            if b.headline_groups:
                names.append("by number of people")
            only = b.name if b.family == b.name else f"{b.name} ({b.family})"
            settings = f"{how}, {s.max_tokens} tokens, n={s.n}"
            rows.append([only, b.title, str(b.size), settings, ", ".join(names), b.licence])
        parts.append(report.section(f"--suite {name}: {suite.title}", report.table(heads, rows)))
        if suite.by_default:
            parts.append(f"without --only: {', '.join(suite.by_default)}")
    report.show(console, parts)
