"""How figures look: one style for the page and for papers, and matplotlib's SVG fit for HTML."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
#: Bars have no line style: what fills them differs for each round of the colours.
HATCHES = ("", "////", "....", "xxxx", "----", "oo", "++")
INK, MUTED, GRID, ALARM = "#1b1f24", "#59636e", "#e1e4e8", "#b3261e"
#: Each colour becomes a CSS variable in the page, so that dark mode can change it.
VARIABLES = {
    **{color: f"--s{i}" for i, color in enumerate(SERIES)},
    INK: "--ink", MUTED: "--muted", GRID: "--grid", ALARM: "--alarm",
}  # fmt: skip
#: Inches; a column of a two-column paper, and of the page.
WIDTH, HEIGHT = 4.6, 2.8
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


def color(index: int) -> str:
    """The colour of the group or part at ``index``."""
    return SERIES[index % len(SERIES)]


def style(index: int) -> str | tuple[int, tuple[float, ...]]:
    """The line style of the group at ``index``."""
    return LINES[index % len(LINES)]


def fill(index: int) -> dict[str, Any]:
    """How the bars of the group at ``index`` are filled."""
    hatch = HATCHES[index // len(SERIES) % len(HATCHES)]
    return {"color": color(index)} | ({"hatch": hatch, "edgecolor": GRID} if hatch else {})


def dashes(index: int) -> str:
    """The line style of the group at ``index`` as ``stroke-dasharray``."""
    line = style(index)
    return "none" if isinstance(line, str) else " ".join(f"{2 * part:g}" for part in line[1])


def whole_numbers(axes: Axes, label: str = "rollout") -> None:
    """The x axis counts rollouts (or steps)."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


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


def draw_seeds(axes: Axes, curves: list[Curve], index: int, label: str, *, window: int = 1) -> bool:
    """One group: a line, or for several seeds their mean, their range, and each thinly.

    Returns:
        Whether there was anything to draw.
    """
    curves = [curve for curve in curves if curve]
    if not curves:
        return False
    smoothed = [
        list(zip([x for x, _ in curve], smooth([y for _, y in curve], window), strict=True))
        for curve in curves
    ]
    look: dict[str, Any] = {"color": color(index), "solid_capstyle": "round"}
    if len(curves) == 1:
        xs, ys = [x for x, _ in curves[0]], [y for _, y in curves[0]]
        if window > 1:
            axes.plot(xs, ys, alpha=0.3, linewidth=0.8, **look)
        mean = [y for _, y in smoothed[0]]
        marker = "o" if len(xs) == 1 else None
        axes.plot(
            xs, mean, linewidth=1.7, label=label, linestyle=style(index), marker=marker, **look
        )
        return True
    for curve in smoothed:
        axes.plot([x for x, _ in curve], [y for _, y in curve], alpha=0.35, linewidth=0.7, **look)
    xs, mean, low, high = band(smoothed)
    axes.fill_between(xs, low, high, color=color(index), alpha=0.18, linewidth=0)
    axes.plot(xs, mean, linewidth=1.9, label=label, linestyle=style(index), **look)
    return True


def legend(axes: Axes, location: str = "best") -> None:
    """A legend, if anything has a label; ``above`` puts it over the axes, many go below."""
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > LEGEND_INSIDE:
        legend_of_figure([axes])
    elif location == "above":
        legend_of_figure([axes], "upper")
    elif handles:
        axes.legend(loc=location)


def legend_of_figure(panels: Sequence[Axes], side: str = "lower") -> None:
    """One legend for all panels at a side of the figure, which grows by its height."""
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    figure = panels[0].get_figure(root=True)
    if not found or figure is None:
        return
    entry = LEGEND_HANDLE + LEGEND_LETTER * max(map(len, found))
    columns = min(len(found), max(1, int(figure.get_figwidth() / entry)))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * math.ceil(len(found) / columns))
    figure.legend(found.values(), found.keys(), loc=f"outside {side} left", ncols=columns)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the file name's ending says: PNG with 200 dpi, SVG with drawn letters."""
    with matplotlib.rc_context({**RC, "svg.fonttype": "path"}):
        figures.save(
            figure, path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None
        )


def readout(figure: Figure) -> list[dict[str, Any]]:
    """The values behind a figure that was drawn: for the tip of the page.

    Returns:
        For each panel with lines or bars that have a label: its ``box`` (left, top, right, bottom)
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
        for bars in axes.containers:
            if isinstance(bars, BarContainer) and bars.orientation == "vertical":
                points = [(b.get_x() + b.get_width() / 2, b.get_height()) for b in bars]
                series.setdefault(bars.get_label(), []).extend(points)
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


def html_svg(figure: Figure, key: str, label: str, *, letters: bool = True) -> str:
    """The figure as an ``<svg>`` element for the page: no fixed size, colours as CSS variables.

    Args:
        key: put in front of every id, so that figures do not share any.
        label: what a screen reader says.
        letters: keep text as text; False draws it, for text whose width must not change.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context({**RC, "svg.fonttype": "none" if letters else "path"}):
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
    if name == "style":
        # The page's own font; black is what matplotlib leaves unsaid.
        value = re.sub(r"font: ([^;']*?)([\d.]+px)[^;]*", r"font-size: \2", value)
        value = re.sub(r"font-family: [^;]*;?", "", value)
        value = re.sub(
            r"#[0-9a-f]{6}",
            lambda m: f"var({VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0],
            value,
        )
    return value
