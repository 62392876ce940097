"""Makes the tables of docs/performance.md: every claimed ratio, its goal, and whether it is met.

    python docs/make_performance.py [--check]

Claims and goals are those of ``lab/bench/claims.py``, figures those of ``lab/bench/results``.
``--check`` writes nothing and fails if the page is not the one that would be written.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from made_tables import main  # noqa: E402

from lab.bench.claims import BENCHES, CLAIMS, RESULTS, Claim, read  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"


def measured(claim: Claim, folder: Path) -> float | None:
    """The committed figure; None where there is no result."""
    result = read(folder, claim.bench)
    return None if result is None else claim.value(result)


def verdict(claim: Claim, value: float | None) -> str:
    """In words."""
    if value is None:
        return "not measured"
    met = claim.met(value)
    return "no goal" if met is None else "met" if met else "**not met**"


def summary(folder: Path = RESULTS) -> list[str]:
    """The verdict in front: how many goals are met, and which are not."""
    of: dict[str, list[str]] = {"met": [], "**not met**": [], "not measured": [], "no goal": []}
    for claim in CLAIMS:
        of[verdict(claim, measured(claim, folder))].append(claim.what)
    judged = len(of["met"]) + len(of["**not met**"])
    lines = [f"**{len(of['met'])} of {judged} goals are met.**"]
    if of["**not met**"]:
        lines.append(f"Not met: {'; '.join(of['**not met**'])}.")
    if of["not measured"]:
        lines.append(f"Not measured yet: {'; '.join(of['not measured'])}.")
    return [part for line in lines for part in textwrap.wrap(line, 117, break_on_hyphens=False)]


def claims(folder: Path = RESULTS) -> list[str]:
    """A row of each ratio."""
    lines = [
        "| what | compared with | goal | measured | | result |",
        "| --- | --- | --- | --: | --- | --- |",
    ]
    for claim in CLAIMS:
        value, file = measured(claim, folder), BENCHES[claim.bench].result
        figure = "" if value is None else claim.shown(value)
        link = "" if value is None else f"[{file}](../lab/bench/results/{file})"
        note = f" ({claim.note})" if claim.note else ""
        lines.append(
            f"| {claim.what}{note} | {claim.against} | {claim.goal_shown()} | {figure} | "
            f"{verdict(claim, value)} | {link} |"
        )
    return lines


def commands(folder: Path = RESULTS) -> list[str]:
    """How each result was made, when and where."""
    lines = ["| result | made by | when | on |", "| --- | --- | --- | --- |"]
    for name, bench in BENCHES.items():
        result = read(folder, name)
        if result is None:
            continue
        planned = f"python {bench.command} --out lab/bench/results/{bench.result}"
        # Results name the folder of their day.
        made = f"`{result.get('command', planned).replace(' bench/', ' lab/bench/')}`"
        lines.append(f"| {bench.result} | {made} | {result['date']} | {_machine(result)} |")
    return lines


def _machine(result: Any) -> str:
    of = result["machine"]
    processor = of.get("processor") or of.get("cpu")
    return f"{processor}, {of['cores']} cores"


TABLES = {"summary": summary, "claims": claims, "commands": commands}


if __name__ == "__main__":
    raise SystemExit(main(PAGE, TABLES))
