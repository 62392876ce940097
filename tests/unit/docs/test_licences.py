"""docs/licences.md names every locked package, with the licence that the installed one states."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOCKED = dict(
    re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / "cpu.lock").read_text(), re.M)
)


def test_the_tables_are_as_made() -> None:
    there = {one.metadata["Name"].lower().replace("_", "-") for one in metadata.distributions()}
    other = [name for name in LOCKED if name.lower().replace("_", "-") not in there]
    if other:
        pytest.skip(f"not the environment of requirements/cpu.lock: {other[0]}")
    checked = subprocess.run(
        [sys.executable, "docs/make_licences.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_locked_package_has_a_row() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    assert not [name for name in LOCKED if f"| {name} | " not in page]
