"""docs/gpu.md says what the stages are and which results there are."""

from __future__ import annotations

import json
from pathlib import Path

from tests.gpu.stages import table

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_the_table_is_the_stages() -> None:
    """`bash tests/gpu.sh --list` prints it."""
    assert table() in PAGE


def test_the_results_are_those_that_exist() -> None:
    found = sorted((ROOT / "tests" / "gpu" / "results").glob("*.json"))
    none = "**None: no stage has run on a GPU yet.**"
    assert (none in PAGE) == (not found)
    for file in found:
        status = json.loads(file.read_text())["status"]
        assert f"| `{file.name}` | {status} |" in PAGE
