"""Figures as files for papers: a chart drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from sg_rlhf.common import figures
from sg_rlhf.report.chart import Bars, Chart, Panel, Series, across, look, smooth
from sg_rlhf.report.text import one_line

#: Okabe and Ito's palette: told apart with any colour vision. Dashes differ as well.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
INK, MUTED, GRID, ALARM = "#1b1f24", "#59636e", "#e1e4e8", "#b3261e"
#: The variables of page.css on white paper.
VARIABLES = {f"s{i}": color for i, color in enumerate(SERIES)} | {"muted": MUTED, "alarm": ALARM}
#: Opacity of a thin line, of a range, and of a lighter tone.
THIN, RANGE, LIGHT = 0.5, 0.18, 0.55
#: Inches; a column of a two-column paper.
WIDTH, HEIGHT = 4.6, 2.8
#: Inches; of each further panel of a narrow figure.
PANEL_HEIGHT = 1.0
#: Inches; a row of a legend.
LEGEND_ROW = 0.18

RC = {
    "font.size": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "legend.handlelength": 2.8,  # two periods of most line styles
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "svg.hashsalt": "sg_rlhf",
    "svg.fonttype": "path",  # drawn letters: no font is needed
}


def color(index: int) -> str:
    """The colour of the group at ``index``."""
    return VARIABLES[look(index)["colour"]]


def subplots(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (WIDTH, HEIGHT), **shared: bool
) -> tuple[Figure, list[Axes]]:
    """A figure of a size in inches and its axes, row by row."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    return figure, [axis for row in axes for axis in row]


def draw(chart: Chart, title: str = "") -> Figure:
    with matplotlib.rc_context(RC):
        figure = _draw(chart)
        if title:
            figure.suptitle(text(title), x=0.02, ha="left", fontsize=10)
    return figure


