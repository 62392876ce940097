"""The verdict of a preregistered study, by the rule that its file fixes before the runs.

The section `decision` of a study file names the end point, the margin, the gates, the contrasts and
what each outcome of a contrast means. `fix` writes the SHA-256 of the study file, of the files that
it names and of this analysis to decision.sha256. `report` refuses if one of them has changed. It
states outcomes once every run of the contrasts is there; until then it prints the contrasts alone.

Outcomes of a contrast, treated minus baseline; the first that applies:
    equivalent  the two one-sided tests at the margin are significant, and the control has an effect
    better      p after Holm over all contrasts is below alpha, and the mean is positive
    worse       likewise, and the mean is negative
    ambiguous   anything else
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.study import paired
from lab.study.plan import Contrasted, Decision, Gate, Study
from sg_rlhf.common.atomic_io import write_whole
from sg_rlhf.common.text import table_head, table_row
from sg_rlhf.config import ConfigError
from sg_rlhf.data_io.dataset_writer import sha256_of

HASHES = "decision.sha256"
ANALYSIS = (Path(__file__), Path(paired.__file__))
HEADINGS = (
    "contrast", "n", "mean", "95 % interval", "sd of a pair", "p", "p (Holm)", "p (Welch)",
    "p (TOST)", "p (start x arm)", "outcome",
)  # fmt: skip

Runs = Mapping[str, dict[str, Any]]


def decision_of(study: Study) -> Decision:
    """Raises:
    ConfigError: the study's file has no such section.
    """
    if study.file.decision is None:
        raise ConfigError(f"{study.path}: decision: not set; expected the rule of the verdict")
    return study.file.decision


def fix(study: Study) -> Path:
    """Write the hashes of the study file, of the files it names and of the analysis.

    Raises:
        ConfigError: one of them is not there.
    """
    folder = study.path.parent
    named = [folder / name for name in decision_of(study).files]
    lines = [
        f"{_sha256(path)}  {os.path.relpath(path, folder)}"
        for path in (study.path, *named, *ANALYSIS)
    ]
    write_whole(folder / HASHES, "\n".join([*lines, ""]))
    return folder / HASHES


def check(study: Study) -> None:
    """Compare the files with their hashes.

    Raises:
        ConfigError: naming the first that differs.
    """
    file = study.path.parent / HASHES
    if not file.is_file():
        raise ConfigError(f"{file}: not there; write it with --fix before the first run")
    for line in file.read_text().splitlines():
        digest, name = line.split(maxsplit=1)
        if _sha256(study.path.parent / name) != digest:
            raise ConfigError(
                f"{study.path.parent / name}: changed since {file.name} fixed it; print the "
                "verdict at the commit that has the fixed file"
            )


def _sha256(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def failed_gate(gate: Gate, folder: Path) -> str | None:
    """One line if the figure is outside the gate's range, else None."""
    try:
        value: Any = json.loads((folder / gate.file).read_text())
        for key in gate.at.split("."):
            value = value[key]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{gate.file}: {gate.at}: not there"
    inside = value == gate.equals if gate.equals is not None else gate.least <= value <= gate.most
    return None if inside else f"{gate.file}: {gate.at} is {value}"


def values(study: Study, runs: Runs, group: str, variant: str) -> paired.Values:
    """(regime, seed) -> end point of the runs of a group and variant that are there."""
    decision = decision_of(study)
    regimes, point = decision.groups[group], decision.end_point
    found = {}
    for cell in study.cells():
        if cell.variant == variant and cell.regime in regimes and cell.name in runs:
            curve = {row["rollout"]: row for row in runs[cell.name]["curves"]["accuracy"]}
            chosen = [curve[rollout][point.set] for rollout in point.rollouts]
            found[cell.regime, cell.seed] = statistics.fmean(chosen)
    return found


def missing(study: Study, runs: Runs) -> list[str]:
    """The runs that a verdict needs and that are not there."""
    arms = decision_of(study).arms
    return [c.name for c in study.cells() if c.variant in arms and c.name not in runs]


def outcome(found: paired.Contrast, holm: float, tost: float, alpha: float, control: bool) -> str:
    """The first outcome of the module's list that applies."""
    if control and tost < alpha:
        return "equivalent"
    if holm < alpha:
        return "better" if found.mean > 0 else "worse"
    return "ambiguous"


def report(study: Study, runs: Runs) -> list[str]:
    """Markdown: gates, contrasts and, once every run is there, the outcome and its meaning.

    Raises:
        ConfigError: a fixed file has changed.
    """
    check(study)
    decision, left = decision_of(study), missing(study, runs)
    failed = [line for gate in decision.gates if (line := failed_gate(gate, study.path.parent))]
    final = not left and not failed
    rows: list[tuple[str, Contrasted, paired.Contrast, paired.Values]] = []
    controls: dict[str, paired.Contrast] = {}
    for group in decision.groups:
        treated, baseline = (values(study, runs, group, arm) for arm in decision.control)
        if len(paired.differences(treated, baseline)) > 1:
            controls[group] = paired.contrast(treated, baseline)
        for one in decision.contrasts:
            arms = [values(study, runs, group, arm) for arm in (one.treated, one.baseline)]
            apart = paired.differences(*arms)
            if len(apart) > 1:
                rows.append((group, one, paired.contrast(*arms), apart))
    adjusted = paired.holm([found.p for _, _, found, _ in rows])
    lines = [*failed, *([f"{len(left)} runs are missing: no verdict yet"] if left else []), ""]
    lines += table_head(list(HEADINGS))
    meanings = []
    for (group, one, found, pairs), holm in zip(rows, adjusted, strict=True):
        tost = paired.tost([*pairs.values()], decision.margin)
        detected = controls[group].p < decision.alpha if group in controls else False
        verdict = outcome(found, holm, tost, decision.alpha, detected) if final else ""
        name = f"{group}: {one.treated} minus {one.baseline}"
        more = (holm, found.welch, tost, paired.start_by_arm(pairs)) if final else ()
        lines.append(table_row([*_cells(name, found), *(f"{p:.3g}" for p in more), verdict]))
        if final:
            meanings.append(f"- {name}: **{verdict}**. {getattr(one, verdict)}")
    for group, found in controls.items():
        name = f"{group}: {' minus '.join(decision.control)} (control)"
        detected = found.p < decision.alpha
        verdict = ("an effect" if detected else "no effect found") if final else ""
        lines.append(table_row([*_cells(name, found), "", f"{found.welch:.3g}", "", "", verdict]))
    commits = sorted({str(runs[c.name].get("commit")) for c in study.cells() if c.name in runs})
    return [*lines, "", f"Commits of the runs: {', '.join(commits)}.", "", *meanings]


def _cells(name: str, found: paired.Contrast) -> list[str]:
    interval = f"{found.low:+.4f} to {found.high:+.4f}"
    return [name, str(found.n), f"{found.mean:+.4f}", interval, f"{found.sd:.4f}", f"{found.p:.3g}"]
