"""Text for people."""

from __future__ import annotations

import pytest

from sg_rlhf.common import text


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (999.6, "1 KB"), (64.6e9, "64.6 GB"), (5e15, "5000 TB")],
)
def test_bytes(number: float, words: str) -> None:
    assert text.format_bytes(number) == words


def test_a_cell_with_a_bar_stays_one_cell() -> None:
    assert text.table_head(["a|b", "c"]) == ["| a\\|b | c |", "| --- | --- |"]
    assert text.table_row([1, text.EMPTY]) == "| 1 | – |"


def test_slow_work_is_named_and_quick_work_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with text.notice_if_slow("quick work"):
        pass
    monkeypatch.setattr(text, "SLOW_S", 0.0)
    shown = ""
    with text.notice_if_slow("hashing a file (64 GB)"):
        while not shown.endswith("\n"):
            shown += capsys.readouterr().err
    assert shown == "hashing a file (64 GB) ...\n"


def test_messages_have_one_line_and_a_length() -> None:
    assert text.single_line(ValueError("a\n b")) == "a b"
    assert text.truncate("x" * 200, 10) == "'xxxxxx..."
