"""docs/known_problems.md: every test that it names exists in the file that it links."""

from __future__ import annotations

import re

from tests.unit.docs.page import ROOT


def test_every_row_has_its_test() -> None:
    page = ROOT / "docs" / "known_problems.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| [")]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", row)
        assert named, row
        for name, path in named:
            assert f"def {name}(" in (page.parent / path).read_text(), row
