"""docs/configuration.md has every key of a recipe, as the schemas have it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from sg_rlhf.config.upstream_flags import flags

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "configuration.md").read_text()


def test_the_tables_are_as_the_schemas() -> None:
    checked = subprocess.run(
        [sys.executable, "docs/make_configuration.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_key_of_openrlhf_has_a_meaning_and_no_other_has() -> None:
    meanings = yaml.safe_load((ROOT / "docs" / "upstream_keys.yaml").read_text())
    assert meanings.keys() == flags().keys()
    assert all(isinstance(text, str) and text for text in meanings.values())


def test_the_environment_variables_are_those_that_the_code_reads() -> None:
    sources = [
        *(ROOT / "sg_rlhf").rglob("*.py"), *(ROOT / "scripts").glob("*.sh"),
        *(ROOT / "examples" / "scripts").glob("*.sh"),
    ]  # fmt: skip
    code = "".join(file.read_text() for file in sources)
    named = re.findall(r"`(SG_[A-Z_]+)`", PAGE)
    assert named and all(name in code for name in named)
