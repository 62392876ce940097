"""The figures about single tokens: the weight curve over p, and which tokens are likely."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ft2font import FT2Font
from matplotlib.textpath import text_to_path
from wordcloud import WordCloud

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import ALARM, INK, MUTED
from sg_rlhf.report.figures import Missing
from sg_rlhf.report.runs import Group, Row
from sg_rlhf.report.samples import TokenCount, clouds, frequent_tokens, probability_histogram
from sg_rlhf.report.text import drawn
from sg_rlhf.report.weighting import weighting_of

CURVE_POINTS = 401
HISTOGRAM_BINS = 20
#: Pixels of the layout that wordcloud computes.
CLOUD_SIZE = (520, 300)
CLOUD_WORD_CHARACTERS = 24
#: Parts of a response in the figure by position, and tokens that a part needs.
POSITION_BINS, LEAST_AT_POSITION = 40, 5
#: Inches.
CLOUDS_WIDTH, MARGIN, TITLE = 8.0, 0.08, 0.32


def weight_curve(groups: list[Group]) -> Figure:
    """w(p) with the dead zones shaded, above the histogram of p."""
    figure, (top, bottom) = drawing.subplots(2, height=3.5, sharex=True)
    probs = [i / (CURVE_POINTS - 1) for i in range(CURVE_POINTS)]
    log_probs = [math.log(p) if p else -math.inf for p in probs]
    known, largest = 0, 0.0
    for index, group in enumerate(groups):
        rule = weighting_of(group.runs[0]).rule
        color, name = drawing.color(index), drawn(group.name)
        if rule is not None:
            known += 1
            top.plot(
                probs, rule.weights(log_probs), color=color, lw=1.9,
                ls=drawing.style(index), label=name,
            )  # fmt: skip
            for dead in rule.dead_zones():
                assert dead.zone is not None  # the weight is a function of p
                (first, last), sign = dead.zone, ">" if dead.positive else "<"
                top.axvspan(
                    first, last, facecolor=color, alpha=0.13, lw=0,
                    label=f"dead zone for A {sign} 0: {first:.3g} < p < {last:.3g}",
                )  # fmt: skip
                hatch = "//" if dead.positive else "\\\\"
                top.axvspan(first, last, facecolor="none", edgecolor=color, alpha=0.35, hatch=hatch)
        else:
            top.plot(
                [], [], color=color, ls=drawing.style(index),
                label=f"{name}: no curve, see the table of runs",
            )  # fmt: skip
        shares, source = probability_histogram(group, HISTOGRAM_BINS)
        if sum(shares):
            edges = [i / HISTOGRAM_BINS for i in range(HISTOGRAM_BINS + 1)]
            fill = len(groups) == 1
            bottom.stairs(
                shares, edges, color=color, fill=fill, alpha=0.75 if fill else 1.0,
                lw=1.6, ls=drawing.style(index), label=source,
            )  # fmt: skip
            largest = max(largest, *shares)
    if not known and not largest:
        raise Missing("Neither the weighting nor any token probability is known.")
    top.set_ylabel("weight w")
    top.margins(y=0.2)
    bottom.set_ylabel("share of tokens")
    bottom.set_xlabel("token probability p")
    bottom.set_xlim(0, 1)
    if largest > 0.5:  # most tokens are near p = 1; the others must be seen too
        bottom.set_yscale("log")
    drawing.legend(top)
    if len(groups) == 1:
        drawing.legend(bottom)
    return figure


def by_position(groups: list[Group]) -> Figure:
    """What the samples' tokens are like along the response."""
    found = [(name, [position_means(group, of) for group in groups]) for name, of in POSITIONED]
    found = [(name, curves) for name, curves in found if any(curves)]
    if not found:
        raise Missing("The samples have no token probabilities.")
    figure, panels = drawing.subplots(len(found), height=0.6 + 0.8 * len(found), sharex=True)
    for axes, (name, curves) in zip(panels, found, strict=True):
        for index, curve in enumerate(curves):
            axes.plot(
                [x for x, _ in curve], [y for _, y in curve], color=drawing.color(index),
                ls=drawing.style(index), lw=1.7, label=drawn(groups[index].label),
            )  # fmt: skip
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("token of the response")
    if len(groups) > 1:
        drawing.legend_of_figure(panels)
    return figure


def _uncertainty(row: Row) -> list[float]:
    return [1 - math.exp(min(0.0, v)) for v in row["log_probs"]]


def _entropy(row: Row) -> list[float]:
    return row.get("entropies") or []


