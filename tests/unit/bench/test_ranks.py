"""Processes of one job: all of their lines, and an end for those that would wait."""

from __future__ import annotations

import sys

import pytest

from bench.common import rank_outputs

SAYS = "import os; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
FAILS = """
import os, sys, time

if os.environ["RANK"] == "1":
    print("x" * 100_000, file=sys.stderr)  # more than a pipe holds
    sys.exit("no memory")
time.sleep(3600)
"""


def test_each_rank_says_its_own() -> None:
    assert rank_outputs([sys.executable, "-c", SAYS], 3) == ["0 of 3\n", "1 of 3\n", "2 of 3\n"]


def test_one_that_fails_ends_the_others() -> None:
    with pytest.raises(SystemExit, match="rank 1: x+\nno memory"):
        rank_outputs([sys.executable, "-c", FAILS], 2)


def test_one_that_hangs_is_ended() -> None:
    with pytest.raises(SystemExit, match="not done after 1 s"):
        rank_outputs([sys.executable, "-c", "import time; time.sleep(60)"], 1, limit=1)
