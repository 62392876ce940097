"""Figure 3: likely and unlikely tokens, as a real tokenizer writes them."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sg_rlhf.report.chart import Bars, Missing
from sg_rlhf.report.runs import Group, Run
from sg_rlhf.report.token_probabilities import SHOWN, chart, label, token_texts


def row(**of_token: float) -> dict[str, Any]:
    return {"tokens": [*of_token], "log_probs": [math.log(p) for p in of_token.values()]}


def test_a_token_has_its_count_and_its_mean_probability() -> None:
    rows = [row(a=0.2, b=0.9), row(a=0.4, c=0.1), row(b=0.7)]
    assert [(t.text, t.count, round(t.mean, 6)) for t in token_texts(rows, least=2)] == [
        ("a", 2, 0.3),
        ("b", 2, 0.8),
    ]


def test_bytes_of_a_character_are_left_out() -> None:
    """A byte-level tokenizer has tokens for single bytes; all of them decode to the same text."""
    alphabet = {piece: k for k, piece in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pieces = [tokenizer.decode([k]) for k in tokenizer.encode("4 数\n").ids]
    assert len(pieces) == 6
    found = token_texts([{"tokens": pieces, "log_probs": [-0.1] * 6}] * 3, least=1)
    assert [label(token.text) for token in found] == ["↵", "␣", "4"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" +", "␣+"),
        ("\n\n", "↵↵"),
        ("\tif", "⇥if"),
        (" " * 12, "␣×12"),
        ("", "(empty)"),
        ("\u202e", "⟨U+202E⟩"),
        ("x" * 40, "x" * 23 + "…"),
    ],
)
def test_a_label_shows_what_a_token_is(text: str, shown: str) -> None:
    assert label(text) == shown


def group(tokens: list[str]) -> Group:
    samples = [{"tokens": tokens, "log_probs": [-0.01 * k for k in range(len(tokens))]}]
    return Group("run", (Run(Path(), "run", [], [], samples, []),))


def labels(groups: list[Group]) -> list[list[str]]:
    """Of each side of each group, from the least probable or from the most probable."""
    panels = [panel for panel in chart(groups).panels if isinstance(panel, Bars)]
    return [[text for text, _, _ in panel.rows] for panel in panels]


def test_no_token_is_on_both_sides() -> None:
    sides = labels([group([f"w{k}" for k in range(5)] * 10)])
    assert sorted(itertools.chain(*sides)) == ["w0", "w1", "w2", "w3", "w4"]
    many = labels([group([f"w{k}" for k in range(100)] * 10)])
    assert list(map(len, many)) == [SHOWN, SHOWN]


def test_a_group_without_frequent_tokens_leaves_the_others_theirs() -> None:
    with pytest.raises(Missing, match="No token occurs 10 times"):
        chart([group(["a"] * 9)])
    assert list(map(len, labels([group(["a"] * 9), group(["a", "b"] * 10)]))) == [0, 0, 1, 1]