def _difference(row: Row) -> list[float]:
    engine = row.get("engine_log_probs") or []
    return [abs(a - b) for a, b in zip(row["log_probs"], engine, strict=False)]


POSITIONED: tuple[tuple[str, Callable[[Row], list[float]]], ...] = (
    ("1 - p", _uncertainty), ("entropy (nats)", _entropy), ("|trainer - engine|", _difference),
)  # fmt: skip


def position_means(group: Group, of: Callable[[Row], list[float]]) -> list[tuple[float, float]]:
    """(position, mean over samples) in ``POSITION_BINS`` equal parts of the longest response.

    Args:
        of: a value for each token of a sample, or none.
    """
    values = [of(row) for run in group.runs for row in run.samples]
    longest = max(map(len, values), default=0)
    width = max(1, math.ceil(longest / POSITION_BINS))
    parts: dict[int, list[float]] = defaultdict(list)
    for of_sample in values:
        for k, value in enumerate(of_sample):
            parts[k // width].append(value)
    return [
        (part * width + (width + 1) / 2, math.fsum(found) / len(found))
        for part, found in sorted(parts.items())
        if len(found) >= LEAST_AT_POSITION
    ]


def word_clouds(groups: list[Group]) -> Figure:
    """Frequent tokens of the highest and lowest mean probability, sized by count (Figure 3)."""
    found = [(group, *clouds(frequent_tokens(group))) for group in groups]
    found = [entry for entry in found if entry[1]]
    if not found:
        raise Missing("The samples hold no token often enough for a word cloud.")
    # A word's place and size are exact, so the panels are too: no automatic layout here.
    panel_width = (CLOUDS_WIDTH - 3 * MARGIN) / 2
    panel_height = panel_width * CLOUD_SIZE[1] / CLOUD_SIZE[0]
    height = len(found) * (panel_height + TITLE)
    figure = Figure(figsize=(CLOUDS_WIDTH, height))
    for row, (group, likely, unlikely) in enumerate(found):
        for column, (tokens, name) in enumerate(((likely, "highest"), (unlikely, "lowest"))):
            left = MARGIN + column * (panel_width + MARGIN)
            bottom = height - row * (panel_height + TITLE) - TITLE - panel_height
            panel = figure.add_axes(
                (left / CLOUDS_WIDTH, bottom / height, panel_width / CLOUDS_WIDTH,
                 panel_height / height)
            )  # fmt: skip
            panel.set_axis_off()
            panel.set(xlim=(0, CLOUD_SIZE[0]), ylim=(CLOUD_SIZE[1], 0))
            mean = math.fsum(t.mean_p * t.count for t in tokens) / sum(t.count for t in tokens)
            who = f"{drawn(group.name)}: " if len(found) > 1 else ""
            panel.set_title(
                f"{who}{len(tokens)} with the {name} mean p ({mean:.2f} on average)",
                fontsize=9, color=MUTED,
            )  # fmt: skip
            points = panel_width * 72 / CLOUD_SIZE[0]
            _draw_cloud(panel, tokens, drawing.color(0) if column == 0 else ALARM, points)
    return figure


def _draw_cloud(panel: Axes, tokens: list[TokenCount], color: str, points: float) -> None:
    """Places the words as wordcloud lays them out; ``points`` is the size of its pixel."""
    cloud = WordCloud(
        width=CLOUD_SIZE[0], height=CLOUD_SIZE[1], random_state=0, prefer_horizontal=1.0,
        max_words=len(tokens), relative_scaling=0.3, min_font_size=7, max_font_size=56, margin=6,
    )  # fmt: skip
    face = FT2Font(cloud.font_path)
    letters = face.get_charmap()
    # Only tokens that the font can draw; the table beside the clouds has them all.
    counts = {
        token.text[:CLOUD_WORD_CHARACTERS]: float(token.count)
        for token in tokens
        if all(ord(c) in letters for c in token.text)
    }
    if not counts:
        return
    cloud.generate_from_frequencies(counts)
    for index, ((word, _), size, (y, x), _, _) in enumerate(cloud.layout_):
        font = FontProperties(fname=cloud.font_path, size=size * points)
        # wordcloud places the ink of a word, matplotlib its first letter's origin.
        points_of_ink, _ = text_to_path.get_text_path(font, word, ismath=False)
        ink = np.asarray(points_of_ink) * size / text_to_path.FONT_SCALE
        panel.text(
            x - ink[:, 0].min(), y + ink[:, 1].max(), word, va="baseline", ha="left",
            parse_math=False, fontproperties=font, color=color if index % 3 else INK,
        )  # fmt: skip
