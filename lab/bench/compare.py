"""New results beside the committed ones: which ratios got worse, which better, which are missing.

    python lab/bench/compare.py out/bench

Reads the JSON files of that folder that ``claims.py`` knows. A ratio is worse where it fell behind
the committed one by more than its tolerance. Exit status 1 if one is worse, or is missing from a
result that is there; 2 if the folder has no result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).parents[2]))

from lab.bench.claims import BENCHES, CLAIMS, RESULTS, Claim, read

#: What of a machine changes a ratio.
COMPARED = ("processor", "cores", "memory_gb")
#: Statuses that end in exit status 1.
FAILING = ("worse", "missing")


@dataclass(frozen=True)
class Finding:
    """What became of one ratio: "worse", "better", "same", "new", "missing" or "not run"."""

    claim: Claim
    status: str
    new: float | None = None
    old: float | None = None

    def line(self) -> str:
        """For the terminal."""
        claim, parts = self.claim, [f"{self.status:<8}", self.claim.what]
        if self.new is not None:
            parts.append(f"{claim.shown(self.new)}, committed")
            parts.append("none" if self.old is None else claim.shown(self.old))
            met = claim.met(self.new)
            if met is not None:
                parts.append(f"(goal {claim.goal_shown()}: {'met' if met else 'not met'})")
        if self.status == "missing":
            parts.append(f"({claim.path} is not in {BENCHES[claim.bench].result})")
        return " ".join(parts)


def finding(claim: Claim, new: Any | None, old: Any | None) -> Finding:
    """One ratio in a new result and in the committed one; None where there is no such result."""
    if new is None:
        return Finding(claim, "not run")
    try:
        value = claim.value(new)
    except KeyError:
        return Finding(claim, "not run" if claim.whole_only else "missing")
    try:
        before = claim.value(old) if old is not None else None
    except KeyError:
        before = None
    if before is None:
        return Finding(claim, "new", value)
    if claim.worse(value, before):
        return Finding(claim, "worse", value, before)
    return Finding(claim, "better" if claim.worse(before, value) else "same", value, before)


def compare(folder: Path, committed: Path = RESULTS) -> list[Finding]:
    """Every ratio that is claimed, in the order of ``claims.CLAIMS``."""
    return [
        finding(claim, read(folder, claim.bench), read(committed, claim.bench)) for claim in CLAIMS
    ]


def other_machine(folder: Path, committed: Path = RESULTS) -> Iterator[str]:
    """A line for each result that the committed one has from another machine."""
    for name, bench in BENCHES.items():
        new, old = (read(place, name) for place in (folder, committed))
        if new is None or old is None:
            continue
        here, there = (result.get("machine", {}) for result in (new, old))
        differs = [
            f"{key} {here[key]}, committed {there[key]}"
            for key in COMPARED
            if key in here and key in there and here[key] != there[key]
        ]
        if differs:
            yield f"{bench.result}: another machine: {'; '.join(differs)}"


def report(folder: Path, committed: Path = RESULTS) -> int:
    """Print what was found; the exit status."""
    findings = compare(folder, committed)
    if all(found.status == "not run" for found in findings):
        print(f"error: {folder}: no result of lab/bench/claims.py there", file=sys.stderr)
        return 2
    for line in (*other_machine(folder, committed), *(found.line() for found in findings)):
        print(line)
    failing = [found.claim.what for found in findings if found.status in FAILING]
    if failing:
        print(f"got worse or missing: {'; '.join(failing)}", file=sys.stderr)
    return int(bool(failing))


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("new", type=Path, help="folder of new results")
    parser.add_argument("--committed", type=Path, default=RESULTS, help="[lab/bench/results]")
    arguments = parser.parse_args(argv)
    if not arguments.committed.is_dir():
        parser.error(f"--committed {arguments.committed}: no such folder")
    try:
        return report(arguments.new, arguments.committed)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    raise SystemExit(main())
