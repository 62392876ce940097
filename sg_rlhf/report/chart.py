"""A figure as data: templates/figures.js draws it in the page, drawing.py into files."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sg_rlhf.report.runs import Curve

#: Colours of groups, in page.css and drawing.py, and their dashes in units of the line's width.
#: They repeat at different lengths: 42 groups look different, and those of one colour have
#: neighbours in DASHES, which are unlike each other.
COLOURS = 6
DASHES: tuple[tuple[float, ...], ...] = (
    (), (7, 2), (8, 2, 1.5, 2), (2.5, 1.2), (16, 2.5), (1, 1.6), (6, 1.5, 1, 1.5, 1, 1.5),
)  # fmt: skip


class Missing(ValueError):
    """The runs do not hold what a figure shows; one sentence for the page."""


@dataclass(frozen=True)
class Series:
    """One entry of a legend.

    Attributes:
        curves: one for each seed. Several are drawn as their mean, their range and each thinly.
        colour: a variable of page.css, without its dashes.
        kind: ``line``; ``thin``, for one curve per run without a mean; ``points``, with their
            interval as bars; ``bars`` of a histogram; ``stack``, a part of a sum.
        window: of the running mean, in points; 1 where there is none.
        interval: its lower and upper ends, for a single seed.
        marks: points that stand out.
        light: in a lighter tone.
    """

    label: str
    curves: Sequence[Curve]
    colour: str
    dash: tuple[float, ...] = ()
    kind: Literal["line", "thin", "points", "bars", "stack"] = "line"
    window: int = 1
    interval: tuple[Curve, Curve] | None = None
    marks: Sequence[tuple[float, float]] = ()
    light: bool = False

    @property
    def values(self) -> list[float]:
        return [y for curve in self.curves for _, y in curve]


@dataclass(frozen=True)
class Zone:
    """A shaded part of the x axis."""

    first: float
    last: float
    colour: str
    label: str


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        scale: ``auto``; ``zero`` begins at 0; ``share`` as well, and reaches .05 at least; ``log``.
        top: of the y axis; None: as the values need it.
    """

    y: str
    series: Sequence[Series]
    x: str = "rollout"
    scale: Literal["auto", "zero", "share", "log"] = "auto"
    top: float | None = None
    title: str = ""
    zones: Sequence[Zone] = ()


@dataclass(frozen=True)
class Bars:
    """A bar of a value between 0 and 1 per row, with its label and its count."""

    title: str
    colour: str
    rows: Sequence[tuple[str, float, int]]


@dataclass(frozen=True)
class Chart:
    """A figure: panels below each other, or in rows of ``columns``.

    Attributes:
        size: of the file in inches; None: as the panels need it.
    """

    panels: Sequence[Panel | Bars]
    columns: int = 1
    size: tuple[float, float] | None = None


def look(index: int) -> dict[str, Any]:
    """The colour and the dashes of the group at ``index``."""
    return {"colour": f"s{index % COLOURS}", "dash": DASHES[index % len(DASHES)]}


def smooth(curve: Curve, window: int) -> Curve:
    """Mean of the last ``window`` values."""
    values = [y for _, y in curve]
    return [
        (x, statistics.fmean(values[max(0, i - window + 1) : i + 1]))
        for i, (x, _) in enumerate(curve)
    ]


def across(curves: Iterable[Curve]) -> tuple[Curve, Curve, Curve]:
    """(mean, lowest, highest) over the curves, at the x that all of them have."""
    tables = [dict(curve) for curve in curves]
    xs = sorted(set.intersection(*map(set, tables))) if tables else []
    at = {x: [t[x] for t in tables] for x in xs}
    return (
        [(x, statistics.fmean(ys)) for x, ys in at.items()],
        [(x, min(ys)) for x, ys in at.items()],
        [(x, max(ys)) for x, ys in at.items()],
    )


def table_of(panel: Panel) -> list[tuple[str, list[str]]]:
    """The figures of each series as text: first, last, lowest and highest, of the mean of seeds."""
    rows = []
    for series in panel.series:
        values = [y for _, y in across(series.curves)[0]]
        shown = (values[0], values[-1], min(values), max(values)) if values else ()
        rows.append((series.label, [f"{value:.4g}" for value in shown] or ["n/a"] * 4))
    return rows


def page_data(panel: Panel, limit: int) -> dict[str, Any]:
    """A panel for figures.js: the values of every curve at each x, None where it has none.

    Args:
        limit: values of a line. A longer one is given as means of neighbouring values.
    """
    thinned = _thinner(panel, limit)
    drawn = []
    for series in panel.series:
        interval = series.interval or ()
        curves, ends = (
            (group if series.kind == "points" else [thinned(curve) for curve in group])
            for group in (series.curves, interval)
        )
        drawn.append((series, curves, ends))
    xs = sorted({
        x for series, curves, ends in drawn for curve in (*curves, *ends, series.marks)
        for x, _ in curve
    })  # fmt: skip

    def columns(curves: Iterable[Curve]) -> list[list[float | None]]:
        tables = [dict(curve) for curve in curves]
        return [[_short(t[x], 4) if x in t else None for x in xs] for t in tables]

    return vars(panel) | {
        "xs": [_short(x, 7) for x in xs],
        "zones": [vars(zone) for zone in panel.zones],
        "series": [
            vars(series) | {"curves": columns(curves), "interval": columns(ends)}
            for series, curves, ends in drawn
        ],
    }


def _short(value: float, digits: int) -> float | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _thinner(panel: Panel, limit: int) -> Callable[[Curve], Curve]:
    """Takes the mean of each ``n`` neighbours, at the same x for every line of the panel."""
    lines = [s for s in panel.series if s.kind != "points"]
    xs = sorted({x for s in lines for curve in s.curves for x, _ in curve})
    n = max(1, math.ceil(len(xs) / limit))
    last = {x: xs[min(len(xs), i // n * n + n) - 1] for i, x in enumerate(xs)}

    def thinned(curve: Curve) -> Curve:
        values: dict[float, list[float]] = defaultdict(list)
        for x, y in curve:
            values[last[x]].append(y)
        return [(x, statistics.fmean(ys)) for x, ys in values.items()]

    return thinned
