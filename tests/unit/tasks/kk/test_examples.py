"""The puzzles that the help and the pages tell people to generate can be generated."""

import re
from pathlib import Path

import pytest

from sg_rlhf.data.command import main

ROOT = Path(__file__).parents[4]
FILES = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md"), *(ROOT / "sg_rlhf").rglob("*.py")]
EXAMPLES = sorted(
    {
        words.strip()
        for path in FILES
        for words in re.findall(
            r"data kk --out \S+ --generate ((?:\w+=[\w-]+ ?)+)", path.read_text()
        )
    }
)


def test_there_are_some():
    assert len(EXAMPLES) > 4


@pytest.mark.parametrize("words", [words for words in EXAMPLES if "people=2-3" in words])
def test_they_can_be_made(words, tmp_path):
    assert main(["kk", "--out", str(tmp_path / "out"), "--generate", *words.split()]) == 0
