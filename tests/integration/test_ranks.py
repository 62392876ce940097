"""Tests with several ranks end their process groups, whatever their scripts do."""

from __future__ import annotations

from tests.integration.conftest import run_ranks


def test_a_process_group_is_ended() -> None:
    assert run_ranks("left_open.py", 2) == ["0 False\n", "1 False\n"]
