"""How figures look: one style for the page and for papers, and matplotlib's SVG fit for HTML."""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.ticker import LogFormatter, MaxNLocator

from sg_rlhf.common import figures
from sg_rlhf.report.runs import Curve

#: Okabe and Ito's palette: told apart with any colour vision. Line styles differ as well, and
#: repeat at another length than the colours: 42 groups look different, and those of one colour
#: have neighbours in LINES, which are unlike each other.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "-", (0, (7, 2)), (0, (8, 2, 1.5, 2)), (0, (2.5, 1.2)), (0, (16, 2.5)), (0, (1, 1.6)),
    (0, (6, 1.5, 1, 1.5, 1, 1.5)),
)  # fmt: skip
INK, MUTED, GRID, ALARM = "#1b1f24", "#59636e", "#e1e4e8", "#b3261e"
#: Each colour becomes a CSS variable in the page, so that dark mode can change it.
VARIABLES = {
    **{color: f"--s{i}" for i, color in enumerate(SERIES)},
    INK: "--ink", MUTED: "--muted", GRID: "--grid", ALARM: "--alarm",
}  # fmt: skip
#: Opacity of a thin line: visible on a dark page, and behind the thick one.
THIN = 0.5
#: Inches; a column of a two-column paper, and of the page.
WIDTH, HEIGHT = 4.6, 2.8
#: Panels of a figure that takes the width of the page, in a row.
PANELS_IN_A_ROW = 3
#: Inches; a row of a legend, and what an entry needs besides and for each letter.
LEGEND_ROW, LEGEND_HANDLE, LEGEND_LETTER = 0.18, 0.55, 0.06
#: More labels than this would cover what they explain.
LEGEND_INSIDE = 6
#: Of each line, in the tip of the page.
READOUT_POINTS = 150
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"

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
    "path.simplify_threshold": 0.3,
}


class Missing(ValueError):
    """The runs do not hold what a figure shows; one sentence for the page."""


def subplots(
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = WIDTH,
    height: float = HEIGHT,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure in the report's style and its axes, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=sharex, sharey=sharey, squeeze=False)
    return figure, [axis for row in axes for axis in row]


def wide_panels(count: int, label: str) -> tuple[Figure, list[Axes]]:
    """Panels of one scale for a figure that takes the width of the page."""
    columns = min(PANELS_IN_A_ROW, count)
    rows = math.ceil(count / columns)
    figure, panels = subplots(rows, columns, width=2 * WIDTH, height=0.5 + 2.1 * rows, sharey=True)
    for panel in panels[count:]:
        panel.set_visible(False)
    for panel in panels[::columns]:
        panel.set_ylabel(label)
    return figure, panels


def color(index: int) -> str:
    """The colour of the group or part at ``index``."""
    return SERIES[index % len(SERIES)]


def style(index: int) -> str | tuple[int, tuple[float, ...]]:
    """The line style of the group at ``index``."""
    return LINES[index % len(LINES)]


def dashes(index: int) -> str:
    """The line style of the group at ``index`` as ``stroke-dasharray``."""
    line = style(index)
    return "none" if isinstance(line, str) else " ".join(f"{2 * part:g}" for part in line[1])


def whole_numbers(axes: Axes, label: str = "rollout") -> None:
    """The x axis counts rollouts (or steps)."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


class _LogLabel(LogFormatter):
    """Three digits at most, where matplotlib writes 5.01375 x 10^-11."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:.3g}" if super().__call__(x, pos) else ""


def log_scale(axes: Axes) -> None:
    """A logarithmic y axis."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_LogLabel())
    axes.yaxis.set_minor_formatter(_LogLabel(labelOnlyBase=False))


def window_of(length: int) -> int:
    """How many rows a running mean takes: a fifth of the run, 1 to 15."""
    return max(1, min(15, length // 5))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values."""
    return [statistics.fmean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def band(curves: list[Curve]) -> tuple[list[float], list[float], list[float], list[float]]:
    """(x, mean, lowest, highest) over the curves, at the x that all of them have."""
    tables = [dict(curve) for curve in curves]
    xs = sorted(set.intersection(*(set(table) for table in tables)))
    at = [[table[x] for table in tables] for x in xs]
    return xs, [statistics.fmean(v) for v in at], [min(v) for v in at], [max(v) for v in at]


def draw_seeds(axes: Axes, curves: list[Curve], index: int, label: str, *, window: int = 1) -> None:
    """One group: a line, or for several seeds their mean, their range, and each thinly."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    one = len(curves) == 1
    smoothed = [
        list(zip([x for x, _ in curve], smooth([y for _, y in curve], window), strict=True))
        for curve in curves
    ]
    look: dict[str, Any] = {"color": color(index), "solid_capstyle": "round"}
    if not one or window > 1:
        for curve in curves if one else smoothed:
            xs, ys = [x for x, _ in curve], [y for _, y in curve]
            axes.plot(xs, ys, alpha=THIN, linewidth=0.9, **look)
    xs, mean, low, high = band(smoothed)
    if not one:
        axes.fill_between(xs, low, high, color=color(index), alpha=0.18, linewidth=0)
    marker = "o" if len(xs) == 1 else None
    axes.plot(xs, mean, linewidth=1.8, label=label, linestyle=style(index), marker=marker, **look)


def legend(axes: Axes, *, least: int = 2) -> None:
    """A legend, if there are ``least`` labels; of many labels below the figure.

    The label of a single run says nothing: the page and the file have its name as their title.
    """
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > LEGEND_INSIDE:
        legend_of_figure([axes])
    elif len(handles) >= least:
        axes.legend(loc="best")


def legend_of_figure(panels: Sequence[Axes], *, least: int = 2) -> None:
    """One legend for all panels below the figure, which grows by its height."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure = panels[0].get_figure(root=True)
    if len(found) < least or figure is None:
        return
    entry = LEGEND_HANDLE + LEGEND_LETTER * max(map(len, found))
    columns = min(len(found), max(1, int(figure.get_figwidth() / entry)))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(found) / columns))
    figure.legend(found.values(), found.keys(), loc="outside lower left", ncols=columns)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the file name's ending says: PNG with 200 dpi, SVG with drawn letters."""
    with matplotlib.rc_context({**RC, "svg.fonttype": "path"}):
        figures.save(
            figure, path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None
        )