def _draw(chart: Chart) -> Figure:
    columns = min(chart.columns, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    narrow = chart.columns == 1
    bars = [panel for panel in chart.panels if isinstance(panel, Bars)]
    if narrow:
        width, height = WIDTH, HEIGHT + PANEL_HEIGHT * (rows - 1)
    elif bars:
        width, height = 2 * WIDTH, sum(0.9 + 0.19 * len(panel.rows) for panel in bars[::columns])
    else:
        width, height = 2 * WIDTH, 0.5 + 2.1 * rows
    figure, axes = subplots(
        rows, columns, size=chart.size or (width, height), sharex=narrow or bool(bars),
        sharey=not narrow and not bars,
    )  # fmt: skip
    for spare in axes[len(chart.panels) :]:
        spare.set_visible(False)
    for index, (panel, at) in enumerate(zip(chart.panels, axes, strict=False)):
        at.set_title(text(panel.title), loc="left", fontsize=8.5, color=MUTED)
        if isinstance(panel, Bars):
            _draw_bars(at, panel)
            continue
        _draw_panel(at, panel)
        if index % columns == 0:
            at.set_ylabel(panel.y)
        if not narrow or index == rows - 1:
            at.set_xlabel(_x_label(panel))
    _draw_legend(figure, axes)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    below: dict[float, float] = {}
    for series in panel.series:
        if series.kind == "stack":
            below = _draw_part(axes, series, below)
        elif series.kind == "bars":
            _draw_histogram(axes, series, fill=len(panel.series) == 1)
        else:
            _draw_lines(axes, series)
    for zone in panel.zones:
        tone = {"facecolor": VARIABLES[zone.colour], "alpha": 0.13, "lw": 0}
        axes.axvspan(zone.first, zone.last, label=text(zone.label), **tone)
    if not panel.x.startswith("token probability"):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if panel.scale == "log":
        log_scale(axes)
    elif panel.scale != "auto":
        top = panel.top or 1.05 * axes.get_ylim()[1]
        flat = all(series.kind in ("stack", "bars") for series in panel.series)
        low = 0 if flat else -0.02 * top  # a line at 0 must be seen whole
        axes.set_ylim(low, max(0.05, top) if panel.scale == "share" else top)


def _xy(curve: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in curve], [y for _, y in curve]


def _draw_lines(axes: Axes, series: Series) -> None:
    """A line, or for several seeds their mean, their range, and each thinly."""
    curves = [curve for curve in series.curves if curve]
    smoothed = [smooth(curve, series.window) for curve in curves]
    mean, low, high = across(smoothed)
    if len(curves) == 1:
        low, high = series.interval or ([], [])
    color, label = VARIABLES[series.colour], text(series.label)
    thin: dict[str, Any] = {"color": color, "alpha": THIN, "lw": 0.9}
    if low and series.kind == "points":
        axes.vlines(*_xy(low), _xy(high)[1], lw=1.2, color=color)
    elif low and series.kind == "line":
        axes.fill_between(*_xy(low), _xy(high)[1], color=color, alpha=RANGE, lw=0)
    if len(curves) > 1 or (series.window > 1 and series.kind == "line"):
        for curve in curves if len(curves) == 1 else smoothed:
            axes.plot(*_xy(curve), **thin)
    if series.kind == "thin":
        axes.plot(*_xy(mean), label=label, **thin)
        return
    marker = "o" if len(mean) == 1 or series.kind == "points" else None
    line = {"color": color, "ls": (0, series.dash), "marker": marker, "ms": 4}
    axes.plot(*_xy(mean), lw=1.8, label=label, **line)
    if series.marks:
        axes.scatter(*_xy(series.marks), s=26, zorder=4, color=color, edgecolor=INK, linewidth=0.7)


def _draw_histogram(axes: Axes, series: Series, *, fill: bool) -> None:
    middles, heights = _xy(series.curves[0])
    half = 0.5 / len(middles)
    axes.stairs(
        heights, [*(x - half for x in middles), middles[-1] + half], fill=fill, lw=1.6,
        color=VARIABLES[series.colour], alpha=0.75 if fill else 1.0, ls=(0, series.dash),
        label=text(series.label),
    )  # fmt: skip


def _draw_part(axes: Axes, series: Series, below: dict[float, float]) -> dict[float, float]:
    """One part on top of what is ``below`` at each x; returns what is below the next."""
    xs, heights = _xy(series.curves[0])
    bottom = [below.get(x, 0.0) for x in xs]
    tone = to_rgb(VARIABLES[series.colour])
    if series.light:
        tone = tuple(LIGHT * part + (1 - LIGHT) for part in tone)
    axes.bar(xs, heights, width=1.0, bottom=bottom, color=tone, label=text(series.label))
    return {x: low + height for x, low, height in zip(xs, bottom, heights, strict=True)}


def _draw_bars(axes: Axes, bars: Bars) -> None:
    places = range(len(bars.rows))
    values = [value for _, value, _ in bars.rows]
    axes.barh(places, values, color=VARIABLES[bars.colour], alpha=0.75, height=0.7)
    axes.set_yticks(places, [text(label) for label, _, _ in bars.rows])
    for place, (_, value, count) in zip(places, bars.rows, strict=True):
        axes.annotate(
            f"{count:,}", (value, place), (4, 0), textcoords="offset points", va="center",
            fontsize=7.5, color=MUTED,
        )  # fmt: skip
    axes.set_ylim(max(len(bars.rows), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.set_xlabel("mean probability p")
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)


def _x_label(panel: Panel) -> str:
    window = max((series.window for series in panel.series), default=1)
    return f"{panel.x} (running mean of {window})" if window > 1 else panel.x


def text(label: str) -> str:
    """``one_line`` for matplotlib, which would read ``$x$`` as mathematics."""
    return one_line(label).replace("$", r"\$")


class _LogLabel(LogFormatter):
    """Three digits at most, where matplotlib writes 5.01375 x 10^-11."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.3g}" if super().__call__(x, pos) else ""


def log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_LogLabel())
    axes.yaxis.set_minor_formatter(_LogLabel(labelOnlyBase=False))


def _draw_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels below the figure, which grows by its height.

    None for a single label, that of a run: the page and the file have its name as their title.
    """
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if len(found) < 2:
        return
    columns = max(1, min(len(found), int(10 * figure.get_figwidth() / (9 + max(map(len, found))))))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(found) / columns))
    figure.legend(found.values(), found.keys(), loc="outside lower left", ncols=columns)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the file name's ending says: PNG with 200 dpi, SVG without a date."""
    with matplotlib.rc_context(RC):
        figures.save(
            figure, path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None
        )
