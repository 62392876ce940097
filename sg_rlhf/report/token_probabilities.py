"""Which tokens were likely and which were not: the paper's Figure 3."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sg_rlhf.report import drawing
from sg_rlhf.report.drawing import MUTED, Missing
from sg_rlhf.report.runs import Group, Row
from sg_rlhf.report.text import drawn, visible

#: A rarer token has no reliable mean.
LEAST = 10
#: Tokens on each side of a figure.
SHOWN = 15
#: Characters of a token on an axis.
WIDEST = 24
#: What a tokenizer gives for bytes that are only a part of a character.
PART_OF_CHARACTER = "\ufffd"
PICTURES = str.maketrans({" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5"})


@dataclass(frozen=True)
class TokenText:
    """Tokens with one text: how often it was sampled, and the mean of its probability p."""

    text: str
    count: int
    mean: float


def token_texts(rows: Iterable[Row], least: int = LEAST) -> list[TokenText]:
    """Texts that occur ``least`` times in the samples, the least probable first.

    Bytes that are a part of a character are left out: different tokens have the same text.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for text, log_prob in zip(row["tokens"], row["log_probs"], strict=True):
            found[text].append(math.exp(min(0.0, log_prob)))
    kept = [
        TokenText(text, len(ps), statistics.fmean(ps))
        for text, ps in found.items()
        if len(ps) >= least and text.strip(PART_OF_CHARACTER)
    ]
    return sorted(kept, key=lambda token: (token.mean, token.text))


def label(text: str) -> str:
    """A token's text as one line: spaces, line ends and tabs as characters that can be seen."""
    spaces = re.sub(r" {4,}", lambda run: f"\u2423\u00d7{len(run[0])}", text)
    shown = visible(spaces.translate(PICTURES)) or "(empty)"
    return drawn(shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 1]}\u2026")


def draw(groups: list[Group]) -> Figure:
    """For each group the least and the most probable tokens, as bars of mean p with counts."""
    tables = [token_texts(row for run in group.runs for row in run.samples) for group in groups]
    if not any(tables):
        raise Missing(f"No token occurs {LEAST} times in samples.jsonl.")
    height = sum(0.9 + 0.19 * min(SHOWN, max(1, math.ceil(len(t) / 2))) for t in tables)
    figure, axes = drawing.subplots(
        len(groups), 2, width=2 * drawing.WIDTH, height=height, sharex=True
    )
    for index, (group, found) in enumerate(zip(groups, tables, strict=True)):
        half = min(SHOWN, math.ceil(len(found) / 2))
        sides = {"least probable": found[:half], "most probable": found[half:][-SHOWN:][::-1]}
        for panel, (title, tokens) in zip(axes[2 * index :], sides.items(), strict=False):
            name = f"{group.label}: {title}" if len(groups) > 1 else title
            panel.set_title(drawn(name), loc="left", fontsize=9)
            _bars(panel, tokens, drawing.color(index))
    for panel in axes[-2:]:
        panel.set_xlabel("mean probability p")
    return figure


def _bars(axes: Axes, tokens: list[TokenText], colour: str) -> None:
    places = range(len(tokens))
    axes.barh(places, [token.mean for token in tokens], color=colour, alpha=0.75, height=0.7)
    axes.set_yticks(places, [label(token.text) for token in tokens])
    for place, token in zip(places, tokens, strict=True):
        axes.annotate(
            f"{token.count:,}", (token.mean, place), (4, 0), textcoords="offset points",
            va="center", fontsize=7.5, color=MUTED,
        )  # fmt: skip
    axes.set_ylim(max(len(tokens), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
