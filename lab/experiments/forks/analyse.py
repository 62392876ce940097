"""The tables of the study, as preregistration.md fixes them.

    python -m lab.experiments.forks.analyse            the tables, and figure.png
    python -m lab.experiments.forks.analyse --blinded  the sample size alone: no arm's label is read

It refuses if a file of preregistration.sha256 has changed, or while a primary run is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scipy import stats

from lab.experiments.forks import figure
from lab.study.paired import Contrast, Values, contrast, differences, holm, start_by_arm, tost
from lab.study.plan import Cell, Study, load_study
from lab.study.results import read_record

HERE = Path(__file__).parent
CORPORA = {"r": "R", "d": "D"}
BASELINE, TREATED = "grpo", "sg_outside"
ALPHA, MARGIN = 0.05, 0.02
#: Runs per corpus and arm: for the blinded estimate, planned, and where it exceeds LARGEST_SD.
FIRST, PLANNED, MORE, LARGEST_SD = 9, 27, 36, 0.026
ROLLOUTS = (10, 20, 30, 40)

Runs = Mapping[str, dict[str, Any]]


class Refused(Exception):
    """The study's files or runs are not those of the preregistration."""


def blinded_sd(pairs: Iterable[float]) -> float:
    """Root mean square of differences. Their signs, and so the arms' labels, have no effect on it.

    It exceeds the standard deviation by the mean: its square is variance + mean^2 in expectation.
    """
    return math.sqrt(statistics.fmean(value**2 for value in pairs))


def sample_size(sd: float) -> int:
    """Runs per corpus and arm."""
    return MORE if sd > LARGEST_SD else PLANNED


def end_point(run: dict[str, Any]) -> float:
    """Mean held-out accuracy after 10, 20, 30 and 40 rollouts."""
    found = {row["rollout"]: row["held_out"] for row in run["curves"]["accuracy"]}
    return statistics.fmean(found[rollout] for rollout in ROLLOUTS)


def at(rollout: int, run: dict[str, Any]) -> float:
    """Held-out accuracy after one of them."""
    (found,) = [row["held_out"] for row in run["curves"]["accuracy"] if row["rollout"] == rollout]
    return float(found)


def good_words(run: dict[str, Any]) -> float:
    """Rise of the share of good words from the first to the last ten rollouts."""
    curve = run["curves"]["good_words"]
    return statistics.fmean(curve[-10:]) - statistics.fmean(curve[:10])


SECONDARY = {
    "accuracy": end_point,
    "after 10": lambda run: at(10, run),
    "after 40": lambda run: at(40, run),
    "training reward": lambda run: statistics.fmean(run["curves"]["reward"]),
    "rise of good words": good_words,
    "entropy at the end": lambda run: run["figures"]["entropy_after"],
    "log of gradient norm's peak / median": lambda run: math.log(run["figures"]["grad_norm_peak"]),
}

#: Not in the preregistration; chosen after the runs.
AFTERWARDS = {
    "mean gradient norm": lambda run: math.log(run["figures"]["grad_norm_mean"]),
    "the same over the mean weight": lambda run: math.log(
        run["figures"]["grad_norm_mean"] / run["figures"]["weight_mean"]
    ),
    "variation of the norm (sd / mean)": lambda run: math.log(
        run["figures"]["grad_norm_std"] / run["figures"]["grad_norm_mean"]
    ),
}


def check(folder: Path) -> None:
    """Compare the files of preregistration.sha256 with their hashes.

    Raises:
        Refused: naming the first file that differs.
    """
    for line in (folder / "preregistration.sha256").read_text().splitlines():
        digest, name = line.split()
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise Refused(f"{folder / name}: its SHA-256 is not the one of preregistration.sha256")


def primary_cells(study: Study, n: int) -> list[Cell]:
    """The first n runs per corpus of GRPO and of GRPO-SG outside the clip, in the study's order."""
    taken: dict[tuple[str, str], int] = {}
    found = []
    for cell in study.cells():
        group = (cell.regime[0], cell.variant)
        if cell.variant in (BASELINE, TREATED) and taken.setdefault(group, 0) < n:
            taken[group] += 1
            found.append(cell)
    return found


def complete(cells: Sequence[Cell], runs: Runs) -> None:
    """Raises:
    Refused: a run is missing; names the first, and how many there are.
    """
    missing = [cell.name for cell in cells if cell.name not in runs]
    if missing:
        raise Refused(f"{len(missing)} of {len(cells)} runs are missing, the first is {missing[0]}")


