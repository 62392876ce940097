"""Which tokens were likely and which were not: the paper's Figure 3."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from sg_rlhf.report.chart import Bars, Chart, Missing, look
from sg_rlhf.report.runs import Group, Row
from sg_rlhf.report.text import visible

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
    return shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 1]}\u2026"


def chart(groups: list[Group]) -> Chart:
    """For each group the least and the most probable tokens, as bars of mean p with counts."""
    tables = [token_texts(row for run in group.runs for row in run.samples) for group in groups]
    if not any(tables):
        raise Missing(f"No token occurs {LEAST} times in samples.jsonl.")
    panels = []
    for index, (group, found) in enumerate(zip(groups, tables, strict=True)):
        half = min(SHOWN, math.ceil(len(found) / 2))
        sides = {"least probable": found[:half], "most probable": found[half:][-SHOWN:][::-1]}
        for title, tokens in sides.items():
            name = f"{group.label}: {title}" if len(groups) > 1 else title
            rows = [(label(token.text), token.mean, token.count) for token in tokens]
            panels.append(Bars(name, look(index)["colour"], rows))
    return Chart(panels, columns=2)