def readout(figure: Figure) -> list[dict[str, Any]]:
    """The values behind a figure that was drawn: for the tip of the page.

    Returns:
        For each panel with lines or steps that have a label: its ``box`` (left, top, right, bottom)
        in units of the SVG, the name of ``x``, and for each label its points (place in the box,
        x, y), at most ``READOUT_POINTS``.
    """
    height = 72 * figure.get_figheight()
    panels = []
    for axes in figure.axes:
        series = {}
        for line in axes.lines:
            if _is_named(line.get_label()):
                series[line.get_label()] = [(float(x), float(y)) for x, y in line.get_xydata()]
        for container in axes.containers:
            if _is_named(container.get_label()):  # points with error bars
                series[container.get_label()] = [tuple(p) for p in container[0].get_xydata()]
        for steps in axes.patches:
            if isinstance(steps, StepPatch):
                tops, edges, below = steps.get_data()
                middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
                heights = np.asarray(tops) - (0 if below is None else below)
                series[steps.get_label()] = list(zip(middles, map(float, heights), strict=True))
        named = {n: p for n, p in series.items() if _is_named(n) and any(_finite(q) for q in p)}
        if not named or not axes.get_visible():
            continue
        box = axes.get_position()
        width = 72 * figure.get_figwidth()
        edges = (box.x0 * width, (1 - box.y1) * height, box.x1 * width, (1 - box.y0) * height)
        panels.append(
            {
                "box": [round(edge, 1) for edge in edges],
                "x": axes.get_xlabel(),
                "series": [[name, _placed(axes, points)] for name, points in named.items()],
            }
        )
    # Panels that share an axis name it once, on the last.
    for panel in panels:
        panel["x"] = panel["x"] or panels[-1]["x"]
    return panels


def _is_named(label: Any) -> bool:
    return bool(label) and not str(label).startswith("_")


def _finite(point: tuple[float, float]) -> bool:
    return all(map(math.isfinite, point))


def _placed(axes: Axes, points: Sequence[tuple[float, float]]) -> list[list[float]]:
    figure = axes.get_figure(root=True)
    assert figure is not None
    usable = [point for point in points if _finite(point)]
    kept = usable[:: max(1, math.ceil(len(usable) / READOUT_POINTS))]
    low, high = sorted(axes.get_xlim())
    return [
        [round(float(axes.transData.transform((x, y))[0]) * 72 / figure.dpi, 1),
         float(f"{x:.6g}"), float(f"{y:.4g}")]
        for x, y in kept
        if low <= x <= high
    ]  # fmt: skip


def html_svg(figure: Figure, key: str, label: str) -> str:
    """The figure as an ``<svg>`` element for the page: no fixed size, colours as CSS variables.

    Args:
        key: put in front of every id, so that figures do not share any.
        label: what a screen reader says.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**RC, "svg.fonttype": "none"}):
        figures.save(figure, buffer, format="svg", transparent=True, metadata={"Date": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    # Our own output, so no parser is needed that distrusts it; comments are dropped on the way.
    root = ElementTree.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # matplotlib's style sheet is for every element of the page, and its metadata is noise.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        for name, value in element.attrib.items():
            element.set(name, _for_page(name, value, key))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("style", "stroke-linejoin:round;stroke-linecap:butt")
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _for_page(name: str, value: str, key: str) -> str:
    if name == "id":
        return f"{key}-{value}"
    if name == f"{{{_XLINK}}}href":
        return value.replace("#", f"#{key}-")
    value = value.replace("url(#", f"url(#{key}-")
    if name in ("style", "fill"):
        # The page's own font; black is what matplotlib leaves unsaid.
        value = re.sub(r"font: ([^;']*?)([\d.]+px)[^;]*", r"font-size: \2", value)
        value = re.sub(r"font-family: [^;]*;?", "", value)
        colors = {color: f"var({variable})" for color, variable in VARIABLES.items()}
        value = re.sub(r"#[0-9a-f]{6}", lambda m: colors.get(m[0], m[0]), value)
    return value