def values(
    cells: Iterable[Cell], runs: Runs, corpus: str, variant: str, figure: Any = end_point
) -> Values:
    """A figure of the runs of one corpus and arm."""
    return {
        (cell.regime[1:], cell.seed): float(figure(runs[cell.name]))
        for cell in cells
        if cell.regime[0] == corpus and cell.variant == variant and cell.name in runs
    }


def blinded(study: Study, runs: Runs) -> tuple[float, int]:
    """Standard deviation of a pair, from the first nine runs per corpus and arm; sample size.

    Raises:
        Refused: one of them is missing.
    """
    cells = primary_cells(study, FIRST)
    complete(cells, runs)
    pairs = [
        value
        for corpus in CORPORA
        for value in differences(
            *(values(cells, runs, corpus, arm) for arm in (TREATED, BASELINE))
        ).values()
    ]
    sd = blinded_sd(pairs)
    return sd, sample_size(sd)


def _row(name: str, found: Contrast, *more: str) -> str:
    numbers = f"{found.mean:+.4f} | {found.low:+.4f} to {found.high:+.4f} | {found.sd:.4f}"
    return f"| {name} | {found.n} | {numbers} | {found.p:.3g} | {' | '.join(more)} |"


def primary(study: Study, runs: Runs) -> list[str]:
    """Markdown of the two contrasts and the interaction.

    Raises:
        Refused: a run is missing.
    """
    sd, n = blinded(study, runs)
    cells = primary_cells(study, n)
    complete(cells, runs)
    arms = {c: [values(cells, runs, c, arm) for arm in (TREATED, BASELINE)] for c in CORPORA}
    pairs = {c: differences(*arms[c]) for c in CORPORA}
    found = {c: contrast(*arms[c]) for c in CORPORA}
    adjusted = holm([found[c].p for c in CORPORA])
    lines = [
        f"Blinded standard deviation of a pair {sd:.4f}: {n} runs per corpus and arm.", "",
        "| contrast | n | mean | 95 % interval | sd of a pair | p | p (Holm) | p (Welch) "
        "| p (TOST, .02) | p (start x arm) |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for (c, title), p in zip(CORPORA.items(), adjusted, strict=True):
        more = (p, found[c].welch, tost([*pairs[c].values()], MARGIN), start_by_arm(pairs[c]))
        lines.append(
            _row(f"{title}: outside minus GRPO", found[c], *(f"{value:.3g}" for value in more))
        )
    both = contrast(pairs["d"], pairs["r"])
    lines.append(_row("D minus R", both, "", f"{both.welch:.3g}", "", ""))
    return lines


def compared(
    cells: Sequence[Cell], runs: Runs, figure_of: Any, arms: Sequence[tuple[str, str]]
) -> dict[tuple[str, str, str], Contrast]:
    """(corpus, arm, other arm) -> the contrast of a figure, where three pairs or more are there."""
    found = {}
    for corpus in CORPORA:
        for arm, other in arms:
            sides = [values(cells, runs, corpus, side, figure_of) for side in (arm, other)]
            if len(differences(*sides)) >= 3:
                found[corpus, arm, other] = contrast(*sides)
    return found


def contrasts(study: Study, runs: Runs) -> dict[str, tuple[str, Contrast]]:
    """Row of the figure -> (arm, end point minus GRPO's); the interaction last."""
    cells = [*study.cells()]
    against = [(arm, BASELINE) for arm in study.file.variants if arm != BASELINE]
    rows = {
        f"{CORPORA[c]}: {arm}": (arm, found)
        for (c, arm, _), found in compared(cells, runs, end_point, against).items()
    }
    pairs = [
        differences(*(values(cells, runs, corpus, arm) for arm in (TREATED, BASELINE)))
        for corpus in ("d", "r")
    ]
    return {**rows, f"D minus R: {TREATED}": (TREATED, contrast(*pairs))}


def accuracy(study: Study, runs: Runs) -> dict[str, dict[str, dict[int, float]]]:
    """Title of a corpus -> arm -> rollout -> mean held-out accuracy; arms of two runs or more."""
    cells = [*study.cells()]
    curves: dict[str, dict[str, dict[int, float]]] = {title: {} for title in CORPORA.values()}
    for corpus, title in CORPORA.items():
        for arm in study.file.variants:
            by_rollout = {r: values(cells, runs, corpus, arm, partial(at, r)) for r in ROLLOUTS}
            if all(len(found) > 1 for found in by_rollout.values()):
                curves[title][arm] = {
                    r: statistics.fmean(v.values()) for r, v in by_rollout.items()
                }
    return curves


def secondary(
    study: Study, runs: Runs, figures: Mapping[str, Callable[[dict[str, Any]], float]] = SECONDARY
) -> list[str]:
    """Markdown: every arm compared with GRPO, and mask_only with Eq. 13; paired, unadjusted."""
    cells = [*study.cells()]
    lines = [
        "| figure | corpus | arm | minus | n | mean | 95 % interval | sd | p | p (Welch) |",
        "|---|---|---|---|--:|--:|---|--:|--:|--:|",
    ]
    against = [(arm, BASELINE) for arm in study.file.variants if arm != BASELINE]
    for name, figure_of in figures.items():
        rows = compared(cells, runs, figure_of, [*against, ("mask_only", "sg_inside")])
        for (c, arm, other), found in rows.items():
            lines.append(
                _row(f"{name} | {CORPORA[c]} | {arm} | {other}", found, f"{found.welch:.3g}")
            )
    return lines


def smallest_margin(found: Contrast) -> float:
    """The smallest margin at which `tost` is significant."""
    error = found.sd / math.sqrt(found.n)
    return abs(found.mean) + float(stats.t.ppf(1 - ALPHA, found.n - 1)) * error


def detectable(found: Contrast, power: float = 0.8) -> float:
    """The true mean that a two-sided t test of so many pairs finds with this power."""
    error = found.sd / math.sqrt(found.n)
    return float(stats.t.ppf([1 - ALPHA / 2, power], found.n - 1).sum()) * error


def start_means(pairs: Values) -> list[float]:
    """The mean difference of each start model."""
    starts = sorted({start for start, _ in pairs})
    return [statistics.fmean(v for (s, _), v in pairs.items() if s == start) for start in starts]


def afterwards(study: Study, runs: Runs) -> list[str]:
    """Markdown of figures that the preregistration does not have: margins, start models, norms."""
    cells = primary_cells(study, blinded(study, runs)[1])
    lines = [
        "| corpus | smallest margin | found with power .8 | start models: mean differences "
        "| TOST over them, .02 | .01 | without start 0: n | mean | 95 % interval |",
        "|---|--:|--:|---|--:|--:|--:|--:|---|",
    ]
    for corpus, title in CORPORA.items():
        arms = [values(cells, runs, corpus, arm) for arm in (TREATED, BASELINE)]
        found, means = contrast(*arms), start_means(differences(*arms))
        others = ({key: v for key, v in arm.items() if key[0] != "0"} for arm in arms)
        rest = contrast(*others)
        lines.append(
            f"| {title} | {smallest_margin(found):.4f} | {detectable(found):.4f} "
            f"| {', '.join(f'{mean:+.4f}' for mean in means)} | {tost(means, MARGIN):.3f} "
            f"| {tost(means, 0.01):.3f} | {rest.n} | {rest.mean:+.4f} "
            f"| {rest.low:+.4f} to {rest.high:+.4f} |"
        )
    lines += [
        "", "| figure | corpus | outside over GRPO | 95 % interval | pairs above 1 | p |",
        "|---|---|--:|---|--:|--:|",
    ]  # fmt: skip
    for name, figure_of in AFTERWARDS.items():
        for corpus, title in CORPORA.items():
            arms = [values(cells, runs, corpus, arm, figure_of) for arm in (TREATED, BASELINE)]
            found, above = contrast(*arms), sum(v > 0 for v in differences(*arms).values())
            ratio, low, high = (math.exp(v) for v in (found.mean, found.low, found.high))
            lines.append(
                f"| {name} | {title} | {ratio:.3f} | {low:.3f} to {high:.3f} "
                f"| {above} of {found.n} | {found.p:.2g} |"
            )
    return lines


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 when refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blinded", action="store_true", help="print the sample size and stop")
    args = parser.parse_args(argv)
    try:
        check(HERE)
        study, runs = load_study(HERE / "study.yaml"), read_record(HERE)
        sd, n = blinded(study, runs)
        if args.blinded:
            print(f"sd of a pair {sd:.4f} from {FIRST} runs per corpus and arm: {n} runs")
            return 0
        print("\n".join(["## Primary", "", *primary(study, runs), ""]))
        print("\n".join(["## Secondary, unadjusted", "", *secondary(study, runs), ""]))
        print("\n".join(["## Not preregistered", "", *afterwards(study, runs)]))
        figure.draw(contrasts(study, runs), accuracy(study, runs), MARGIN, HERE / "figure.png")
    except Refused as refusal:
        print(f"analyse: {refusal}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
