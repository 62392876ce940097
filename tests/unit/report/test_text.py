"""Untrusted text is made visible and cannot leave the place it is embedded in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sg_rlhf.report.text import embedded_json, one_line, visible
from tests.unit.report.synthetic import HOSTILE


@given(st.text())
def test_visible_text_can_be_written_and_has_no_control_characters(text: str) -> None:
    shown = visible(text)
    shown.encode("utf-8")
    assert all(c in "\n\t" or c.isprintable() or c.isspace() for c in shown)
    assert "\u2028" not in shown and "\u202e" not in shown and "\x00" not in shown


def test_what_is_shown_for_what_cannot_be_seen() -> None:
    assert visible("a\ud800b") == "a⟨U+D800⟩b"
    assert visible("\u202eabc") == "⟨U+202E⟩abc"
    assert visible("日本 é\n\tx") == "日本 é\n\tx"
    assert one_line("a\n  b\x00") == "a b⟨U+0000⟩"


@pytest.mark.parametrize("text", HOSTILE)
def test_embedded_json_cannot_end_its_element_and_comes_back(text: str) -> None:
    embedded = embedded_json({"x": [text]})
    assert embedded.isascii()
    assert not set("<>&") & set(embedded)
    assert json.loads(embedded) == {"x": [text]}


def test_embedded_json_refuses_what_json_has_not() -> None:
    with pytest.raises(ValueError):
        embedded_json([float("nan")])
