"""The tables of ``python -m eval.run --list``."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from sg_rlhf.tasks.suite import Suite


def show(suites: Mapping[str, Suite], console: Console) -> None:
    """Print one table per suite."""
    for name, suite in suites.items():
        caption = f"without --only: {', '.join(suite.by_default)}" if suite.by_default else None
        table = Table(
            title=f"--suite {name}: {suite.title}", title_justify="left",
            caption=caption, caption_justify="left",
        )  # fmt: skip
        for title in ("--only", "benchmark", "questions", "settings", "scores", "licence"):
            table.add_column(title)
        for b in suite.benchmarks:
            s = b.settings
            how = "greedy" if s.temperature == 0 else f"T={s.temperature:g}, top_p={s.top_p:g}"
            names = [b.mean_name, *(f"pass@{k}" for k in b.pass_at)]
            if s.n > 1:
                names.append(f"bayes@{s.n}")
            if b.headline_groups:
                names.append("by number of people")
            only = b.name if b.family == b.name else f"{b.name} ({b.family})"
            table.add_row(
                only, b.title, str(b.size), f"{how}, {s.max_tokens} tokens, n={s.n}",
                ", ".join(names), b.licence,
            )  # fmt: skip
        console.print(table)
